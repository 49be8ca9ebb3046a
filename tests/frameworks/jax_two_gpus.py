"""JAX on two GPUs of one process: pmap with a sum over both, and a product whose operands are sharded.
With one GPU the script has nothing to show."""
import hashlib
import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["NCCL_NVLS_ENABLE"] = "0"

import jax
import jax.numpy as jnp
import numpy

DEVICES = 2


def show(name, array):
    values = numpy.asarray(array)
    print(f"{name}: {values.dtype} {list(values.shape)} {hashlib.sha256(values.tobytes()).hexdigest()[:16]}")


def main():
    if len(jax.devices()) < DEVICES:
        print("one GPU only: nothing to do")
        return True
    values = jnp.arange(DEVICES * 4096, dtype=jnp.float32).reshape(DEVICES, 4096)
    total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(values)
    show("psum", total)
    right = numpy.array_equal(numpy.asarray(total)[0], numpy.asarray(values).sum(0))
    mesh = jax.sharding.Mesh(numpy.array(jax.devices()[:DEVICES]), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    whole = numpy.random.default_rng(1).standard_normal((512, 512), dtype=numpy.float32)
    product = jax.jit(lambda a, b: a @ b)(jax.device_put(whole, columns), jax.device_put(whole, rows))
    show("sharded product", product)
    right = right and numpy.abs(numpy.asarray(product) - whole @ whole).max() < 1
    return right


if __name__ == "__main__":
    works = main()
    print("PASS" if works else "FAIL")
    sys.exit(0 if works else 1)
