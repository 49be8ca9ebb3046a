"""The driver API from Python's ctypes: needs nothing but libcuda.so.1, so it runs on the software GPU too."""
import ctypes

from measuring import main, workload

cuda = ctypes.CDLL('libcuda.so.1')


def ok(status):
    if status != 0:
        raise RuntimeError(f'CUDA error {status}')


ok(cuda.cuInit(0))
context, address = ctypes.c_void_p(), ctypes.c_uint64()
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
ok(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20)))


def memset(size):
    ok(cuda.cuMemsetD8Async(address, ctypes.c_ubyte(1), ctypes.c_size_t(size), None))


@workload
def driver_memset_4KiB():
    return lambda: memset(4096), 100


@workload
def driver_memset_1MiB_synchronize():
    def step():
        memset(1 << 20)
        ok(cuda.cuCtxSynchronize())
    return step, 20


main(lambda: ok(cuda.cuCtxSynchronize()))
