// Copies and memsets. Host addresses are pinned arena or staging memory of this process; nothing else passes.
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using HtoD = GPUPOOL_ROW(cuMemcpyHtoDAsync_v2);
using DtoH = GPUPOOL_ROW(cuMemcpyDtoHAsync_v2);
using DtoD = GPUPOOL_ROW(cuMemcpyDtoDAsync_v2);
using Peer = GPUPOOL_ROW(cuMemcpyPeerAsync);
using Copy3D = GPUPOOL_ROW(cuMemcpy3DAsync_v2);

void hostToDevice(Session& session, Call& call) {
  Served<HtoD> served(session, call);
  if (!served.open()) return;
  size_t bytes = served.get<"ByteCount">().value();
  bool ours = session.space().owns(served.get<"dstDevice">().value(), bytes) &&
              session.space().ownsHost(reinterpret_cast<uint64_t>(served.get<"srcHost">().value()), bytes);
  served.close(ours ? served.invoke(session.driver().cuMemcpyHtoDAsync_v2) : CUDA_ERROR_INVALID_VALUE);
}

void deviceToHost(Session& session, Call& call) {
  Served<DtoH> served(session, call);
  if (!served.open()) return;
  size_t bytes = served.get<"ByteCount">().value();
  bool ours = session.space().owns(served.get<"srcDevice">().value(), bytes) &&
              session.space().ownsHost(reinterpret_cast<uint64_t>(served.get<"dstHost">().value()), bytes);
  served.close(ours ? served.invoke(session.driver().cuMemcpyDtoHAsync_v2) : CUDA_ERROR_INVALID_VALUE);
}

void deviceToDevice(Session& session, Call& call) {
  Served<DtoD> served(session, call);
  if (!served.open()) return;
  size_t bytes = served.get<"ByteCount">().value();
  bool ours = session.space().owns(served.get<"srcDevice">().value(), bytes) &&
              session.space().owns(served.get<"dstDevice">().value(), bytes);
  served.close(ours ? served.invoke(session.driver().cuMemcpyDtoDAsync_v2) : CUDA_ERROR_INVALID_VALUE);
}

void peerCopy(Session& session, Call& call) {
  Served<Peer> served(session, call);
  if (!served.open()) return;
  size_t bytes = served.get<"ByteCount">().value();
  bool ours = session.space().owns(served.get<"srcDevice">().value(), bytes) &&
              session.space().owns(served.get<"dstDevice">().value(), bytes);
  served.close(ours ? served.invoke(session.driver().cuMemcpyPeerAsync) : CUDA_ERROR_INVALID_VALUE);
}

template <class R, auto Member>
void memset1D(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  size_t width = sizeof(std::tuple_element_t<1, typename R::Arguments>);
  size_t count = served.template get<"N">().value();
  bool ours = count <= SIZE_MAX / width &&
              session.space().owns(served.template get<"dstDevice">().value(), count * width);
  served.close(ours ? served.invoke(session.driver().*Member) : CUDA_ERROR_INVALID_VALUE);
}

template <class R, auto Member>
void memset2D(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  size_t width = sizeof(std::tuple_element_t<2, typename R::Arguments>);
  size_t w = served.template get<"Width">().value(), h = served.template get<"Height">().value();
  size_t pitch = served.template get<"dstPitch">().value();
  unsigned __int128 span =
      h == 0 ? 0
             : static_cast<unsigned __int128>(pitch) * (h - 1) + static_cast<unsigned __int128>(w) * width;
  bool ours = span <= SIZE_MAX &&
              session.space().owns(served.template get<"dstDevice">().value(), static_cast<size_t>(span));
  served.close(ours ? served.invoke(session.driver().*Member) : CUDA_ERROR_INVALID_VALUE);
}

void copy3D(Session& session, Call& call) {
  Served<Copy3D> served(session, call);
  if (!served.open()) return;
  bool ours = ownsCopy(session, served.get<"pCopy">().plain());
  served.close(ours ? served.invoke(session.driver().cuMemcpy3DAsync_v2) : CUDA_ERROR_INVALID_VALUE);
}

}  // namespace

bool ownsCopy(Session& session, const CUDA_MEMCPY3D_v2& copy) {
  auto side = [&](CUmemorytype type, const void* host, CUdeviceptr device, size_t x, size_t y, size_t z,
                  size_t pitch, size_t height) {
    if (type == CU_MEMORYTYPE_ARRAY) return true;
    if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0) return true;
    if (pitch == 0) pitch = copy.WidthInBytes + x;
    if (height == 0) height = copy.Height + y;
    unsigned __int128 start = (static_cast<unsigned __int128>(z) * height + y) * pitch + x;
    unsigned __int128 last =
        (static_cast<unsigned __int128>(z + copy.Depth - 1) * height + y + copy.Height - 1) * pitch + x +
        copy.WidthInBytes;
    if (last > (static_cast<unsigned __int128>(1) << 47)) return false;
    uint64_t base = type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(host) : device;
    uint64_t at = base + static_cast<uint64_t>(start);
    size_t bytes = static_cast<size_t>(last - start);
    return type == CU_MEMORYTYPE_HOST ? session.space().ownsHost(at, bytes) : session.space().owns(at, bytes);
  };
  return side(copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcXInBytes, copy.srcY, copy.srcZ,
              copy.srcPitch, copy.srcHeight) &&
         side(copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstXInBytes, copy.dstY, copy.dstZ,
              copy.dstPitch, copy.dstHeight);
}

void addCopyHandlers(HandlerTable& table) {
  table.add<HtoD>(&hostToDevice);
  table.add<DtoH>(&deviceToHost);
  table.add<DtoD>(&deviceToDevice);
  table.add<Peer>(&peerCopy);
  table.add<Copy3D>(&copy3D);
#define MEMSET(kind, function) \
  table.add<GPUPOOL_ROW(function)>(&kind<GPUPOOL_ROW(function), &Driver::function>);
  MEMSET(memset1D, cuMemsetD8Async)
  MEMSET(memset1D, cuMemsetD16Async)
  MEMSET(memset1D, cuMemsetD32Async)
  MEMSET(memset2D, cuMemsetD2D8Async)
  MEMSET(memset2D, cuMemsetD2D16Async)
  MEMSET(memset2D, cuMemsetD2D32Async)
#undef MEMSET
}

}  // namespace gpupool::server
