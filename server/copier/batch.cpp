#include "server/copier/batch.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>

#include "base/log.h"
#include "server/copier/protocol.h"

namespace gpupool::server {
namespace {

constexpr std::chrono::seconds kPatience{60};       // with a device that does not move
constexpr uint64_t kSlowest = uint64_t{100} << 20;  // bytes a second, of one that does
constexpr size_t kScratchBytes = size_t{16} << 20;

// The driver asks a descriptor by ioctl(2), and there are files that never answer one.
bool mayBeMemory(int descriptor, bool software) {
  struct stat status{}, control{};
  if (fstat(descriptor, &status) != 0) return false;
  if (software) return S_ISREG(status.st_mode);
  if (!S_ISCHR(status.st_mode)) return false;
  return stat("/dev/nvidiactl", &control) != 0 || major(control.st_rdev) == major(status.st_rdev);
}

}  // namespace

CopierBatch::~CopierBatch() {
  if (running_) finish();
  if (stuck_) return;  // a stream that does not come back is not to be waited for
  const Driver& driver = devices_.driver();
  for (const auto& [ordinal, stream] : streams_) {
    if (devices_.makeCurrent(ordinal) == CUDA_SUCCESS) driver.cuStreamDestroy_v2(stream);
  }
  if (window_ != 0) driver.cuMemAddressFree(window_, windowBytes_);
}

std::string CopierBatch::failed(const char* call, CUresult result) const {
  return result == CUDA_SUCCESS ? "" : std::string(call) + ": " + devices_.driver().describe(result);
}

void CopierBatch::start(Direction direction, std::vector<Piece> pieces) {
  running_ = true;
  direction_ = direction;
  pieces_ = std::move(pieces);
  const bool across = direction_ == Direction::across;
  if (!across)
    std::stable_sort(pieces_.begin(), pieces_.end(),
                     [](const Piece& a, const Piece& b) { return a.ordinal < b.ordinal; });
  uint64_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += piece.bytes;
  deadline_ = std::chrono::steady_clock::now() + kPatience + std::chrono::seconds(bytes / kSlowest);
  error_ = failed("cuCtxSetCurrent", devices_.makeCurrent(pieces_.front().ordinal));
  if (error_.empty()) error_ = reserveWindow(bytes);
  if (error_.empty()) error_ = map();
  if (error_.empty()) error_ = across ? copyAcross() : copy();
  for (Piece& piece : pieces_) piece.descriptor = Descriptor();
}

std::string CopierBatch::reserveWindow(uint64_t bytes) {
  if (bytes <= windowBytes_) return "";
  const Driver& driver = devices_.driver();
  if (window_ != 0) driver.cuMemAddressFree(window_, windowBytes_);
  windowBytes_ = 0;
  const CUresult result = driver.cuMemAddressReserve(&window_, bytes, 0, 0, 0);
  if (result != CUDA_SUCCESS) window_ = 0;
  if (result == CUDA_SUCCESS) windowBytes_ = bytes;
  return failed("cuMemAddressReserve", result);
}

CUresult CopierBatch::import(const Piece& piece, CUmemGenericAllocationHandle& handle) {
  const Driver& driver = devices_.driver();
  const int descriptor = piece.descriptor;
  if (!mayBeMemory(descriptor, driver.software())) return CUDA_ERROR_INVALID_HANDLE;
  return driver.cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(intptr_t{descriptor}),
                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

// One behind the other, so that each device's are allowed, and all are unmapped, by one call.
std::string CopierBatch::map() {
  const Driver& driver = devices_.driver();
  uint64_t begin = 0;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    CUmemGenericAllocationHandle handle = 0;
    if (const CUresult result = import(piece, handle); result != CUDA_SUCCESS)
      return failed("a descriptor that came with a piece of memory is none", result);
    const CUresult result = driver.cuMemMap(window_ + mapped_, piece.bytes, 0, handle, 0);
    driver.cuMemRelease(handle);  // the mapping keeps the memory
    if (result != CUDA_SUCCESS) return failed("a piece of memory is not as large as was said", result);
    mapped_ += piece.bytes;
    if (i + 1 < pieces_.size() && pieces_[i + 1].ordinal == piece.ordinal) continue;
    if (std::string error = allow(begin, mapped_, piece.ordinal); !error.empty()) return error;
    begin = mapped_;
  }
  return "";
}

// Across, to every other device of the batch too that can reach it: its copies go straight then.
std::string CopierBatch::allow(uint64_t begin, uint64_t end, uint32_t ordinal) {
  std::set<uint32_t> reaching{ordinal};
  if (direction_ == Direction::across)
    for (const Piece& piece : pieces_)
      if (!reaching.contains(piece.ordinal) && devices_.reaches(ordinal, piece.ordinal))
        reaching.insert(piece.ordinal);
  std::vector<CUmemAccessDesc> access(reaching.size());
  std::transform(reaching.begin(), reaching.end(), access.begin(), [](uint32_t one) {
    CUmemAccessDesc allowed{};
    allowed.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    allowed.location.id = static_cast<int>(one);
    allowed.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return allowed;
  });
  return failed("cuMemSetAccess",
                devices_.driver().cuMemSetAccess(window_ + begin, end - begin, access.data(), access.size()));
}

// The device's context is current afterwards.
std::string CopierBatch::streamOf(uint32_t ordinal, CUstream& stream) {
  CUresult result = devices_.makeCurrent(ordinal);
  if (result != CUDA_SUCCESS) return failed("cuCtxSetCurrent", result);
  const auto found = streams_.find(ordinal);
  if (found == streams_.end()) {
    result = devices_.driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (result != CUDA_SUCCESS) return failed("cuStreamCreate", result);
    streams_.emplace(ordinal, stream);
  } else {
    stream = found->second;
  }
  return "";
}

std::string CopierBatch::copy() {
  const Driver& driver = devices_.driver();
  CUdeviceptr address = window_;
  for (const Piece& piece : pieces_) {
    CUstream stream = nullptr;
    if (std::string error = streamOf(piece.ordinal, stream); !error.empty()) return error;
    for (const auto& range : piece.kept) {
      const CUresult result = direction_ == Direction::out
                                  ? driver.cuMemcpyDtoHAsync_v2(range.data, address, range.bytes, stream)
                                  : driver.cuMemcpyHtoDAsync_v2(address, range.data, range.bytes, stream);
      if (result != CUDA_SUCCESS) return failed("the copy of a piece of memory", result);
      address += range.bytes;
    }
  }
  return "";
}

std::string CopierBatch::copyAcross() {
  const Driver& driver = devices_.driver();
  const size_t count = pieces_.size() / 2;
  CUdeviceptr source = window_, target = window_ + mapped_ / 2;
  for (size_t i = 0; i < count; ++i) {
    const Piece &from = pieces_[i], &to = pieces_[count + i];
    CUstream stream = nullptr;
    if (std::string error = streamOf(to.ordinal, stream); !error.empty()) return error;
    const CUresult result = driver.cuMemcpyPeerAsync(target, devices_.context(to.ordinal), source,
                                                     devices_.context(from.ordinal), from.bytes, stream);
    if (result != CUDA_SUCCESS) return failed("the copy of a piece of memory", result);
    source += from.bytes;
    target += to.bytes;
  }
  return "";
}

bool CopierBatch::done() {
  if (!running_ || std::chrono::steady_clock::now() > deadline_) return true;
  for (const auto& [ordinal, stream] : streams_) {
    devices_.makeCurrent(ordinal);
    if (devices_.driver().cuStreamQuery(stream) == CUDA_ERROR_NOT_READY) return false;
  }
  return true;
}

std::string CopierBatch::finish() {
  while (!done()) std::this_thread::sleep_for(std::chrono::microseconds(200));
  running_ = false;
  for (const auto& [ordinal, stream] : streams_) {
    devices_.makeCurrent(ordinal);
    const CUresult result = devices_.driver().cuStreamQuery(stream);
    stuck_ |= result == CUDA_ERROR_NOT_READY;
    if (result != CUDA_SUCCESS && error_.empty()) error_ = failed("the copy of pieces of memory", result);
  }
  if (stuck_) return "the GPU did not copy memory in time";  // nothing may be taken from under it
  CUdeviceptr address = window_;
  if (verify_ && direction_ == Direction::in && error_.empty()) {
    for (const Piece& piece : pieces_) {
      if (error_.empty()) error_ = compare(piece, address);
      address += piece.bytes;
    }
  }
  giveUp();
  return std::move(error_);
}

std::string CopierBatch::compare(const Piece& piece, CUdeviceptr address) {
  const Driver& driver = devices_.driver();
  scratch_.resize(kScratchBytes);
  CUstream stream = nullptr;
  if (std::string error = streamOf(piece.ordinal, stream); !error.empty()) return error;
  for (const auto& range : piece.kept) {
    for (uint64_t at = 0; at < range.bytes; at += kScratchBytes) {
      const size_t part = std::min<uint64_t>(kScratchBytes, range.bytes - at);
      CUresult result = driver.cuMemcpyDtoHAsync_v2(scratch_.data(), address + at, part, stream);
      if (result == CUDA_SUCCESS) result = driver.cuStreamSynchronize(stream);
      if (result != CUDA_SUCCESS) return failed("reading back", result);
      if (std::memcmp(scratch_.data(), range.data + at, part) == 0) continue;
      GPUPOOL_ERROR("piece %u is not as it was when it was taken out", piece.index);
      return "a piece of memory that was brought in reads differently";
    }
    address += range.bytes;
  }
  return "";
}

void CopierBatch::giveUp() {
  const Driver& driver = devices_.driver();
  if (mapped_ == 0) return;
  const CUresult result = driver.cuMemUnmap(window_, mapped_);
  if (result != CUDA_SUCCESS && error_.empty()) error_ = failed("cuMemUnmap", result);
  if (result != CUDA_SUCCESS) window_ = windowBytes_ = 0;  // not to be used again
  mapped_ = 0;
}

}  // namespace gpupool::server
