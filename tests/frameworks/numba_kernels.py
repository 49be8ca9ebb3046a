"""Numba: kernels with shared memory, atomics of several types, reductions, ufuncs, printing and a device function.

--driver-link: PTX goes to the driver, which compiles it, instead of to nvJitLink, which makes a real GPU's machine code;
what a software GPU needs (docs/frameworks.md)."""
import math
import sys

if "--driver-link" in sys.argv:
    from cuda.bindings._internal import nvjitlink
    nvjitlink._inspect_function_pointer = lambda name: 0  # as where nvJitLink is not installed

import numba
import numpy as np
from numba import cuda, float32, int32

THREADS = 128


@cuda.jit(device=True)
def wave(x):
    return math.sin(x) * math.exp(-x * x)


@cuda.jit
def add_waves(a, b, c):
    i = cuda.grid(1)
    if i < c.size:
        c[i] = a[i] + wave(b[i])


@cuda.jit
def block_sums(x, total):
    held = cuda.shared.array(THREADS, float32)
    thread, i = cuda.threadIdx.x, cuda.grid(1)
    held[thread] = x[i] if i < x.size else 0.0
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if thread < width:
            held[thread] += held[thread + width]
        cuda.syncthreads()
        width //= 2
    if thread == 0:
        cuda.atomic.add(total, 0, held[0])


@cuda.jit
def transpose(source, result):
    tile = cuda.shared.array((16, 17), int32)
    x, y = cuda.grid(2)
    if x < source.shape[1] and y < source.shape[0]:
        tile[cuda.threadIdx.y, cuda.threadIdx.x] = source[y, x]
    cuda.syncthreads()
    x = cuda.blockIdx.y * 16 + cuda.threadIdx.x
    y = cuda.blockIdx.x * 16 + cuda.threadIdx.y
    if x < result.shape[1] and y < result.shape[0]:
        result[y, x] = tile[cuda.threadIdx.x, cuda.threadIdx.y]


@cuda.jit
def atomics(x, histogram, largest, smallest, swaps):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(histogram, int(x[i]) % histogram.size, 1)
        cuda.atomic.max(largest, 0, x[i])
        cuda.atomic.min(smallest, 0, x[i])
        cuda.atomic.cas(swaps, i % swaps.size, 0, i + 1)


@cuda.jit
def lanes(x, result):
    i = cuda.grid(1)
    value = x[i]
    for distance in (16, 8, 4, 2, 1):
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, distance)
    if cuda.laneid == 0:
        result[i // 32] = value


@cuda.reduce
def total(a, b):
    return a + b


@numba.vectorize(["float32(float32, float32)"], target="cuda")
def twice_plus(a, b):
    return a * 2 + b


failures = 0


def require(name, condition):
    global failures
    failures += not condition
    print(f"{name}: {'right' if condition else 'WRONG'}")


def main():
    a = np.random.default_rng(3).standard_normal(5000)
    blocks = (a.size + THREADS - 1) // THREADS
    c = np.zeros_like(a)
    add_waves[blocks, THREADS](a, a, c)
    require("elementwise with a device function", np.allclose(c, a + np.sin(a) * np.exp(-a * a)))

    ones = np.arange(5000, dtype=np.float32) % 7
    sums = np.zeros(1, np.float32)
    block_sums[blocks, THREADS](ones, sums)
    require("sums in shared memory", sums[0] == ones.sum())

    source = np.arange(100 * 70, dtype=np.int32).reshape(100, 70)
    result = cuda.device_array((70, 100), np.int32)
    transpose[(5, 7), (16, 16)](cuda.to_device(source), result)
    require("transposed in shared memory", np.array_equal(result.copy_to_host(), source.T))

    positive = np.abs(a) * 100
    histogram, largest, smallest = np.zeros(10, np.int32), np.zeros(1), np.full(1, np.inf)
    swaps = np.zeros(64, np.int32)
    atomics[blocks, THREADS](positive, histogram, largest, smallest, swaps)
    require("atomic add", np.array_equal(histogram, np.bincount(positive.astype(np.int64) % 10, minlength=10)))
    require("atomic max and min", largest[0] == positive.max() and smallest[0] == positive.min())
    require("atomic compare and swap", np.array_equal((swaps - 1) % 64, np.arange(64)))

    x, warps = np.arange(4096, dtype=np.float64), np.zeros(128)
    lanes[32, THREADS](x, warps)
    require("warp shuffles", np.array_equal(warps, x.reshape(128, 32).sum(axis=1)))

    require("cuda.reduce", total(x) == x.sum())
    require("vectorize", np.array_equal(twice_plus(ones, ones), ones * 3))

    stream = cuda.stream()
    held = cuda.to_device(x, stream=stream)
    total_on_stream = cuda.device_array(128, np.float64, stream=stream)
    lanes[32, THREADS, stream](held, total_on_stream)
    require("on a stream", np.array_equal(total_on_stream.copy_to_host(stream=stream), warps))


main()
print("FAIL" if failures else "PASS")
sys.exit(1 if failures else 0)
