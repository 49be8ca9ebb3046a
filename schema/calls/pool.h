// Stream-ordered allocation (Stream Ordered Memory Allocator).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuDeviceGetDefaultMemPool, Local, None)
CALL(cuDeviceGetMemPool, Local, None)
CALL(cuDeviceSetMemPool, Local, None)
CALL(cuMemPoolCreate, Local, None)
CALL(cuMemPoolDestroy, Local | Cleanup, None)
CALL(cuMemPoolSetAttribute, Local, None)
CALL(cuMemPoolGetAttribute, Local | InHostFunction, None)
CALL(cuMemPoolSetAccess, Local, None)
CALL(cuMemPoolGetAccess, Local, None)
CALL(cuMemGetDefaultMemPool, Local, None)
CALL(cuMemGetMemPool, Local, None)
CALL(cuMemSetMemPool, Local, None)
CALL(cuDeviceGraphMemTrim, Local, None)
CALL(cuDeviceGetGraphMemAttribute, Local, None)
CALL(cuDeviceSetGraphMemAttribute, Local, None)
CALL(cuMemAllocAsync, Policy, None)
CALL(cuMemAllocFromPoolAsync, Policy, None)
CALL(cuMemFreeAsync, Policy | Cleanup, None)
CALL(cuMemPoolTrimTo, Policy, None)
// clang-format on
