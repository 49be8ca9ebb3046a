"""JAX: a training step of a small network, compiled by XLA."""
import jax

from jax_network import network
from measuring import main, workload

pending = None


@workload
def jax_train_step():
    weights, loss = network()

    @jax.jit
    def update(parameters):
        return [w - 0.1 * g for w, g in zip(parameters, jax.grad(loss)(parameters))]

    def step():
        nonlocal weights
        global pending
        weights = pending = update(weights)
    return step, 20


main(lambda: jax.block_until_ready(pending))
