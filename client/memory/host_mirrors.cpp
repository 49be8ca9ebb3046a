// Mirrors: memory that kernels address and that client and worker cannot share.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "client/memory/host.h"
#include "client/memory/pages.h"
#include "client/session.h"
#include "transports/waiting.h"

namespace gpupool::client {
namespace {

constexpr size_t kApplyBytes = size_t{64} << 10;     // runs of one message of ours, on the control channel
constexpr size_t kCollectBytes = size_t{256} << 10;  // and of the worker's
constexpr size_t kMostAsked = 64;                    // mirrors at a time
// How often pages may turn cold, for which the process's open files are looked through (0.1 ms for a
// hundred), and when that is tried again where devices may write.
constexpr std::chrono::milliseconds kCooling{200}, kUntrusted{2000};
constexpr size_t kLeastWatched = size_t{16} << 10;  // less is compared as soon as it is asked for
constexpr size_t kApart = size_t{64} << 10;         // of two mirrors that lie side by side
static_assert(schema::MirrorBase::kPage == WrittenPages::kPage);
// Where the session may come to share memory, all of one exchange is with one worker. A protected session
// never does, and who waits for an answer may wait for its next worker, which must not wait for that.
class OfOneWorker {
 public:
  OfOneWorker() {
    Session& session = Session::get();
    if (!session.isProtected()) inside_.emplace(session.transfers(), Transfers::alone);
  }

 private:
  std::optional<Transfers::Inside> inside_;
};

// What the runs of so many bytes take at worst, every other byte changed; the worker clears as much.
size_t runsBytes(size_t bytes) { return std::min(kCollectBytes, 12 * ((bytes + 7) / 8 * 8) + 128); }

}  // namespace

void HostMemory::addMirror(uint64_t host, uint64_t device, size_t bytes, Begins begins) {
  Mirror mirror{host, device, bytes, {}, {}};
  if (begins == Begins::unknown) mirror.base.distrust();
  std::lock_guard lock(mutex_);
  // The session has come back to the host of its worker meanwhile.
  if (host == device && Session::get().mapsMemory() && blocks_.contains(host)) {
    addressed_.insert(host);
    return;
  }
  insertMirror(std::move(mirror));
}

bool HostMemory::isMirror(uint64_t host, uint64_t device) const {
  auto found = mirrors_.find(host);
  return found != mirrors_.end() && found->second.device == device;
}

bool HostMemory::mirrored(uint64_t address, size_t bytes, uint64_t& device) const {
  if (!mirroring()) return false;
  const auto inside = [&](uint64_t start, size_t size) {
    return address - start < size && bytes <= size - (address - start);
  };
  std::lock_guard lock(mutex_);
  if (auto after = mirrors_.upper_bound(address); after != mirrors_.begin()) {
    const Mirror& mirror = std::prev(after)->second;
    device = mirror.device + (address - mirror.host);
    if (inside(mirror.host, mirror.bytes)) return true;
  }
  device = address;
  return std::any_of(mirrors_.begin(), mirrors_.end(),
                     [&](const auto& one) { return inside(one.second.device, one.second.bytes); });
}

bool HostMemory::noteAddressed(uint64_t address) {
  std::atomic<uint64_t>& noted = noted_[notedAt(address)];
  if (noted.load(std::memory_order_relaxed) == address) return true;
  std::lock_guard lock(mutex_);
  if (!Session::get().mapsMemory()) return false;
  const auto block = blockOf(address);
  if (block == blocks_.end() || targets_.count(block->first) != 0) return true;
  addressed_.insert(block->first);
  noted.store(address, std::memory_order_relaxed);
  return true;
}

// Under mutex_. The new worker has what was here when the session stood still; the program may have written
// since, and no frame of it may find less (Session::MoveHooks::bring).
void HostMemory::mirrorAddressed() {
  for (const uint64_t address : std::exchange(addressed_, {})) {
    Mirror mirror{address, address, blocks_.at(address), {}, {}};
    mirror.base.distrust();
    insertMirror(std::move(mirror));
  }
  for (auto& noted : noted_) noted = 0;
}

// Under mirrorMutex_ and mutex_. The worker has our own pages now: what kernels and the program write there
// needs nobody to bring it.
void HostMemory::shareMirrored() {
  const size_t shared = std::erase_if(mirrors_, [&](const auto& one) {
    const Mirror& mirror = one.second;
    if (mirror.host != mirror.device || !blocks_.contains(mirror.host)) return false;
    addressed_.insert(mirror.host);
    return true;
  });
  if (shared != 0) mirrorsChanged();
}

// A thread that has looked for mirrors before they were there will send a frame behind this: what it wrote
// before it looked must be seen here.
void HostMemory::bring() {
  if (!mirroring()) return;
  if (transport::expeditedBarrier()) transport::heavyBarrier();
  const Transfers::Exempt mover;
  publish();
}

CUresult HostMemory::settleAll() {
  const Transfers::Exempt mover;
  return settle();
}

// Under mutex_.
void HostMemory::insertMirror(Mirror mirror) {
  if (isMirror(mirror.host, mirror.device)) return;
  Mirror& added = mirrors_.emplace(mirror.host, std::move(mirror)).first->second;
  // Not registered memory, whose device address is another one: others may map it, too.
  if (added.host == added.device && added.bytes >= kLeastWatched) added.heat.begin(added.host, added.bytes);
  mirrorsChanged();
}

// What is told of the set before says nothing about this one.
void HostMemory::mirrorsChanged() {
  mirrorCount_ = mirrors_.size();
  Session::get().setMirrors(++mirrorSet_);
}

// They stay as long as mirrorMutex_ is held: removing one takes it.
std::vector<HostMemory::Mirror*> HostMemory::allMirrors(uint64_t* set) {
  std::vector<Mirror*> all;
  std::lock_guard lock(mutex_);
  if (set != nullptr) *set = mirrorSet_;
  all.reserve(mirrors_.size());
  for (auto& [host, mirror] : mirrors_) all.push_back(&mirror);
  return all;
}

CUresult HostMemory::adoptManagedSymbol(uint64_t address, size_t bytes) {
  uint64_t first = address / kPage * kPage, end = (address + bytes + kPage - 1) / kPage * kPage;
  {
    std::lock_guard lock(mutex_);
    if (mirrors_.count(address) != 0) return CUDA_SUCCESS;
  }
  // Symbols share pages: a page may be there already, from a neighbour.
  for (uint64_t page = first; page < end; page += kPage) {
    void* want = reinterpret_cast<void*>(page);
    void* got =
        mmap(want, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED && errno == EEXIST) {
      std::lock_guard lock(mutex_);
      if (symbolPages_.count(page) == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;  // something else of the application lives there
    } else if (got != want) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    std::lock_guard lock(mutex_);
    symbolPages_.insert(page);
  }
  addMirror(address, address, bytes);
  const OfOneWorker inside;
  std::lock_guard order(mirrorMutex_);
  Mirror* mirror = nullptr;
  {
    std::lock_guard lock(mutex_);
    mirror = &mirrors_.find(address)->second;
  }
  Mirror* const one[] = {mirror};
  return collect(one);  // its initial value
}

void HostMemory::dropManagedSymbol(uint64_t address, size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (mirrors_.count(address) == 0) return;
  }
  removeMirror(address);
  // The pages stay, for a symbol that comes here next: it starts from zero on both sides.
  std::memset(reinterpret_cast<void*>(address), 0, bytes);
}

void HostMemory::removeMirror(uint64_t host, uint64_t device) {
  if (!mirroring()) return;
  const OfOneWorker inside;
  std::lock_guard order(mirrorMutex_);
  std::lock_guard lock(mutex_);
  auto found = mirrors_.find(host);
  if (found == mirrors_.end() || (device != 0 && found->second.device != device)) return;
  mirrors_.erase(found);
  mirrorsChanged();
}

// Under mutex_.
std::map<uint64_t, size_t>::const_iterator HostMemory::blockOf(uint64_t address) const {
  const auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return blocks_.end();
  const auto block = std::prev(after);
  return address - block->first < block->second ? block : blocks_.end();
}

bool HostMemory::mirrorable(uint64_t address, uint64_t& start, size_t& bytes) const {
  if (Session::get().mapsMemory()) return false;
  std::lock_guard lock(mutex_);
  const auto block = blockOf(address);
  if (block == blocks_.end() || targets_.count(block->first) != 0) return false;
  start = block->first;
  bytes = block->second;
  return !isMirror(start, start);
}

void HostMemory::mirrorBlock(uint64_t start, size_t bytes) {
  awaitLandings(start, bytes);  // what is sent first must not undo what the device brings
  addMirror(start, start, bytes, Begins::unknown);
}

CUresult HostMemory::publish() {
  if (!mirroring()) return CUDA_SUCCESS;
  const OfOneWorker inside;
  std::lock_guard order(mirrorMutex_);
  if (runs_.empty()) runs_.resize(kApplyBytes);  // kept: each launch comes here
  const std::vector<Mirror*> all = allMirrors();
  const auto now = transport::Clock::now();
  bool trusted = false;
  const bool candidates = lookAtWrites(all, now >= nextCooling_);
  if (candidates) {
    trusted = WrittenPages::onlyProcessorsWrite();
    nextCooling_ = now + (trusted ? kCooling : kUntrusted);
  }
  for (Mirror* mirror : all) {
    if (CUresult status = sendChanges(*mirror, runs_); status != CUDA_SUCCESS) return status;
    if (candidates) mirror->heat.settle(trusted);
  }
  return CUDA_SUCCESS;
}

// Mirrors that lie side by side are asked for at once: a call takes the kernel 1 us, and a page some
// nanoseconds.
bool HostMemory::lookAtWrites(std::span<Mirror* const> mirrors, bool cool) {
  std::vector<Mirror*> watched;
  std::ranges::copy_if(mirrors, std::back_inserter(watched),
                       [](const Mirror* mirror) { return mirror->heat.watches(); });
  bool candidates = false;
  for (size_t first = 0, last = 0; first < watched.size(); first = last) {
    const uint64_t from = watched[first]->host;
    uint64_t to = from;
    for (; last < watched.size() && watched[last]->host - to <= kApart; ++last)
      to = watched[last]->host + watched[last]->bytes;
    const bool known = WrittenPages::get()->written(from, (to - from + kPage - 1) / kPage * kPage, written_);
    for (size_t i = first; i < last; ++i) {
      if (known)
        candidates |= watched[i]->heat.look(written_, cool);
      else
        watched[i]->heat.end();
    }
  }
  return candidates;
}

CUresult HostMemory::sendChanges(Mirror& mirror, std::vector<unsigned char>& runs) {
  const std::byte* now = reinterpret_cast<const std::byte*>(mirror.host);
  do {
    const size_t bytes = mirror.base.collect(now, mirror.bytes, runs, mirror.heat.pages(), PageHeat::kHot);
    if (bytes == 0) break;
    CUresult status =
        Session::get().post<"sessionMirrorApply">(nullptr, CUdeviceptr{mirror.device}, runs.data(), bytes);
    if (status != CUDA_SUCCESS) return status;
  } while (mirror.base.more());
  return CUDA_SUCCESS;
}

// All are asked for before the first answer is awaited: one round trip, not one each.
CUresult HostMemory::collect(std::span<Mirror* const> mirrors, uint64_t set) {
  Session& session = Session::get();
  std::vector<unsigned char> runs(kCollectBytes);
  std::vector<Session::Waiter> asked(mirrors.size());
  CUresult status = CUDA_SUCCESS;
  size_t sent = 0, bytes = 0;
  for (; sent < mirrors.size(); ++sent) {
    const Mirror& mirror = *mirrors[sent];
    bytes = runsBytes(mirror.bytes);
    const uint64_t last = set != 0 && sent + 1 == mirrors.size() ? 1 : 0;
    status = session.ask<"sessionMirrorCollect">(asked[sent], nullptr, CUdeviceptr{mirror.device},
                                                 mirror.bytes, bytes, 2 * set + last, runs.data(), &bytes);
    if (status != CUDA_SUCCESS) break;
  }
  for (size_t i = 0; i < sent; ++i) {  // every one, for the waiters are ours
    Mirror& mirror = *mirrors[i];
    const size_t room = runsBytes(mirror.bytes);
    CUresult answer = session.collect<"sessionMirrorCollect">(
        asked[i], CUdeviceptr{mirror.device}, mirror.bytes, bytes = room, uint64_t{0}, runs.data(), &bytes);
    while (answer == CUDA_SUCCESS) {
      answer = take(mirror, std::span(runs).first(std::min(bytes, room)));
      if (answer != CUDA_SUCCESS || bytes + 64 < room) break;  // room was left: there is no more
      answer = session.await<"sessionMirrorCollect">(nullptr, CUdeviceptr{mirror.device}, mirror.bytes,
                                                     bytes = room, uint64_t{0}, runs.data(), &bytes);
    }
    if (status == CUDA_SUCCESS) status = answer;
  }
  return status;
}

// The worker's runs, into the application's copy.
CUresult HostMemory::take(Mirror& mirror, std::span<const unsigned char> runs) {
  Reader in(std::as_bytes(runs));
  while (in.remaining() >= 16) {
    uint64_t offset = in.value<uint64_t>();
    auto data = in.blob();
    if (in.bad() || offset > mirror.bytes || data.size() > mirror.bytes - offset) return CUDA_ERROR_UNKNOWN;
    std::memcpy(reinterpret_cast<void*>(mirror.host + offset), data.data(), data.size());
    mirror.base.apply(offset, data);
  }
  return CUDA_SUCCESS;
}

CUresult HostMemory::settleSlow() {
  CUresult status = CUDA_SUCCESS;
  const OfOneWorker inside;
  std::lock_guard order(mirrorMutex_);
  uint64_t set = 0;
  std::vector<Mirror*> all = allMirrors(&set);
  const size_t left = std::erase_if(all, [](const Mirror* mirror) { return !mirror->base.agreed(); });
  if (left != 0 || all.size() > kMostAsked) set = 0;
  for (size_t first = 0; first < all.size() && status == CUDA_SUCCESS; first += kMostAsked)
    status = collect(std::span(all).subspan(first, std::min(kMostAsked, all.size() - first)), set);
  return status;
}

CUresult HostMemory::settleBehind(WordMark mark) {
  if (mark.word == 0 || !Session::get().words().unchanged(mark.word, mark.value)) return settleSlow();
  const OfOneWorker inside;
  const std::lock_guard order(mirrorMutex_);  // what another thread has asked for is here now, too
  return CUDA_SUCCESS;
}

}  // namespace gpupool::client
