#include "server/copier/store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>

#include "server/copier/protocol.h"
#include "server/host_room.h"

namespace gpupool::server {
namespace {

constexpr size_t kMostTouchers = 8;
// A small session does not wait for memory that is touched for others, nor does one make a slab of each page.
constexpr uint64_t kLeastSlab = uint64_t{64} << 20;

std::string gib(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (uint64_t{1} << 30));
  return text;
}

// False: there is no further thread to be had.
template <class Work>
bool start(std::vector<std::thread>& helpers, const Work& work) {
  try {
    helpers.emplace_back(work);
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

// The kernel clears each page when it is touched first, one thread some 3 GB/s.
void touch(std::byte* data, uint64_t bytes) {
  const uint64_t units = bytes / kCopierUnit;
  const size_t threads =
      std::clamp<size_t>(std::min<uint64_t>(std::thread::hardware_concurrency(), units), 1, kMostTouchers);
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    constexpr size_t kPage = 4096;
    for (uint64_t unit; (unit = next.fetch_add(1)) < units;) {
      volatile auto* page = reinterpret_cast<volatile char*>(data + unit * kCopierUnit);
      for (size_t at = 0; at < kCopierUnit; at += kPage) page[at] = 0;
    }
  };
  std::vector<std::thread> helpers;
  while (helpers.size() + 1 < threads && start(helpers, work)) {
  }
  work();
  for (auto& helper : helpers) helper.join();
}

// Anonymous memory that begins at a unit; null: there are no addresses for it. What is mapped around it stays
// so: no two slabs are neighbours, for no copy may span two registrations.
std::byte* mapSlab(uint64_t bytes) {
  void* got = mmap(nullptr, bytes + kCopierUnit, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  const uint64_t aligned = (reinterpret_cast<uint64_t>(got) + kCopierUnit - 1) / kCopierUnit * kCopierUnit;
  auto* const slab = reinterpret_cast<std::byte*>(aligned);
  madvise(slab, bytes, MADV_HUGEPAGE);
  madvise(slab, bytes, MADV_DONTDUMP);  // tenants' bytes
  madvise(slab, bytes, MADV_DONTFORK);
  return slab;
}

// Open for reading and writing, without a name; -1 and errno.
int openNameless(const std::string& folder) {
  int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = folder + "/copier-XXXXXX";
  file = mkostemp(name.data(), O_CLOEXEC);
  if (file >= 0) unlink(name.c_str());
  return file;
}

// Of allocated blocks, so that no write to it meets a full disk. Null: `why`.
std::byte* mapFile(const std::string& folder, uint64_t bytes, std::string& why) {
  const auto failed = [&](const char* what, int error) {
    why = std::string(what) + " " + gib(bytes) + " in " + folder + ": " + strerror(error) +
          "; that folder is for what is beyond the memory for suspended sessions (suspend_memory in "
          "server.yaml)";
    return nullptr;
  };
  const int file = openNameless(folder);
  if (file < 0) return failed("cannot make a file of", errno);
  if (const int error = posix_fallocate(file, 0, static_cast<off_t>(bytes)); error != 0) {
    close(file);
    return failed("cannot allocate", error);
  }
  void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);
  if (got == MAP_FAILED) return failed("cannot map", error);
  madvise(got, bytes, MADV_DONTDUMP);
  madvise(got, bytes, MADV_DONTFORK);
  return static_cast<std::byte*>(got);
}

}  // namespace

CopierStore::CopierStore(Options options) : options_(std::move(options)) {
  options_.budget -= options_.budget % kCopierUnit;
  options_.slabBytes = std::max(options_.slabBytes - options_.slabBytes % kCopierUnit, kCopierUnit);
  if (!options_.machineHasRoom) options_.machineHasRoom = hostHasRoom;
}

void CopierStore::setRoom(uint64_t budget, std::string folder) {
  std::lock_guard lock(mutex_);
  options_.budget = std::max({budget - budget % kCopierUnit, usage_.slabs, usage_.memory});
  options_.folder = std::move(folder);
}

CopierStore::Holding::~Holding() { store_.giveBack(*this); }

CopierStore::Usage CopierStore::usage() const {
  std::lock_guard lock(mutex_);
  return usage_;
}

// mutex_ is held.
std::string CopierStore::refusal(uint64_t wanted) const {
  return "no room for " + gib(wanted) + " in the memory for suspended sessions: " + gib(usage_.memory) +
         " of " + gib(options_.budget) + " are used; raise suspend_memory in server.yaml";
}

std::unique_ptr<CopierStore::Holding> CopierStore::reserve(std::span<const uint64_t> pieces,
                                                           std::string& why) {
  uint64_t wanted = 0;
  for (uint64_t piece : pieces) wanted += piece;
  std::unique_ptr<Holding> holding(new Holding(*this));
  {
    std::lock_guard lock(mutex_);
    const uint64_t memory = std::min(wanted, options_.budget - std::min(options_.budget, usage_.memory));
    if (memory < wanted && options_.folder.empty()) {
      why = refusal(wanted);
      return nullptr;
    }
    // Counted first, so that slabs are made for what nobody else has been promised.
    usage_.memory += holding->memory_ = memory;
    usage_.disk += holding->disk_ = wanted - memory;
  }
  if (!takeDisk(*holding, why) || !takeMemory(*holding, why)) return nullptr;
  cut(*holding, pieces);
  return holding;
}

bool CopierStore::takeDisk(Holding& holding, std::string& why) {
  std::string folder;
  {
    std::lock_guard lock(mutex_);
    folder = options_.folder;
  }
  if (holding.disk_ != 0) holding.file_ = mapFile(folder, holding.disk_, why);
  return holding.disk_ == 0 || holding.file_ != nullptr;
}

// mutex_ is held.
void CopierStore::takeFree(Holding& holding, uint64_t& missing) {
  while (missing != 0 && !free_.empty()) {
    const auto first = free_.begin();
    const Range range{first->first, std::min(first->second, missing)};
    const uint64_t rest = first->second - range.bytes;
    holding.taken_.push_back(range);
    free_.erase(first);
    if (rest != 0) free_.emplace(range.data + range.bytes, rest);
    missing -= range.bytes;
  }
}

// What is missing is counted as used, so the budget has slabs for it yet, or somebody has just made one.
bool CopierStore::takeMemory(Holding& holding, std::string& why) {
  uint64_t missing = holding.memory_;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      takeFree(holding, missing);
      if (missing == 0) return true;
    }
    if (!grow(missing, why)) return false;
  }
}

// making_ is held. False: the machine has no such memory.
bool CopierStore::makeSlab(uint64_t bytes) {
  std::byte* const slab = options_.machineHasRoom(bytes) ? mapSlab(bytes) : nullptr;
  if (slab == nullptr) return false;
  touch(slab, bytes);
  if (options_.onSlab) options_.onSlab(slab, bytes);
  std::lock_guard lock(mutex_);
  free_.emplace(slab, bytes);
  usage_.slabs += bytes;
  return true;
}

// mutex_ is not held. 0: the budget allows for no more.
uint64_t CopierStore::nextSlab(uint64_t missing) const {
  const uint64_t wanted = (missing + kLeastSlab - 1) / kLeastSlab * kLeastSlab;
  std::lock_guard lock(mutex_);
  // A slab that was being made when the budget fell may exceed it.
  return std::min({wanted, options_.slabBytes, options_.budget - std::min(options_.budget, usage_.slabs)});
}

// True: there may be free memory now.
bool CopierStore::grow(uint64_t missing, std::string& why) {
  std::lock_guard making(making_);
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) return true;  // made while this waited
  }
  const uint64_t bytes = nextSlab(missing);
  if (bytes == 0 || makeSlab(bytes)) return true;  // 0: what is missing has just been given back
  std::lock_guard lock(mutex_);
  why = "this machine has no " + gib(bytes) + " of memory left to keep a suspended session in, though " +
        gib(options_.budget) + " are allowed (suspend_memory in server.yaml)";
  return false;
}

bool CopierStore::touchAhead(uint64_t bytes) {
  std::lock_guard making(making_);
  const uint64_t most = std::min(bytes, options_.budget);  // before anybody can set another
  for (uint64_t made = usage().slabs; made < most; made = usage().slabs)
    if (!makeSlab(nextSlab(most - made))) return false;
  return true;
}

// Deals the memory out to the pieces, then the file.
void CopierStore::cut(Holding& holding, std::span<const uint64_t> pieces) {
  std::vector<Range> stock = holding.taken_;
  if (holding.file_ != nullptr) stock.push_back({holding.file_, holding.disk_});
  size_t at = 0;
  for (uint64_t piece : pieces) {
    while (piece != 0) {
      Range& from = stock[at];
      const uint64_t part = std::min(piece, from.bytes);
      holding.ranges_.push_back({from.data, part});
      from.data += part;
      from.bytes -= part;
      piece -= part;
      if (from.bytes == 0) ++at;
    }
    holding.ends_.push_back(holding.ranges_.size());
  }
}

void CopierStore::giveBack(Holding& holding) {
  if (holding.abandoned_) return;
  if (holding.file_ != nullptr) munmap(holding.file_, holding.disk_);
  std::lock_guard lock(mutex_);
  usage_.memory -= holding.memory_;
  usage_.disk -= holding.disk_;
  for (const Range& range : holding.taken_) {
    auto [place, fresh] = free_.emplace(range.data, range.bytes);
    if (const auto next = std::next(place);
        next != free_.end() && place->first + place->second == next->first) {
      place->second += next->second;
      free_.erase(next);
    }
    if (place == free_.begin()) continue;
    if (const auto before = std::prev(place); before->first + before->second == place->first) {
      before->second += place->second;
      free_.erase(place);
    }
  }
}

}  // namespace gpupool::server
