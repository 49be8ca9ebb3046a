#include "server/worker/device_pieces.h"

#include <algorithm>

namespace gpupool::server {

std::string DevicePieces::failed(const char* call, CUresult result) const {
  return std::string("the session's device memory cannot be copied: ") + call + " gives " +
         session_.driver().describe(result);
}

// A context of the session for each device that has memory; where it has none there, the device's primary.
std::string DevicePieces::prepare() {
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
  for (const Space::PieceState& piece : all()) {
    bytes_ += piece.bytes;
    const CUdevice device = devices[piece.device];
    if (!known.contains(device)) {
      const CUresult result = driver.cuDevicePrimaryCtxRetain(&known[device], device);
      if (result != CUDA_SUCCESS) return failed("cuDevicePrimaryCtxRetain", result);
      retained_.push_back(device);
    }
    contexts_[piece.device] = known[device];
  }
  return all().empty() ? "" : enter(all().front().device);
}

DevicePieces::~DevicePieces() {
  const Driver& driver = session_.driver();
  close();
  driver.cuCtxSetCurrent(before_);
  for (const CUdevice device : retained_) driver.cuDevicePrimaryCtxRelease_v2(device);
}

std::string DevicePieces::enter(unsigned device) {
  const CUresult result = session_.driver().cuCtxSetCurrent(contexts_.at(device));
  return result == CUDA_SUCCESS ? "" : failed("cuCtxSetCurrent", result);
}

std::string DevicePieces::open(size_t piece, CUdeviceptr& address) {
  if (std::string why = enter(all()[piece].device); !why.empty()) return why;
  if (open_ != piece) {
    close();
    const CUresult result = space_.openPiece(piece, address_);
    if (result != CUDA_SUCCESS) return failed("mapping it", result);
    open_ = piece;
  }
  address = address_;
  return "";
}

CUcontext DevicePieces::ownContext(unsigned device) const {
  const CUdevice real = session_.objects().devices()[device];
  const bool retained = std::find(retained_.begin(), retained_.end(), real) != retained_.end();
  return retained ? nullptr : contexts_.at(device);
}

void DevicePieces::close() {
  if (open_ != SIZE_MAX) space_.closePiece(open_, address_);
  open_ = SIZE_MAX;
}

}  // namespace gpupool::server
