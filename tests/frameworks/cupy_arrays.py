"""CuPy: elementwise operations, kernels compiled at run time, products, FFT, reductions, random numbers, solvers."""
import hashlib
import sys

import cupy as cp
import numpy as np

failures = 0


def show(name, array):
    values = np.ascontiguousarray(cp.asnumpy(array))
    print(f"{name}: {values.dtype} {list(values.shape)} {hashlib.sha256(values.tobytes()).hexdigest()[:16]}")


def require(name, condition, why):
    global failures
    if not condition:
        failures += 1
        print(f"FAIL: {name} {why}")


def close(name, got, expected, tolerance):
    show(name, got)
    expected = np.asarray(expected, np.complex128)  # bytes would overflow in the difference
    error = float(np.max(np.abs(cp.asnumpy(got) - expected) / (1 + np.abs(expected))))
    require(name, error <= tolerance, f"is {error:.3g} away from the CPU's")


def attempt(part):
    global failures
    try:
        part()
    except Exception as error:
        failures += 1
        print(f"FAIL: {part.__name__}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(5).standard_normal(shape).astype(dtype)


def elementwise():
    for dtype in (np.float64, np.float32, np.float16, np.int32, np.uint8, np.complex64):
        x = (numbers(100003) * 10).astype(dtype) if dtype is not np.uint8 else np.arange(100003).astype(dtype)
        close(f"{np.dtype(dtype).name} 2 x + 1", cp.asarray(x) * 2 + 1, x * 2 + 1, 1e-2)
    x = numbers(1000)
    close("exp, sin, where", cp.where(cp.asarray(x) > 0, cp.exp(cp.asarray(x)), cp.sin(cp.asarray(x))),
          np.where(x > 0, np.exp(x), np.sin(x)), 1e-5)
    squared = cp.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = (x - y) * (x - y)", "squared_difference")
    close("ElementwiseKernel", squared(cp.asarray(x), cp.float32(0.5)), (x - np.float32(0.5)) ** 2, 1e-6)


def raw_kernels():
    source = r"""
    extern "C" __global__ void saxpy(float a, const float* x, float* y, int count) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < count) y[i] = a * x[i] + y[i];
    }
    template <typename T> __global__ void reverse(T* values, int count) {
      extern __shared__ char memory[];
      T* held = reinterpret_cast<T*>(memory);
      held[threadIdx.x] = values[threadIdx.x];
      __syncthreads();
      values[threadIdx.x] = held[count - 1 - threadIdx.x];
    }"""
    x, y = numbers(5000), numbers(5000)[::-1].copy()
    on_gpu = cp.asarray(y)
    cp.RawKernel(source, "saxpy")((40,), (128,), (np.float32(3), cp.asarray(x), on_gpu, np.int32(5000)))
    close("RawKernel", on_gpu, 3 * x + y, 1e-6)
    module = cp.RawModule(code=source, name_expressions=["reverse<double>"], options=("-std=c++17",))
    values = cp.arange(256, dtype=cp.float64)
    module.get_function("reverse<double>")((1,), (256,), (values, np.int32(256)), shared_mem=2048)
    close("RawModule", values, np.arange(256, dtype=np.float64)[::-1], 0)


def products():
    for dtype, tolerance in ((np.float32, 1e-3), (np.float64, 1e-11), (np.float16, 1e-1), (np.complex64, 1e-3)):
        a, b = numbers(300, 400, dtype=dtype), numbers(400, 200, dtype=dtype)
        wide = np.complex128 if dtype is np.complex64 else np.float64
        close(f"{np.dtype(dtype).name} product", cp.asarray(a) @ cp.asarray(b), a.astype(wide) @ b.astype(wide), tolerance)
    a = numbers(8, 64, 32)
    close("batched", cp.matmul(cp.asarray(a), cp.asarray(a).transpose(0, 2, 1)), a @ a.transpose(0, 2, 1), 1e-4)
    close("tensordot", cp.tensordot(cp.asarray(a), cp.asarray(a), axes=([1, 2], [1, 2])),
          np.tensordot(a, a, axes=([1, 2], [1, 2])), 1e-3)


def transforms():
    x = numbers(128, 100)
    close("fft", cp.fft.fft(cp.asarray(x)), np.fft.fft(x), 1e-3)
    close("rfft2", cp.fft.rfft2(cp.asarray(x)), np.fft.rfft2(x), 1e-3)
    close("ifftn", cp.fft.ifftn(cp.asarray(x).astype(cp.complex128)), np.fft.ifftn(x.astype(np.complex128)), 1e-10)


def reductions():
    x = numbers(500, 600)
    for name in ("sum", "mean", "max", "argmin", "std"):
        close(name, getattr(cp, name)(cp.asarray(x), axis=1), getattr(np, name)(x, axis=1), 1e-3)
    close("whole sum", cp.asarray(x).sum(dtype=cp.float64), x.sum(dtype=np.float64), 1e-9)
    close("cumsum", cp.cumsum(cp.arange(100000)), np.cumsum(np.arange(100000)), 0)
    largest = cp.ReductionKernel("float32 x", "float32 y", "abs(x)", "max(a, b)", "y = a", "0", "largest")
    close("ReductionKernel", largest(cp.asarray(x)), np.abs(x).max(), 0)


def sorting():
    x = numbers(500, 600)
    close("sort", cp.sort(cp.asarray(x), axis=1), np.sort(x, axis=1), 0)
    close("unique", cp.unique(cp.asarray(x.astype(np.int32))), np.unique(x.astype(np.int32)), 0)


def random_numbers():
    cp.random.seed(42)
    for name, values in (("uniform", cp.random.rand(10007)), ("normal", cp.random.randn(10007)),
                         ("integers", cp.random.randint(0, 1000, 10007)), ("permutation", cp.random.permutation(5000))):
        show(name, values)
    generator = cp.random.default_rng(43)
    show("generator", generator.random(10007, dtype=cp.float32))


def solvers():
    a = numbers(120, 120, dtype=np.float64)
    spd, b = a @ a.T + 120 * np.eye(120), numbers(120, 3, dtype=np.float64)
    close("solve", cp.linalg.solve(cp.asarray(spd), cp.asarray(b)), np.linalg.solve(spd, b), 1e-9)
    close("cholesky", cp.linalg.cholesky(cp.asarray(spd)), np.linalg.cholesky(spd), 1e-9)
    close("eigvalsh", cp.linalg.eigvalsh(cp.asarray(spd)), np.linalg.eigvalsh(spd), 1e-9)
    close("svd", cp.linalg.svd(cp.asarray(a), compute_uv=False), np.linalg.svd(a, compute_uv=False), 1e-9)


def streams():
    stream, start, end = cp.cuda.Stream(non_blocking=True), cp.cuda.Event(), cp.cuda.Event()
    with stream:
        start.record()
        x = cp.arange(1 << 20, dtype=cp.float32)
        y = (x * 2).sum()
        end.record()
    end.synchronize()
    require("events", cp.cuda.get_elapsed_time(start, end) >= 0, "go backwards")
    close("on a stream", y, np.float64((1 << 20) * ((1 << 20) - 1)), 1e-4)


def refused(part):
    """On a software GPU, where a library brings machine code only: it fails, and computes nothing wrong."""
    before = failures
    try:
        part()
    except Exception as error:
        print(f"{part.__name__}: refused: {type(error).__name__}")
        return
    require(part.__name__, failures > before, "was to be refused and was not")


# Without arguments all parts; with arguments those named, and those after --refused must fail.
PARTS = (elementwise, raw_kernels, products, transforms, reductions, sorting, random_numbers, solvers, streams)
named = {part.__name__: part for part in PARTS}
arguments = sys.argv[1:]
split = arguments.index("--refused") if "--refused" in arguments else len(arguments)
for part in [named[name] for name in arguments[:split]] or PARTS:
    attempt(part)
for name in arguments[split + 1:]:
    refused(named[name])
print("FAIL" if failures else "PASS")
sys.exit(1 if failures else 0)
