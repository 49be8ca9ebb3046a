// Space's part in host memory: what the client has pinned, and the staging memory.
#include <algorithm>

#include "base/log.h"
#include "server/worker/space.h"
#include "server/worker/warm.h"

namespace gpupool::server {
namespace {

constexpr size_t kHostUnit = 4096;

}  // namespace

bool Space::inArena(uint64_t address, size_t bytes) const {
  if (bytes == 0 || bytes % kHostUnit || address % kHostUnit || address < layout_.hostBase ||
      bytes > layout_.hostBytes || address - layout_.hostBase > layout_.hostBytes - bytes)
    return false;
  auto after = host_.lower_bound(address);
  if (after != host_.end() && after->first < address + bytes) return false;
  if (after == host_.begin()) return true;
  auto& [start, before] = *std::prev(after);
  return start + before.memory->size() <= address;
}

CUresult Space::mapHost(uint64_t address, size_t bytes, unsigned flags,
                        std::shared_ptr<transport::SharedMemory>& memory) {
  if (CUresult room = account_.take(Account::kHost, bytes); room != CUDA_SUCCESS) return room;
  std::lock_guard order(mapping_);
  if (!inArena(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  try {
    memory = transport::SharedMemory::create(bytes, reinterpret_cast<void*>(address));
  } catch (const std::exception& e) {
    GPUPOOL_WARNING("no pinned memory of %zu bytes: %s", bytes, e.what());
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  (void)flags;  // write-combining is a hint that ordinary pages cannot follow
  const CUresult result = keepHost(address, memory);
  if (result != CUDA_SUCCESS) memory.reset();
  return result;
}

CUresult Space::mapFile(uint64_t address, size_t bytes,
                        const std::function<std::shared_ptr<transport::SharedMemory>(void* at)>& map) {
  if (CUresult room = account_.take(Account::kHost, bytes); room != CUDA_SUCCESS) return room;
  std::lock_guard order(mapping_);
  if (!inArena(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  auto memory = map(reinterpret_cast<void*>(address));
  if (memory == nullptr || !memory->isOfFile()) return CUDA_ERROR_NOT_SUPPORTED;
  const CUresult result = keepHost(address, std::move(memory));
  if (result == CUDA_SUCCESS) ++files_;
  return result;
}

CUresult Space::keepHost(uint64_t address, std::shared_ptr<transport::SharedMemory> memory) {
  CUcontext current = nullptr;
  CUresult result = driver_.cuCtxGetCurrent(&current);
  if (result == CUDA_SUCCESS)
    result = driver_.cuMemHostRegister_v2(memory->data(), memory->size(), kHostRegistration);
  if (result != CUDA_SUCCESS) return result;
  std::lock_guard lock(mutex_);
  hostRanges_[address] = memory->size();
  host_[address] = {std::move(memory), current};
  return CUDA_SUCCESS;
}

CUresult Space::unmapHost(uint64_t address) {
  std::shared_ptr<transport::SharedMemory> memory;
  {
    std::lock_guard order(mapping_);
    auto found = host_.find(address);
    if (found == host_.end()) return CUDA_ERROR_INVALID_VALUE;
    memory = found->second.memory;
    if (memory->isOfFile()) --files_;
    std::lock_guard lock(mutex_);
    released_.push_back(std::move(found->second.memory));
    host_.erase(found);
    hostRanges_.erase(address);
  }
  // Under no lock: the driver waits for the device, and that may wait for a later call. Until it has done so
  // nothing else comes to these addresses (hostReleased).
  const CUresult result = driver_.cuMemHostUnregister(memory->data());
  memory = nullptr;
  std::lock_guard order(mapping_);
  dropReleased();
  return result;
}

// Under mapping_. Memory ends here and nowhere else, so that it is known when.
void Space::dropReleased() {
  std::erase_if(released_, [](const auto& memory) { return memory.use_count() == 1; });
}

bool Space::hostReleased(uint64_t address, size_t bytes) {
  std::lock_guard order(mapping_);
  dropReleased();
  return std::none_of(released_.begin(), released_.end(), [&](const auto& memory) {
    const auto start = reinterpret_cast<uint64_t>(memory->data());
    // As differences: these are the client's numbers, and not checked yet.
    return start >= address ? start - address < bytes : address - start < memory->size();
  });
}

bool Space::contextEnded(CUcontext context) {
  std::lock_guard lock(mapping_);
  bool lost = false;
  for (auto& [address, piece] : host_)
    if (piece.context == context) {
      piece.context = nullptr;
      lost = true;
    }
  return lost;
}

// Under mapping_. False: it is not registered.
bool Space::registerPiece(HostPiece& piece, CUcontext context) {
  const CUresult result =
      driver_.cuMemHostRegister_v2(piece.memory->data(), piece.memory->size(), kHostRegistration);
  piece.context = context;
  const bool registered = result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (!registered)
    GPUPOOL_WARNING("%zu bytes of host memory stay unregistered: %s", piece.memory->size(),
                    driver_.describe(result).c_str());
  return registered;
}

void Space::registerHostAgain() {
  CUcontext current = nullptr;
  std::lock_guard lock(mapping_);
  if (driver_.cuCtxGetCurrent(&current) != CUDA_SUCCESS) return;
  for (auto& [address, piece] : host_)
    if (piece.context == nullptr) registerPiece(piece, current);
}

void Space::registerHostHere(uint64_t address) {
  CUcontext current = nullptr;
  std::lock_guard lock(mapping_);
  const auto found = host_.find(address);
  if (found == host_.end() || driver_.cuCtxGetCurrent(&current) != CUDA_SUCCESS) return;
  HostPiece& piece = found->second;
  if (piece.context == current) return;
  if (piece.context != nullptr) driver_.cuMemHostUnregister(piece.memory->data());
  registerPiece(piece, current);
}

// The driver holds the pages of a registration, whatever is mapped there.
std::string Space::exchangeHost(uint64_t address, const transport::SharedMemory& pages) {
  std::lock_guard lock(mapping_);
  const auto found = host_.find(address);
  if (found == host_.end()) return "the session has no such pinned memory";
  HostPiece& piece = found->second;
  const CUcontext context = piece.context;
  if (context != nullptr && (driver_.cuCtxSetCurrent(context) != CUDA_SUCCESS ||
                             driver_.cuMemHostUnregister(piece.memory->data()) != CUDA_SUCCESS))
    return "pinned memory stays registered with the driver";
  std::string why;
  try {
    piece.memory->takePages(pages);
  } catch (const std::exception& e) {
    why = e.what();
  }
  if (context != nullptr && !registerPiece(piece, context) && why.empty())
    why = "the program's pages cannot be registered with the driver";
  return why;
}

CUcontext Space::hostContext(uint64_t address) const {
  std::lock_guard lock(mapping_);
  const auto found = host_.find(address);
  return found == host_.end() ? nullptr : found->second.context;
}

void Space::addStaging(std::shared_ptr<transport::SharedMemory> memory) {
  std::lock_guard lock(mutex_);
  hostRanges_[reinterpret_cast<uint64_t>(memory->data())] = memory->size();
  staging_ = std::move(memory);
}

std::shared_ptr<transport::SharedMemory> Space::hostMemory(uint64_t address, size_t bytes) const {
  std::lock_guard lock(mutex_);
  auto holds = [&](const std::shared_ptr<transport::SharedMemory>& memory) {
    uint64_t start = reinterpret_cast<uint64_t>(memory->data());
    return address >= start && address - start <= memory->size() &&
           bytes <= memory->size() - (address - start);
  };
  if (staging_ != nullptr && holds(staging_)) return staging_;
  auto after = host_.upper_bound(address);
  if (after == host_.begin()) return nullptr;
  const auto& memory = std::prev(after)->second.memory;
  return holds(memory) ? memory : nullptr;
}

}  // namespace gpupool::server
