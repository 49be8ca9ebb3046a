// Streams by name: creation, order, queries, host functions, stream memory operations. Captures: capture.cpp.
#include "base/log.h"
#include "client/calls/green.h"
#include "client/capture.h"
#include "client/entry.h"
#include "client/graphs.h"
#include "client/memory/host.h"
#include "client/memory/registered.h"
#include "client/streams.h"

namespace gpupool::client {
namespace {

CUresult create(CUstream* out, unsigned flags, int priority) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  if (out == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  if (const Context* green = contexts().currentGreen(); green != nullptr) {
    if (flags == CU_STREAM_NON_BLOCKING) return makeGreenStream(green->green, flags, priority, *out);
    GPUPOOL_WARNING("in a green context, gpupool makes streams that are non-blocking, and no other ones");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  status = clampPriority(*context, priority);
  return status == CUDA_SUCCESS ? makeStream(context->handle, flags, priority, *out) : status;
}

CUresult destroy(CUstream handle) {
  auto stream = streams.pin(toId(handle));
  if (!stream) return noStream(handle);
  captureDropped(*stream);
  return endStream({stream.get(), stream->context, handle});
}

// Inside Transfers::named, for over a network the function has to wait for the bytes that it may read.
CUresult sendHostFunction(const StreamRef& ref, Session::HostFunction entry, bool& due, bool error) {
  if (entry.once && !Session::get().mapsMemory()) {
    // The word is asked for before the function is sent: behind it, it would wait for the function's own end.
    uint64_t value = 0;
    const CUresult status = requestWord(ref, value);
    if (status != CUDA_SUCCESS) return status;
    entry.word = ref.stream->word;
    entry.prepare = [ref, value] { waitFor(ref, value); };
    const uint64_t number = hostMemory().hostFunctionBegins(*ref.stream);
    entry.publish = [number] {
      hostMemory().hostFunctionEnded(number);
      hostMemory().publish();
    };
  }
  const uint64_t id = Session::get().addHostFunction(entry);
  return sendTo<"sessionHostFunction">(ref, due, ref.wire, id, unsigned{error});
}

CUresult hostFunction(CUstream streamHandle, const Session::HostFunction& function, bool error) {
  StreamRef ref;
  CUresult status = resolveStream(streamHandle, ref);
  if (status != CUDA_SUCCESS) return status;
  Session::HostFunction entry = function;
  carryBytes(entry, ref.stream->capturing);
  entry.once = !ref.stream->capturing;  // a captured one runs with every launch of its graph
  bool due = false;
  {
    const Transfers::Inside inside(Session::get().transfers(), Transfers::named);
    status = sendHostFunction(ref, entry, due, error);
  }
  return due ? keepCredit(ref) : status;
}

template <schema::Name N, class T>
CUresult memoryOperation(CUstream streamHandle, CUdeviceptr address, T value, unsigned flags) {
  StreamRef ref;
  CUresult status = resolveStream(streamHandle, ref);
  if (status != CUDA_SUCCESS) return status;
  if (address == 0 || address % sizeof(T) != 0) return CUDA_ERROR_INVALID_VALUE;
  mirrorArena(address);
  if (status = hostMemory().publish(); status != CUDA_SUCCESS) return status;
  return postTo<N>(ref, ref.wire, address, value, flags);
}

CUresult batch(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags) {
  if (count == 0 || count > 256 || operations == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    const CUstreamBatchMemOpParams& o = operations[i];
    CUresult status = CUDA_SUCCESS;
    switch (o.operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        status = memoryOperation<"cuStreamWaitValue32_v2">(stream, o.waitValue.address, o.waitValue.value,
                                                           o.waitValue.flags);
        break;
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        status = memoryOperation<"cuStreamWaitValue64_v2">(stream, o.waitValue.address, o.waitValue.value64,
                                                           o.waitValue.flags);
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        status = memoryOperation<"cuStreamWriteValue32_v2">(stream, o.writeValue.address, o.writeValue.value,
                                                            o.writeValue.flags);
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        status = memoryOperation<"cuStreamWriteValue64_v2">(stream, o.writeValue.address,
                                                            o.writeValue.value64, o.writeValue.flags);
        break;
      case CU_STREAM_MEM_OP_BARRIER:
      case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
        break;  // operations of one stream are ordered here anyway
      default:
        status = CUDA_ERROR_INVALID_VALUE;
    }
    if (status != CUDA_SUCCESS) return status;
  }
  return CUDA_SUCCESS;
}

}  // namespace

namespace custom {

CUresult cuStreamCreate(CUstream* out, unsigned flags) { return create(out, flags, 0); }
CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  return create(out, flags, priority);
}
CUresult cuStreamDestroy(CUstream stream) { return destroy(stream); }
CUresult cuStreamDestroy_v2(CUstream stream) { return destroy(stream); }

CUresult cuStreamSynchronize(CUstream stream) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS || status == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    status = captureConflict(ref);
  if (status == CUDA_SUCCESS) status = captureForbids();
  return status == CUDA_SUCCESS ? synchronizeStream(ref) : status;
}
CUresult cuStreamQuery(CUstream stream) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS || status == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    status = captureConflict(ref);
  if (status == CUDA_SUCCESS) status = captureForbids();
  return status == CUDA_SUCCESS ? queryStream(ref) : status;
}

CUresult cuStreamGetPriority(CUstream stream, int* priority) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS && priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (status == CUDA_SUCCESS) *priority = ref.stream->priority;
  return status;
}
CUresult cuStreamGetFlags(CUstream stream, unsigned* flags) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS && flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (status == CUDA_SUCCESS) *flags = ref.stream->flags;
  return status;
}
CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS && id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (status == CUDA_SUCCESS) *id = ref.stream->id;
  return status;
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS && context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (status == CUDA_SUCCESS)
    *context = ref.stream->green == nullptr ? ref.context : contextOf(ref.stream->green);
  return status;
}
CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS && context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (status != CUDA_SUCCESS) return status;
  *context = ref.context;  // of a green context's stream, too, the primary context
  if (green != nullptr) *green = ref.stream->green;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetDevice(CUstream stream, CUdevice* device) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS && device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return status == CUDA_SUCCESS ? contexts().getDevice(device, ref.context) : status;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return hostFunction(stream, {function, nullptr, stream, data, true}, false);
}
CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void* data, unsigned flags) {
  if (callback == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return hostFunction(stream, {nullptr, callback, stream, data, true}, true);
}

CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr a, cuuint32_t v, unsigned f) {
  return memoryOperation<"cuStreamWaitValue32_v2">(s, a, v, f);
}
CUresult cuStreamWaitValue64_v2(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned f) {
  return memoryOperation<"cuStreamWaitValue64_v2">(s, a, v, f);
}
CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr a, cuuint32_t v, unsigned f) {
  return memoryOperation<"cuStreamWriteValue32_v2">(s, a, v, f);
}
CUresult cuStreamWriteValue64_v2(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned f) {
  return memoryOperation<"cuStreamWriteValue64_v2">(s, a, v, f);
}
CUresult cuStreamWaitValue32(CUstream s, CUdeviceptr a, cuuint32_t v, unsigned f) {
  return custom::cuStreamWaitValue32_v2(s, a, v, f);
}
CUresult cuStreamWaitValue64(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned f) {
  return custom::cuStreamWaitValue64_v2(s, a, v, f);
}
CUresult cuStreamWriteValue32(CUstream s, CUdeviceptr a, cuuint32_t v, unsigned f) {
  return custom::cuStreamWriteValue32_v2(s, a, v, f);
}
CUresult cuStreamWriteValue64(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned f) {
  return custom::cuStreamWriteValue64_v2(s, a, v, f);
}
CUresult cuStreamBatchMemOp(CUstream s, unsigned n, CUstreamBatchMemOpParams* p, unsigned f) {
  return batch(s, n, p, f);
}
CUresult cuStreamBatchMemOp_v2(CUstream s, unsigned n, CUstreamBatchMemOpParams* p, unsigned f) {
  return batch(s, n, p, f);
}

}  // namespace custom
}  // namespace gpupool::client
