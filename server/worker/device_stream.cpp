#include "server/worker/device_stream.h"

#include <algorithm>

namespace gpupool::server {

std::string DeviceStream::prepare() {
  if (std::string why = pieces_.prepare(); !why.empty()) return why;
  if (pieces_.bytes() == 0) return "";
  try {
    for (auto& buffer : buffers_) {
      buffer = transport::SharedMemory::create(std::min<uint64_t>(pieces_.bytes(), StateSocket::kPartBytes));
      // Without it copies are slower.
      session_.driver().cuMemHostRegister_v2(buffer->data(), buffer->size(), kHostRegistration);
    }
  } catch (const std::exception& e) {
    return std::string("no host memory to send device memory through: ") + e.what();
  }
  return "";
}

DeviceStream::~DeviceStream() {
  if (buffers_[0] != nullptr) pieces_.enter(pieces_.all().front().device);
  for (const auto& buffer : buffers_)
    if (buffer != nullptr) session_.driver().cuMemHostUnregister(buffer->data());
}

DeviceStream::Part DeviceStream::cut(size_t buffer) {
  Part part;
  uint64_t bytes = 0;
  const auto& pieces = pieces_.all();
  while (piece_ < pieces.size() && bytes < StateSocket::kPartBytes) {
    const uint64_t taken = std::min(pieces[piece_].bytes - offset_, StateSocket::kPartBytes - bytes);
    part.ranges.push_back({piece_, offset_, taken});
    bytes += taken;
    offset_ += taken;
    if (offset_ < pieces[piece_].bytes) continue;
    ++piece_;
    offset_ = 0;
  }
  if (bytes != 0) part.bytes = {buffers_[buffer]->data(), bytes};
  return part;
}

std::string DeviceStream::copy(const Part& part, bool out) {
  const Driver& driver = session_.driver();
  std::byte* at = part.bytes.data();
  for (const Range& range : part.ranges) {
    CUdeviceptr address = 0;
    if (std::string why = pieces_.open(range.piece, address); !why.empty()) return why;
    address += range.offset;
    CUresult result = out ? driver.cuMemcpyDtoH_v2(at, address, range.bytes)
                          : driver.cuMemcpyHtoD_v2(address, at, range.bytes);
    // The copy may be under way still where the buffer could not be registered.
    if (result == CUDA_SUCCESS && !out) result = driver.cuStreamSynchronize(nullptr);
    if (result != CUDA_SUCCESS) return pieces_.failed(out ? "cuMemcpyDtoH" : "cuMemcpyHtoD", result);
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
