#include "server/worker/shared_events.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "base/log.h"
#include "server/worker/warm.h"

namespace gpupool::server {

// Shared with other workers of the lease, which may write anything into it.
struct SharedEvents::Cell {
  struct Mark {
    std::atomic<uint64_t> reached;  // the record; devices write it
    std::atomic<uint64_t> by;       // the session
  };
  std::atomic<uint64_t> records;
  Mark marks[kMarks];

  Mark& of(uint64_t record) { return marks[record % kMarks]; }
  bool reached(uint64_t record) { return record == 0 || of(record).reached.load() >= record; }
};

struct SharedEvents::Slab {
  // As a context has it: its registration ends with the context (host_views.h).
  struct View {
    std::shared_ptr<transport::SharedMemory> memory;
    CUdeviceptr address = 0;
  };
  std::shared_ptr<transport::SharedMemory> memory;
  uint64_t piece = 0;               // of this session's own
  std::map<CUcontext, View> views;  // under views_
  // Of another session; left: when an event of it was forgotten last, counted, under mutex_.
  uint64_t inode = 0, left = 0;

  Cell& at(size_t index) { return *reinterpret_cast<Cell*>(memory->data() + index * kCellBytes); }
};

SharedEvents::~SharedEvents() {
  for (const auto& slab : own_) unregister(*slab);
  for (const auto& [inode, slab] : opened_) unregister(*slab);
}

void SharedEvents::unregister(Slab& slab) {
  for (auto& [context, view] : slab.views) {
    CUcontext popped = nullptr;
    if (driver_.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) continue;
    driver_.cuMemHostUnregister(view.memory->data());
    driver_.cuCtxPopCurrent_v2(&popped);
  }
  slab.views.clear();
}

bool SharedEvents::find(uint64_t event, Event& found) const {
  std::lock_guard lock(mutex_);
  const auto known = events_.find(event);
  if (known == events_.end()) return false;
  found = known->second;
  return true;
}

// Under mutex_.
CUresult SharedEvents::makeSlab() {
  static_assert(sizeof(Cell) <= kCellBytes);
  try {
    auto slab = std::make_shared<Slab>();
    slab->memory = transport::SharedMemory::create(kCells * kCellBytes);
    slab->piece = (uint64_t{1} << 32) + own_.size();  // no number that Space gives
    for (size_t i = 0; i < kCells; ++i) {
      new (slab->memory->data() + i * kCellBytes) Cell{};
      free_.emplace_back(slab, i);
    }
    own_.push_back(std::move(slab));
    return CUDA_SUCCESS;
  } catch (const std::exception& e) {
    GPUPOOL_WARNING("no memory for events that are shared: %s", e.what());
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

// Who has opened the event that had the cell before may look at it still, which CUDA calls undefined; so the
// cells take turns, and records go on counting.
CUresult SharedEvents::takeCell(Event& event) {
  std::lock_guard lock(mutex_);
  if (free_.size() <= kRest && own_.size() < kMostSlabs)
    if (CUresult result = makeSlab(); result != CUDA_SUCCESS) return result;
  if (free_.empty()) return CUDA_ERROR_OUT_OF_MEMORY;
  std::tie(event.slab, event.cell) = free_.front();
  free_.pop_front();
  return CUDA_SUCCESS;
}

CUresult SharedEvents::offer(uint64_t name, CUevent real, schema::ShareToken& token) {
  std::lock_guard one(offering_);
  Event event;
  if (find(name, event)) {
    token = event.token;
    return event.opening == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  }
  CUresult result = takeCell(event);
  if (result != CUDA_SUCCESS) return result;
  const auto giveBack = [&] {
    std::lock_guard lock(mutex_);
    free_.emplace_back(event.slab, event.cell);
    return result;
  };
  const transport::SharedMemory& memory = *event.slab->memory;
  const Account::Part part{Account::kHost, memory.size(), event.cell * kCellBytes, kCellBytes};
  result = account_.offer(event.slab->piece, part, memory.descriptor(), event.token);
  if (result != CUDA_SUCCESS) return giveBack();
  if (driver_.cuEventQuery(real) == CUDA_ERROR_NOT_READY) {
    CUstream behind = nullptr;
    result = driver_.cuStreamCreate(&behind, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS) {
      result = driver_.cuStreamWaitEvent(behind, real, 0);
      if (result == CUDA_SUCCESS) result = mark(event, behind, event.slab->at(event.cell));
      driver_.cuStreamDestroy_v2(behind);  // when it has got there
    }
  }
  if (result != CUDA_SUCCESS) {
    account_.endOffer(event.token, false);
    return giveBack();
  }
  token = event.token;
  std::lock_guard lock(mutex_);
  events_[name] = std::move(event);
  return CUDA_SUCCESS;
}

// Takes the descriptor. One that is known already is not mapped again. Null: it is none of ours.
std::shared_ptr<SharedEvents::Slab> SharedEvents::openSlab(int descriptor, size_t bytes) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0 || bytes != kCells * kCellBytes) {
    close(descriptor);
    return nullptr;
  }
  std::lock_guard lock(mutex_);
  std::shared_ptr<Slab>& slab = opened_[status.st_ino];
  if (slab != nullptr) {
    close(descriptor);
    return slab;
  }
  try {
    auto fresh = std::make_shared<Slab>();
    fresh->memory = transport::SharedMemory::adopt(descriptor, bytes);
    fresh->inode = status.st_ino;
    return slab = std::move(fresh);
  } catch (const std::exception& e) {
    GPUPOOL_WARNING("another session's events cannot be mapped: %s", e.what());
    opened_.erase(status.st_ino);
    return nullptr;
  }
}

CUresult SharedEvents::open(uint64_t name, const schema::ShareToken& token) {
  Account::Opened opened;
  if (CUresult result = account_.open(token, opened); result != CUDA_SUCCESS) return result;
  Event event;
  event.opening = opened.opening;
  const Account::Part& part = opened.part;
  const bool fits = part.place == Account::kHost && part.length == kCellBytes &&
                    part.offset % kCellBytes == 0 && part.offset / kCellBytes < kCells;
  if (fits)
    event.slab = openSlab(opened.descriptor, part.bytes);
  else
    close(opened.descriptor);
  if (event.slab == nullptr) {
    account_.close(opened.opening);
    return CUDA_ERROR_INVALID_HANDLE;
  }
  event.cell = part.offset / kCellBytes;
  std::lock_guard lock(mutex_);
  events_[name] = std::move(event);
  return CUDA_SUCCESS;
}

// Where devices see the mark of that record, in the current context.
CUresult SharedEvents::addressOf(const Event& event, uint64_t record, CUdeviceptr& address) {
  CUcontext context = nullptr;
  CUresult result = driver_.cuCtxGetCurrent(&context);
  if (result != CUDA_SUCCESS) return result;
  std::lock_guard lock(views_);
  Slab::View& view = event.slab->views[context];
  if (view.address == 0) {
    try {
      if (view.memory == nullptr)
        view.memory = transport::SharedMemory::adopt(
            fcntl(event.slab->memory->descriptor(), F_DUPFD_CLOEXEC, 0), event.slab->memory->size());
    } catch (const std::exception& e) {
      GPUPOOL_WARNING("shared events cannot be mapped for a context: %s", e.what());
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    result = driver_.cuMemHostRegister_v2(view.memory->data(), view.memory->size(), kHostRegistration);
    if (result == CUDA_SUCCESS)
      result = driver_.cuMemHostGetDevicePointer_v2(&view.address, view.memory->data(), 0);
    if (result != CUDA_SUCCESS) return result;
  }
  const size_t within = offsetof(Cell, marks) + record % kMarks * sizeof(Cell::Mark);
  address = view.address + event.cell * kCellBytes + within;
  return CUDA_SUCCESS;
}

// A record of the stream. One that so many later ones have followed has lost its mark to the last of them,
// which waits for it.
CUresult SharedEvents::mark(const Event& event, CUstream stream, Cell& cell) {
  CUdeviceptr address = 0;
  if (CUresult result = addressOf(event, 0, address); result != CUDA_SUCCESS) return result;
  const uint64_t record = cell.records.fetch_add(1) + 1;
  Cell::Mark& mark = cell.of(record);
  mark.by = account_.number();
  CUresult result = addressOf(event, record, address);
  if (result == CUDA_SUCCESS && record > kMarks && !cell.reached(record - kMarks))
    result = driver_.cuStreamWaitValue64_v2(stream, address, record - kMarks, CU_STREAM_WAIT_VALUE_GEQ);
  if (result == CUDA_SUCCESS)
    result = driver_.cuStreamWriteValue64_v2(stream, address, record, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (result != CUDA_SUCCESS) mark.reached = record;  // nobody is to wait for it
  return result;
}

// Slabs of which no event is open here, but for a few: who opens an event of a session and destroys it mostly
// goes on to the next one of that session. Until it is dropped, `gone` finds it.
void SharedEvents::dropLeft(const std::function<bool()>& idle) {
  std::vector<std::shared_ptr<Slab>> left;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [inode, slab] : opened_)
      if (slab.use_count() == 1) left.push_back(slab);
    std::sort(left.begin(), left.end(), [](const auto& a, const auto& b) { return a->left < b->left; });
  }
  if (left.size() <= kMostLeft || !idle()) return;
  left.resize(left.size() - kMostLeft);
  for (const auto& slab : left) {
    {
      std::lock_guard lock(mutex_);
      if (slab.use_count() != 2) continue;  // opened again meanwhile
      opened_.erase(slab->inode);
    }
    unregister(*slab);
  }
}

CUresult SharedEvents::record(uint64_t name, CUstream stream) {
  Event event;
  if (!find(name, event)) return CUDA_ERROR_INVALID_HANDLE;
  return mark(event, stream, event.slab->at(event.cell));
}

CUresult SharedEvents::wait(uint64_t name, CUstream stream) {
  Event event;
  if (!find(name, event)) return CUDA_ERROR_INVALID_HANDLE;
  Cell& cell = event.slab->at(event.cell);
  const uint64_t record = cell.records;
  if (cell.reached(record)) return CUDA_SUCCESS;
  CUdeviceptr address = 0;
  if (CUresult result = addressOf(event, record, address); result != CUDA_SUCCESS) return result;
  return driver_.cuStreamWaitValue64_v2(stream, address, record, CU_STREAM_WAIT_VALUE_GEQ);
}

CUresult SharedEvents::query(uint64_t name) const {
  Event event;
  if (!find(name, event)) return CUDA_ERROR_INVALID_HANDLE;
  Cell& cell = event.slab->at(event.cell);
  return cell.reached(cell.records) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

void SharedEvents::forget(uint64_t name, const std::function<bool()>& idle) {
  Event event;
  {
    std::lock_guard lock(mutex_);
    const auto known = events_.find(name);
    if (known == events_.end()) return;
    event = std::move(known->second);
    events_.erase(known);
    if (event.opening == 0) free_.emplace_back(event.slab, event.cell);
    event.slab->left = ++forgotten_;
    event.slab.reset();
  }
  if (event.opening == 0) return account_.endOffer(event.token, false);
  account_.close(event.opening);
  dropLeft(idle);
}

void SharedEvents::contextEnded(CUcontext context) {
  std::lock_guard lock(mutex_);
  std::lock_guard views(views_);
  for (const auto& slab : own_) slab->views.erase(context);
  for (const auto& [inode, slab] : opened_) slab->views.erase(context);
}

void SharedEvents::gone(uint64_t session) {
  std::vector<std::shared_ptr<Slab>> slabs;
  {
    std::lock_guard lock(mutex_);
    slabs = own_;
    for (const auto& [inode, slab] : opened_) slabs.push_back(slab);
  }
  for (const auto& slab : slabs)
    for (size_t i = 0; i < kCells; ++i) {
      Cell& cell = slab->at(i);
      // By age: any number may stand there, the largest, too.
      const uint64_t last = cell.records;
      for (uint64_t age = 0; age < std::min<uint64_t>(kMarks, last); ++age) {
        const uint64_t record = last - age;
        Cell::Mark& mark = cell.of(record);
        if (mark.by == session && mark.reached < record) mark.reached = record;
      }
    }
}

size_t SharedEvents::shared() const {
  std::lock_guard lock(mutex_);
  return events_.size();
}

}  // namespace gpupool::server
