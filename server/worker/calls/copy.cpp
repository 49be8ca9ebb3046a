// Copies and memsets. Host addresses are pinned arena or staging memory of this process; nothing else passes.
#include <algorithm>
#include <memory>

#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using HtoD = GPUPOOL_ROW(cuMemcpyHtoDAsync_v2);
using DtoH = GPUPOOL_ROW(cuMemcpyDtoHAsync_v2);
using DtoD = GPUPOOL_ROW(cuMemcpyDtoDAsync_v2);
using Peer = GPUPOOL_ROW(cuMemcpyPeerAsync);
using Copy3D = GPUPOOL_ROW(cuMemcpy3DAsync_v2);

// Staging memory as the call's context has it.
template <class T>
void inView(Session& session, const Call& call, T*& host) {
  host = reinterpret_cast<T*>(session.views().translate(call.view, reinterpret_cast<uint64_t>(host)));
}

// The driver has taken a copy between the program's memory and a device's.
void count(Session& session, CUresult status, bool toDevice, size_t bytes) {
  if (status != CUDA_SUCCESS) return;
  if (toDevice)
    session.counts().toDevice(bytes);
  else
    session.counts().fromDevice(bytes);
}

void hostToDevice(Session& session, Call& call) {
  Served<HtoD> served(session, call);
  if (!served.open()) return;
  size_t bytes = served.get<"ByteCount">().value();
  bool ours = session.space().owns(served.get<"dstDevice">().value(), bytes) &&
              session.space().ownsHost(reinterpret_cast<uint64_t>(served.get<"srcHost">().value()), bytes);
  inView(session, call, served.get<"srcHost">().value());
  const CUresult status =
      ours ? served.invoke(session.driver().cuMemcpyHtoDAsync_v2) : CUDA_ERROR_INVALID_VALUE;
  count(session, status, true, bytes);
  served.close(status);
}

void deviceToHost(Session& session, Call& call) {
  Served<DtoH> served(session, call);
  if (!served.open()) return;
  size_t bytes = served.get<"ByteCount">().value();
  bool ours = session.space().owns(served.get<"srcDevice">().value(), bytes) &&
              session.space().ownsHost(reinterpret_cast<uint64_t>(served.get<"dstHost">().value()), bytes);
  inView(session, call, served.get<"dstHost">().value());
  const CUresult status =
      ours ? served.invoke(session.driver().cuMemcpyDtoHAsync_v2) : CUDA_ERROR_INVALID_VALUE;
  count(session, status, false, bytes);
  served.close(status);
}

// Pages that only the device touches (transports/shared_memory.h).
bool ofFile(Session& session, uint64_t address, size_t bytes) {
  const auto memory = session.space().hostMemory(address, bytes);
  return memory != nullptr && memory->isOfFile();
}

using Write = GPUPOOL_ROW(sessionWrite);
using Read = GPUPOOL_ROW(sessionRead);

void write(Session& session, Call& call) {
  Served<Write> served(session, call);
  if (!served.open()) return;
  CUstream stream = served.get<"stream">().value();
  CUdeviceptr to = served.get<"to">().value();
  uint64_t from = served.get<"from">().value(), word = served.get<"word">().value();
  size_t bytes = served.get<"bytes">().value();
  if (!session.space().owns(to, bytes) || !session.space().ownsHost(from, bytes))
    return served.close(CUDA_ERROR_INVALID_VALUE);
  auto* host = reinterpret_cast<unsigned char*>(from);
  const auto& data = served.get<"data">().array();
  if (!data.empty() && ofFile(session, from, bytes)) return served.close(CUDA_ERROR_INVALID_VALUE);
  std::copy(data.begin(), data.end(), host);
  inView(session, call, host);
  CUresult status = session.driver().cuMemcpyHtoDAsync_v2(to, host, bytes, stream);
  count(session, status, true, bytes);
  if (status == CUDA_SUCCESS && word != 0) {
    status = session.words().write(call.view, stream, word, served.get<"value">().value());
    if (!session.mapsMemory() && !session.words().watch(word, served.get<"value">().value()))
      status = CUDA_ERROR_OUT_OF_MEMORY;
  }
  served.close(status);
}

// then: what is to happen when the bytes are in host memory. waiting: the watcher has it.
CUresult startRead(Session& session, const Call& call, Served<Read>& served, const Words::Then& then,
                   bool tell, bool& waiting) {
  CUstream stream = served.get<"stream">().value();
  uint64_t word = served.get<"word">().value(), value = served.get<"value">().value();
  CUdeviceptr from = served.get<"from">().value();
  auto* host = reinterpret_cast<void*>(served.get<"to">().value());
  size_t bytes = served.get<"bytes">().value();
  if (!session.space().owns(from, bytes) || Words::deviceAddress(call.view, word) == 0)
    return CUDA_ERROR_INVALID_VALUE;
  inView(session, call, host);
  CUresult status = session.driver().cuMemcpyDtoHAsync_v2(host, from, bytes, stream);
  count(session, status, false, bytes);
  if (status != CUDA_SUCCESS) return status;
  if (waiting = then != nullptr; waiting) session.words().whenReached(word, value, then, tell);
  return session.words().write(call.view, stream, word, value);
}

struct AwaitedRead {
  AwaitedRead(Session& session, Call&& it) : call(std::move(it)), served(session, call) {}
  Call call;
  Served<Read> served;
};

// The bytes go to host memory that the client maps or, over a network, on to a region of the client's.
CUresult readInto(Session& session, const Call& call, Served<Read>& served) {
  uint64_t to = served.get<"to">().value();
  size_t bytes = served.get<"bytes">().value();
  auto memory = session.space().hostMemory(to, bytes);
  if (memory == nullptr) return CUDA_ERROR_INVALID_VALUE;
  schema::RegionName region = served.get<"region">().value();
  Words::Then then;
  if (region.id != 0 && memory->isOfFile()) return CUDA_ERROR_INVALID_VALUE;
  if (region.id != 0)
    then = [&session, memory, to, bytes, region, offset = served.get<"offset">().value()](CUresult status) {
      if (status == CUDA_SUCCESS) session.deliver(memory, to, bytes, {region.id, region.generation}, offset);
    };
  bool waiting = false;
  return startRead(session, call, served, then, true, waiting);
}

// The executor goes on; the watcher answers.
void readAwaited(Session& session, Call& frame) {
  auto read = std::make_shared<AwaitedRead>(session, std::move(frame));
  bool open = read->served.open();
  // With a region it would be posted, but for a capture elsewhere or GPUPOOL_SYNC: the reply has no room for
  // the bytes.
  if (open && read->served.get<"region">().value().id != 0) {
    read->served.close(readInto(session, read->call, read->served));
    open = false;
  }
  if (!open) {
    frame = std::move(read->call);
    return;
  }
  uint64_t to = read->served.get<"to">().value();
  size_t bytes = read->served.get<"bytes">().value();
  auto memory = session.space().hostMemory(to, bytes);
  if (memory != nullptr && memory->isOfFile()) memory = nullptr;
  auto answer = [&session, read, memory, to, bytes](CUresult status) {
    auto& data = read->served.get<"data">().array();
    data.resize(status == CUDA_SUCCESS ? std::min(bytes, data.size()) : 0);
    std::copy_n(reinterpret_cast<const unsigned char*>(to), data.size(), data.begin());
    read->served.get<"count">().plain() = data.size();
    read->served.close(status);
    session.answer(read->call);
  };
  // NOLINTNEXTLINE(bugprone-use-after-move): a call that was moved from keeps its header and flags
  frame.deferred = true;
  bool waiting = false;
  CUresult status = memory == nullptr ? CUDA_ERROR_INVALID_VALUE
                                      : startRead(session, read->call, read->served, answer, false, waiting);
  if (status == CUDA_SUCCESS) return;
  if (waiting)
    session.words().setSticky(status);  // the word will never be written: the watcher answers
  else
    answer(status);
}

void read(Session& session, Call& call) {
  if ((call.frame.flags & schema::Frame::kAwait) != 0) return readAwaited(session, call);
  Served<Read> served(session, call);
  if (served.open()) served.close(readInto(session, call, served));
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
  CUDA_MEMCPY3D& copy = served.get<"pCopy">().plain();
  bool ours = ownsCopy(session, copy);
  if (copy.srcMemoryType == CU_MEMORYTYPE_HOST) inView(session, call, copy.srcHost);
  if (copy.dstMemoryType == CU_MEMORYTYPE_HOST) inView(session, call, copy.dstHost);
  const CUresult status =
      ours ? served.invoke(session.driver().cuMemcpy3DAsync_v2) : CUDA_ERROR_INVALID_VALUE;
  const bool fromHost = copy.srcMemoryType == CU_MEMORYTYPE_HOST,
             toHost = copy.dstMemoryType == CU_MEMORYTYPE_HOST;
  if (fromHost != toHost) count(session, status, fromHost, copy.WidthInBytes * copy.Height * copy.Depth);
  served.close(status);
}

}  // namespace

bool ownsCopy(Session& session, const CUDA_MEMCPY3D_v2& copy) {
  auto side = [&](CUmemorytype type, const void* host, CUdeviceptr device, size_t x, size_t y, size_t z,
                  size_t pitch, size_t height) {
    if (type == CU_MEMORYTYPE_ARRAY) return true;
    if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0) return true;
    // So far apart nothing of a session lies, and below it nothing overflows.
    for (size_t given : {x, y, z, pitch, height, copy.WidthInBytes, copy.Height, copy.Depth})
      if (given > (size_t{1} << 40)) return false;
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
  table.add<Write>(&write);
  table.add<Read>(&read);
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
