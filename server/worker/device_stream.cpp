#include "server/worker/device_stream.h"

#include <algorithm>
#include <future>

namespace gpupool::server {
namespace {

// On a thread of its own, or, where there is none to be had, on the caller's when it asks for the result.
template <class Work>
std::future<std::string> beside(Work work) {
  return std::async(std::launch::async | std::launch::deferred, std::move(work));
}

}  // namespace

std::string DeviceStream::failed(const char* call, CUresult result) const {
  return std::string("the session's device memory cannot be copied: ") + call + " gives " +
         session_.driver().describe(result);
}

// A context of the session for each device that has memory; where it has none there, the device's primary.
std::string DeviceStream::prepare() {
  const Driver& driver = session_.driver();
  const auto& devices = session_.objects().devices();
  driver.cuCtxGetCurrent(&before_);
  std::map<CUdevice, CUcontext> known;
  session_.objects().forEach(HandleKind::context, [&](uint64_t, uint64_t real) {
    const auto context = reinterpret_cast<CUcontext>(real);
    CUdevice device = 0;
    if (driver.cuCtxSetCurrent(context) == CUDA_SUCCESS && driver.cuCtxGetDevice(&device) == CUDA_SUCCESS)
      known[device] = context;
  });
  uint64_t total = 0;
  for (const Space::PieceState& piece : pieces_) {
    total += piece.bytes;
    const CUdevice device = devices[piece.device];
    if (!known.contains(device)) {
      const CUresult result = driver.cuDevicePrimaryCtxRetain(&known[device], device);
      if (result != CUDA_SUCCESS) return failed("cuDevicePrimaryCtxRetain", result);
      retained_.push_back(device);
    }
    contexts_[piece.device] = known[device];
  }
  if (total == 0) return "";
  if (std::string why = enter(pieces_.front().device); !why.empty()) return why;
  try {
    for (auto& buffer : buffers_) {
      buffer = transport::SharedMemory::create(std::min<uint64_t>(total, StateSocket::kPartBytes));
      // Without it copies are slower.
      driver.cuMemHostRegister_v2(buffer->data(), buffer->size(), kHostRegistration);
    }
  } catch (const std::exception& e) {
    return std::string("no host memory to send device memory through: ") + e.what();
  }
  return "";
}

DeviceStream::~DeviceStream() {
  const Driver& driver = session_.driver();
  close();
  if (buffers_[0] != nullptr) enter(pieces_.front().device);
  for (const auto& buffer : buffers_)
    if (buffer != nullptr) driver.cuMemHostUnregister(buffer->data());
  driver.cuCtxSetCurrent(before_);
  for (const CUdevice device : retained_) driver.cuDevicePrimaryCtxRelease_v2(device);
}

DeviceStream::Part DeviceStream::cut(size_t buffer) {
  Part part;
  uint64_t bytes = 0;
  while (piece_ < pieces_.size() && bytes < StateSocket::kPartBytes) {
    const uint64_t taken = std::min(pieces_[piece_].bytes - offset_, StateSocket::kPartBytes - bytes);
    part.ranges.push_back({piece_, offset_, taken});
    bytes += taken;
    offset_ += taken;
    if (offset_ < pieces_[piece_].bytes) continue;
    ++piece_;
    offset_ = 0;
  }
  if (bytes != 0) part.bytes = {buffers_[buffer]->data(), bytes};
  return part;
}

std::string DeviceStream::enter(unsigned device) {
  const CUresult result = session_.driver().cuCtxSetCurrent(contexts_.at(device));
  return result == CUDA_SUCCESS ? "" : failed("cuCtxSetCurrent", result);
}

std::string DeviceStream::open(size_t piece) {
  if (open_ == piece) return "";
  close();
  const CUresult result = space_.openPiece(piece, address_);
  if (result == CUDA_SUCCESS) open_ = piece;
  return result == CUDA_SUCCESS ? "" : failed("mapping it", result);
}

void DeviceStream::close() {
  if (open_ != SIZE_MAX) space_.closePiece(open_, address_);
  open_ = SIZE_MAX;
}

std::string DeviceStream::copy(const Part& part, bool out) {
  const Driver& driver = session_.driver();
  std::byte* at = part.bytes.data();
  for (const Range& range : part.ranges) {
    std::string why = enter(pieces_[range.piece].device);
    if (why.empty()) why = open(range.piece);
    if (!why.empty()) return why;
    const CUdeviceptr address = address_ + range.offset;
    CUresult result = out ? driver.cuMemcpyDtoH_v2(at, address, range.bytes)
                          : driver.cuMemcpyHtoD_v2(address, at, range.bytes);
    // The copy may be under way still where the buffer could not be registered.
    if (result == CUDA_SUCCESS && !out) result = driver.cuStreamSynchronize(nullptr);
    if (result != CUDA_SUCCESS) return failed(out ? "cuMemcpyDtoH" : "cuMemcpyHtoD", result);
    at += range.bytes;
  }
  return "";
}

std::string DeviceStream::fill(Part& part) {
  std::string why = copy(part, true);
  if (why.empty()) part.checksum = checksumOf(part.bytes);
  return why;
}

std::string DeviceStream::store(const Part& part) {
  return checksumOf(part.bytes) == part.checksum ? copy(part, false) : kDamagedOnItsWay;
}

std::string DeviceStream::send(StateSocket& socket) {
  if (std::string why = prepare(); !why.empty()) return why;
  std::array<Part, 2> parts;
  std::future<std::string> filling;  // ends first
  const auto fillNext = [&](size_t buffer) {
    parts[buffer] = cut(buffer);
    if (!parts[buffer].ranges.empty()) filling = beside([this, &part = parts[buffer]] { return fill(part); });
  };
  fillNext(0);
  for (size_t buffer = 0; !parts[buffer].ranges.empty(); buffer ^= 1) {
    if (std::string why = filling.get(); !why.empty()) return why;
    fillNext(buffer ^ 1);
    if (!socket.sendPart(parts[buffer].bytes, parts[buffer].checksum)) return socket.error();
  }
  return "";
}

std::string DeviceStream::read(std::vector<Checksum>& checksums) {
  if (std::string why = prepare(); !why.empty()) return why;
  for (Part part = cut(0); !part.ranges.empty(); part = cut(0)) {
    if (std::string why = fill(part); !why.empty()) return why;
    checksums.push_back(part.checksum);
  }
  return "";
}

std::string DeviceStream::receive(StateSocket& socket) {
  if (std::string why = prepare(); !why.empty()) return why;
  std::array<Part, 2> parts;
  std::future<std::string> storing;  // ends first
  for (size_t buffer = 0;; buffer ^= 1) {
    Part& part = parts[buffer] = cut(buffer);
    if (!part.ranges.empty() && !socket.receivePart(part.bytes, part.checksum)) return socket.error();
    if (storing.valid())
      if (std::string why = storing.get(); !why.empty()) return why;
    if (part.ranges.empty()) return "";
    storing = beside([this, &part] { return store(part); });
  }
}

}  // namespace gpupool::server
