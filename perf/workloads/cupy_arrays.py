"""CuPy: an element-wise kernel, a reduction that is read back, a product."""
import cupy

from measuring import main, workload


@workload
def cupy_elementwise_1024():
    a = cupy.zeros(1024, dtype=cupy.float32)

    def step():
        nonlocal a
        a += 1
    return step, 1000


@workload
def cupy_sum_read_back():
    a = cupy.ones(1 << 20, dtype=cupy.float32)
    return lambda: float(a.sum()), 100


@workload
def cupy_product_2048():
    a = cupy.random.rand(2048, 2048, dtype=cupy.float32)
    return lambda: a @ a, 10


main(cupy.cuda.runtime.deviceSynchronize)
