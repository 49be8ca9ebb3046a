// Values written and waited for in stream order. A wait polls, first eagerly, then asleep; it ends when the
// value arrives or its context is torn down, and keeps only its own stream's thread.
#include "server/softgpu/api/memop.h"

#include <time.h>

#include <shared_mutex>

#include "server/softgpu/api/memory.h"

namespace gpupool::softgpu::api {
namespace {

template <class T>
bool satisfied(T current, T value, unsigned flags) {
  bool met = false;
  switch (flags & ~unsigned(CU_STREAM_WAIT_VALUE_FLUSH)) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      met = std::make_signed_t<T>(current - value) >= 0;
      break;
    case CU_STREAM_WAIT_VALUE_EQ:
      met = current == value;
      break;
    case CU_STREAM_WAIT_VALUE_AND:
      met = (current & value) != 0;
      break;
    case CU_STREAM_WAIT_VALUE_NOR:
      met = T(~(current | value)) != 0;
      break;
    default:
      break;
  }
  return met;
}

// Memory may be taken away while a wait polls it: every look is under the lock that prevents that.
template <class T>
bool load(uint64_t address, T& value) {
  std::shared_lock lock(unmapMutex());
  if (!addresses().covers(address, sizeof value, false)) return false;
  value = __atomic_load_n(reinterpret_cast<const T*>(address), __ATOMIC_ACQUIRE);
  return true;
}

template <class T>
CUresult waitValue(Context& context, uint64_t address, T value, unsigned flags) {
  constexpr int kEager = 200;
  for (int round = 0; !context.aborting && context.sticky == CUDA_SUCCESS; ++round) {
    T current;
    if (!load(address, current)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (satisfied(current, value, flags)) return CUDA_SUCCESS;
    if (round < kEager) {
      __builtin_ia32_pause();
      continue;
    }
    long nanoseconds = std::min<long>(20000L + (round - kEager) * 1000L, 500000L);
    timespec pause{0, nanoseconds};
    nanosleep(&pause, nullptr);
  }
  return CUDA_SUCCESS;
}

template <class T>
CUresult writeValue(uint64_t address, T value) {
  std::shared_lock lock(unmapMutex());
  if (!addresses().covers(address, sizeof value, true)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  __atomic_store_n(reinterpret_cast<T*>(address), value, __ATOMIC_SEQ_CST);
  return CUDA_SUCCESS;
}

CUresult submit(CUstream handle, const CUstreamBatchMemOpParams* operations, unsigned count, unsigned flags) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  if (flags || !operations || !count || count > 256) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(checkMemOps(operations, count));
  auto batch = std::make_shared<MemOpOperation>();
  batch->context = stream->context->handle;
  batch->operations.assign(operations, operations + count);
  bool waits = false;
  for (unsigned i = 0; i < count; ++i) {
    waits |= operations[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 ||
             operations[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
  }
  return submitOperation(*stream, batch, waits ? Submit::asynchronous : Submit::inlineIfIdle);
}

CUresult one(CUstream stream, CUstreamBatchMemOpType type, uint64_t address, uint64_t value, unsigned flags) {
  CUstreamBatchMemOpParams operation{};
  if (type == CU_STREAM_MEM_OP_WRITE_VALUE_32 || type == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
    operation.writeValue.operation = type;
    operation.writeValue.address = address;
    operation.writeValue.value64 = value;
    operation.writeValue.flags = flags;
  } else {
    operation.waitValue.operation = type;
    operation.waitValue.address = address;
    operation.waitValue.value64 = value;
    operation.waitValue.flags = flags;
  }
  return submit(stream, &operation, 1, 0);
}

}  // namespace

CUresult checkMemOps(const CUstreamBatchMemOpParams* operations, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    const auto& op = operations[i];
    bool write = false;
    unsigned bytes = 4;
    switch (op.operation) {
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        bytes = 8;
        [[fallthrough]];
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        write = true;
        if (op.writeValue.flags & ~unsigned(CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER)) {
          return CUDA_ERROR_INVALID_VALUE;
        }
        break;
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        bytes = 8;
        [[fallthrough]];
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        if (op.waitValue.flags & CU_STREAM_WAIT_VALUE_FLUSH) return CUDA_ERROR_NOT_SUPPORTED;
        if (op.waitValue.flags > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
        break;
      case CU_STREAM_MEM_OP_BARRIER:
        continue;
      case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
        return CUDA_ERROR_NOT_SUPPORTED;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t address = op.waitValue.address;  // at the same place in both
    if (address % bytes) return CUDA_ERROR_INVALID_VALUE;
    SOFT_TRY(checkDeviceRange(address, bytes, write));
  }
  return CUDA_SUCCESS;
}

CUresult MemOpOperation::run(Context& owner) const {
  for (const auto& op : operations) {
    uint64_t address = op.waitValue.address;
    CUresult result = CUDA_SUCCESS;
    switch (op.operation) {
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        result = writeValue<uint32_t>(address, op.writeValue.value);
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        result = writeValue<uint64_t>(address, op.writeValue.value64);
        break;
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        result = waitValue<uint32_t>(owner, address, op.waitValue.value, op.waitValue.flags);
        break;
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        result = waitValue<uint64_t>(owner, address, op.waitValue.value64, op.waitValue.flags);
        break;
      default:
        break;  // barriers: every access here is one
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  return one(stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value, flags);
}
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  return one(stream, CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags);
}
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  return one(stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value, flags);
}
CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  return one(stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, address, value, flags);
}
CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* operations,
                               unsigned int flags) {
  return submit(stream, operations, count, flags);
}

// The names of the first version do what the second does.
CUresult cuStreamWriteValue32(CUstream s, CUdeviceptr a, cuuint32_t v, unsigned int f) {
  return cuStreamWriteValue32_v2(s, a, v, f);
}
CUresult cuStreamWriteValue64(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned int f) {
  return cuStreamWriteValue64_v2(s, a, v, f);
}
CUresult cuStreamWaitValue32(CUstream s, CUdeviceptr a, cuuint32_t v, unsigned int f) {
  return cuStreamWaitValue32_v2(s, a, v, f);
}
CUresult cuStreamWaitValue64(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned int f) {
  return cuStreamWaitValue64_v2(s, a, v, f);
}
CUresult cuStreamBatchMemOp(CUstream s, unsigned int n, CUstreamBatchMemOpParams* o, unsigned int f) {
  return cuStreamBatchMemOp_v2(s, n, o, f);
}
