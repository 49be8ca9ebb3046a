// Stream-ordered allocation (Stream Ordered Memory Allocator).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuDeviceGetDefaultMemPool, Local, OutHandle<"pool_out">, Device<"dev">)
CALL(cuDeviceGetMemPool, Local, OutHandle<"pool">, Device<"dev">)
CALL(cuDeviceSetMemPool, Local, Device<"dev">, Handle<"pool">)
CALL(cuMemPoolCreate, Local, OutHandle<"pool">, Struct<"poolProps">)
CALL(cuMemPoolDestroy, Local, Frees<"pool">)
CALL(cuMemPoolSetAttribute, Local, Handle<"pool">, In<"attr">, Unused<"value">)
CALL(cuMemPoolGetAttribute, Local, Handle<"pool">, In<"attr">, Unused<"value">)
CALL(cuMemPoolSetAccess, Local, Handle<"pool">, Struct<"map">, In<"count">)
CALL(cuMemPoolGetAccess, Local, Out<"flags">, Handle<"memPool">, Out<"location">)
CALL(cuMemGetDefaultMemPool, Local, OutHandle<"pool_out">, Out<"location">, In<"type">)
CALL(cuMemGetMemPool, Local, OutHandle<"pool">, Out<"location">, In<"type">)
CALL(cuMemSetMemPool, Local, Out<"location">, In<"type">, Handle<"pool">)
CALL(cuDeviceGraphMemTrim, Local, Device<"device">)
CALL(cuDeviceGetGraphMemAttribute, Local, Device<"device">, In<"attr">, Unused<"value">)
CALL(cuDeviceSetGraphMemAttribute, Local, Device<"device">, In<"attr">, Unused<"value">)
CALL(cuMemAllocAsync, Custom, Out<"dptr">, In<"bytesize">, Handle<"hStream">)
CALL(cuMemAllocFromPoolAsync, Custom, Out<"dptr">, In<"bytesize">, Handle<"pool">, Handle<"hStream">)
CALL(cuMemFreeAsync, Custom, In<"dptr">, Handle<"hStream">)
CALL(cuMemPoolTrimTo, Custom, Handle<"pool">, In<"minBytesToKeep">)
// clang-format on
