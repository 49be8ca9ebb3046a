"""JAX: a training step of a small network, compiled by XLA."""
import jax
import jax.numpy as jnp

from measuring import main, workload

pending = None


@workload
def jax_train_step():
    keys = jax.random.split(jax.random.PRNGKey(1), 4)
    weights = [jax.random.normal(key, (1024, 1024)) / 32 for key in keys]
    x = jax.random.normal(keys[0], (256, 1024))

    def loss(parameters):
        h = x
        for w in parameters:
            h = jnp.tanh(h @ w)
        return (h * h).mean()

    @jax.jit
    def update(parameters):
        return [w - 0.1 * g for w, g in zip(parameters, jax.grad(loss)(parameters))]

    def step():
        nonlocal weights
        global pending
        weights = pending = update(weights)
    return step, 20


main(lambda: jax.block_until_ready(pending))
