"""JAX: a jitted gradient taken 20 steps, products, a convolution, FFT, sorting, random numbers, scan and vmap."""
import hashlib
import os
import sys

# XLA picks algorithms by timing them, which no two runs do alike; this takes the same ones every time.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np

failures = 0


def show(name, array):
    values = np.ascontiguousarray(np.asarray(array))
    print(f"{name}: {values.dtype} {list(values.shape)} {hashlib.sha256(values.tobytes()).hexdigest()[:16]}")


def require(name, condition, why):
    global failures
    if not condition:
        failures += 1
        print(f"FAIL: {name} {why}")


def close(name, got, expected, tolerance):
    show(name, got)
    got, expected = np.asarray(got).astype(np.complex128), np.asarray(expected).astype(np.complex128)
    error = float(np.max(np.abs(got - expected) / (1 + np.abs(expected))))
    require(name, error <= tolerance, f"is {error:.3g} away from the CPU's")


def attempt(part):
    global failures
    try:
        part()
    except Exception as error:
        failures += 1
        print(f"FAIL: {part.__name__}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def numbers(*shape):
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def gradient():
    def loss(weights, x, y):
        hidden = jnp.tanh(x @ weights[0] + weights[1])
        return jnp.mean((hidden @ weights[2] - y) ** 2)

    @jax.jit
    def step(weights, x, y):
        value, slopes = jax.value_and_grad(loss)(weights, x, y)
        return value, [weight - 0.05 * slope for weight, slope in zip(weights, slopes)]

    weights = [jnp.asarray(numbers(64, 128) * 0.1), jnp.zeros(128), jnp.asarray(numbers(128, 8) * 0.1)]
    x, y = jnp.asarray(numbers(256, 64)), jnp.asarray(numbers(256, 8))
    losses = []
    for turn in range(20):
        value, weights = step(weights, x, y)
        losses.append(float(value))
        print(f"step {turn}: {losses[-1].hex()}")
    require("gradient", losses[-1] < losses[0], f"does not learn: {losses[0]:.3f} to {losses[-1]:.3f}")
    for i, weight in enumerate(weights):
        show(f"weights {i}", weight)


def products():
    a, b = numbers(512, 256), numbers(256, 384)
    expected = a.astype(np.float64) @ b
    close("fp32", jnp.matmul(a, b, precision="highest"), expected, 1e-4)
    close("default precision", jnp.matmul(a, b), expected, 1e-1)
    for dtype in (jnp.bfloat16, jnp.float16):
        got = jnp.matmul(jnp.asarray(a, dtype), jnp.asarray(b, dtype))
        close(np.dtype(dtype).name, got.astype(jnp.float32), expected, 3e-1)
    close("einsum", jnp.einsum("bij,bjk->bik", numbers(8, 32, 64), numbers(8, 64, 16), precision="highest"),
          np.einsum("bij,bjk->bik", numbers(8, 32, 64), numbers(8, 64, 16)), 1e-4)


def convolution():
    x, kernel = numbers(4, 16, 20, 20), numbers(8, 16, 3, 3)
    got = jax.jit(lambda u, v: jax.lax.conv_general_dilated(u, v, (1, 1), "VALID", precision="highest"))(x, kernel)
    expected = sum(np.einsum("nchw,oc->nohw", x[:, :, i:i + 18, j:j + 18], kernel[:, :, i, j])
                   for i in range(3) for j in range(3))
    close("convolution", got, expected, 1e-3)
    slopes = jax.grad(lambda v: jnp.sum(jax.lax.conv_general_dilated(x, v, (1, 1), "VALID") ** 2))(jnp.asarray(kernel))
    show("gradient of the convolution", slopes)


def others():
    x = numbers(1000, 64)
    close("fft", jnp.fft.fft(x), np.fft.fft(x), 1e-3)
    close("sort", jnp.sort(x, axis=0), np.sort(x, axis=0), 0)
    close("softmax", jax.nn.softmax(jnp.asarray(x)), np.exp(x) / np.exp(x).sum(1, keepdims=True), 1e-5)
    close("scan", jax.lax.scan(lambda c, v: (c * 0.5 + v, c), jnp.zeros(64), x)[0],
          sum(x[i].astype(np.float64) * 0.5 ** (999 - i) for i in range(900, 1000)), 1e-4)
    close("vmap", jax.vmap(lambda v: v @ v)(jnp.asarray(x)), (x.astype(np.float64) ** 2).sum(1), 1e-1)
    spd = x.T @ x + np.eye(64, dtype=np.float32)
    close("cholesky", jnp.linalg.cholesky(spd), np.linalg.cholesky(spd.astype(np.float64)), 1e-3)
    key = jax.random.key(7)
    show("random normal", jax.random.normal(key, (1000,)))
    show("random permutation", jax.random.permutation(key, 1000))


print("device:", jax.devices()[0].platform, jax.devices()[0].device_kind)
require("device", jax.devices()[0].platform == "gpu", "is no GPU")
for part in (gradient, products, convolution, others):
    attempt(part)
print("FAIL" if failures else "PASS")
sys.exit(1 if failures else 0)
