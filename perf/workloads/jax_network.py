"""A small network for JAX, which several workloads train."""
import jax
import jax.numpy as jnp


def network():
    """Its four layers of 1024, and its loss as a function of them."""
    keys = jax.random.split(jax.random.PRNGKey(1), 4)
    weights = [jax.random.normal(key, (1024, 1024)) / 32 for key in keys]
    x = jax.random.normal(keys[0], (256, 1024))

    def loss(parameters):
        h = x
        for w in parameters:
            h = jnp.tanh(h @ w)
        return (h * h).mean()

    return weights, loss
