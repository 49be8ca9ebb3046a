"""Times of PyTorch, as medians: `tests/on_gpu --speed` runs it natively and through the pool and prints ratios."""
import statistics
import time

import torch
from torch import nn

torch.manual_seed(1)


def median(name, body, count=1, turns=15, before=None):
    """Seconds of one call of the body; `count` calls are timed at once, synchronized at the end."""
    for _ in range(3):
        body()
    times = []
    for _ in range(turns):
        if before:
            before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            body()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / count)
    print(f"{name}: {statistics.median(times):.4e} s", flush=True)


def copies():
    size = 256 << 20
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, host in (("pinned", torch.empty(size, dtype=torch.uint8, pin_memory=True)),
                       ("pageable", torch.ones(size, dtype=torch.uint8))):
        median(f"H2D 256 MiB {name}", lambda: device.copy_(host), turns=7)
        median(f"D2H 256 MiB {name}", lambda: host.copy_(device), turns=7)


def training_step(autocast):
    network = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
                            nn.Flatten(), nn.Linear(64 * 64, 10)).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(64, 3, 32, 32, device="cuda"), torch.randint(0, 10, (64,), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
    return step


def replay():
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(20)]).cuda()
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
    return graph.replay


a = torch.zeros(1024, device="cuda")
median("a.add_(1), 1024 floats", lambda: a.add_(1), 2000)
median("a.add_(1), synchronized", lambda: (a.add_(1), torch.cuda.synchronize()), 300)
median("a[0].item()", lambda: a[0].item(), 300)
median("torch.empty and free, 1 MiB", lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda"), 1000)
copies()
big = torch.randn(4096, 4096, device="cuda")
median("sgemm 4096", lambda: big @ big, 5)
half = big.half()
median("fp16 product 4096", lambda: half @ half, 20)
median("fft2 4096", lambda: torch.fft.fft2(big), 20)
median("CNN training step, fp32", training_step(False), 20)
median("CNN training step, bf16 autocast", training_step(True), 20)
median("graph replay, 20 layers", replay(), 50)
