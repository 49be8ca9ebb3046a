"""A training or another loop, which prints what it computes, every tenth step and at the end: what `perf/killed` runs, and
kills the worker of.

    killed_steps.py WORKLOAD STEPS [PAUSE,...]

Before each step that is a PAUSE it waits for a line on stdin. Its stdout has nothing that differs from run to run if the loop does not. Its stderr has, at the end, the longest step and
the median one, in milliseconds.
"""
import hashlib
import statistics
import sys
import time

WORKLOADS = {}


def workload(function):
    WORKLOADS[function.__name__] = function
    return function


def torch_digest(tensors):
    import torch  # pylint: disable=import-outside-toplevel
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def trained(model, data, loss_of, bf16=False, optimizer=None):
    """A step that trains the model, and what is told of it at the end."""
    import torch  # pylint: disable=import-outside-toplevel
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            loss = loss_of(model, *data)
        loss.backward()
        optimizer.step()
        return loss

    return step, lambda: torch_digest(model.state_dict().values())


@workload
def resnet50_train():
    import torch  # pylint: disable=import-outside-toplevel
    import torchvision  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)
    model = torchvision.models.resnet50().cuda().train()
    data = torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")
    return trained(model, data, lambda net, x, y: torch.nn.functional.cross_entropy(net(x), y), bf16=True)


@workload
def resnet50_loader():
    """Each step uploads new images, as a data loader does, from pinned memory."""
    import torch  # pylint: disable=import-outside-toplevel
    import torchvision  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)
    model = torchvision.models.resnet50().cuda().train()
    batches = [torch.randn(32, 3, 224, 224).pin_memory() for _ in range(4)]
    labels = torch.randint(0, 1000, (32,), device="cuda")
    turn = iter(range(1 << 30))

    def loss(net, y):
        return torch.nn.functional.cross_entropy(net(batches[next(turn) % 4].cuda(non_blocking=True)), y)

    return trained(model, (labels,), loss, bf16=True)


@workload
def lstm_train():
    import torch  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(256, 512, 2, batch_first=True), torch.nn.Linear(512, 10)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    data = torch.randn(64, 50, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    return trained(Net().cuda(), data, lambda net, x, y: torch.nn.functional.cross_entropy(net(x), y))


@workload
def gpt2_train():
    import torch  # pylint: disable=import-outside-toplevel
    import transformers  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda().train()
    tokens = torch.randint(0, 50000, (4, 256), device="cuda")
    return trained(model, (tokens,), lambda net, ids: net(ids, labels=ids).loss, bf16=True)


@workload
def gpt2_adamw():
    """The training that differs from itself natively: kernels of attention add up floats in the order of their arrival."""
    import torch  # pylint: disable=import-outside-toplevel
    import transformers  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda().train()
    tokens = torch.randint(0, 50000, (8, 1024), device="cuda")
    return trained(model, (tokens,), lambda net, ids: net(ids, labels=ids).loss, bf16=True,
                   optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4))


@workload
def atomic_sums():
    """Sums whose order no two runs share, each of which is read."""
    import torch  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)
    values, places = torch.randn(1 << 20, device="cuda"), torch.randint(0, 4, (1 << 20,), device="cuda")
    kept = torch.zeros(4, device="cuda")

    def step():
        for _ in range(20):
            kept.mul_(0.5).index_add_(0, places, values)
        return kept.abs().sum()

    return step, lambda: torch_digest([kept])


@workload
def gpt2_generate():
    import torch  # pylint: disable=import-outside-toplevel
    import transformers  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda().half().eval()
    prompt, told = torch.randint(0, 50000, (1, 16), device="cuda"), []

    @torch.no_grad()
    def step():
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, min_new_tokens=16,
                                do_sample=False, pad_token_id=0)
        told[:] = [tokens]
        return tokens.sum()

    return step, lambda: torch_digest(told)


@workload
def cuda_graph():
    """An inference as a CUDA graph, whose output is its next input."""
    import torch  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda().half().eval()
    kept = torch.randn(64, 1024, device="cuda", dtype=torch.float16)

    @torch.no_grad()
    def once():
        kept.copy_(torch.nn.functional.layer_norm(model(kept), (1024,)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def step():
        for _ in range(50):
            graph.replay()
        return kept.float().square().sum()

    return step, lambda: torch_digest([kept])


@workload
def cupy_fft():
    import cupy  # pylint: disable=import-outside-toplevel
    cupy.random.seed(1)
    values = cupy.random.rand(1024, 1024).astype(cupy.complex64)

    def step():
        nonlocal values
        for _ in range(10):
            values = cupy.fft.ifft2(cupy.fft.fft2(values) * cupy.complex64(0.999 + 0.001j))
        return values.real.sum()

    return step, lambda: hashlib.sha256(cupy.asnumpy(values).tobytes()).hexdigest()[:16]


@workload
def jax_train():
    import jax  # pylint: disable=import-outside-toplevel
    import numpy  # pylint: disable=import-outside-toplevel
    from jax_network import network  # pylint: disable=import-outside-toplevel
    weights, loss_of = network()

    @jax.jit
    def update(parameters):
        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        return loss, [w - 0.1 * g for w, g in zip(parameters, gradients)]

    def step():
        nonlocal weights
        for _ in range(20):
            loss, weights = update(weights)
        return loss

    def digest():
        hashed = hashlib.sha256()
        for w in weights:
            hashed.update(numpy.asarray(w).tobytes())
        return hashed.hexdigest()[:16]

    return step, digest


def main():
    name, steps = sys.argv[1], int(sys.argv[2])
    pauses = [int(number) for number in sys.argv[3].split(",")] if len(sys.argv) > 3 else []
    step, digest = WORKLOADS[name]()
    times = []
    for number in range(steps):
        if number in pauses:
            print(f"pause {number}", flush=True)
            sys.stdin.readline()
        began = time.perf_counter()
        value = float(step())
        times.append(1000 * (time.perf_counter() - began))
        if number % 10 == 0:
            print(f"step {number}: {value!r}", flush=True)
    print(f"end: {digest()}", flush=True)
    usual = times[10:]
    print(f"longest {max(usual):.0f} ms, median {statistics.median(usual):.2f} ms", file=sys.stderr)


if __name__ == "__main__":
    main()
