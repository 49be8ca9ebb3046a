"""Two GPUs in one process: the same kernels on both, copies between them, a model on each in a thread of its own, and
a model that moves from one to the other in the middle of its training. With one GPU the script has nothing to show."""
import threading

from common_torch import attempt, close, finish, require, show, start, torch

DEVICES = 2


def products():
    """One after the other with the same kernels: what is known of a kernel on one GPU says nothing about the other."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (torch.randn(512, 512).to(dtype) for _ in range(2))
        for device in (0, 1, 0):
            result = a.to(device) @ b.to(device)
            show(f"product on {device}", result)
            close(f"product on {device}", result, a.double() @ b.double(), 1e-1)


def copies():
    require("peers", torch.cuda.can_device_access_peer(0, 1) == torch.cuda.can_device_access_peer(1, 0))
    values = torch.randint(0, 1 << 30, (8 << 20,), dtype=torch.int32)
    there = values.to(0).to(1)
    back = there.to(0)
    show("there", there)
    require("there and back", torch.equal(back.cpu(), values))
    rows = values.view(4096, -1).to(1)[::3, 5:77].to(0)
    show("rows", rows)
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            ready = there * 2
            event = torch.cuda.Event()
            event.record()
    torch.cuda.current_stream(0).wait_event(event)
    show("after the other's event", ready.to(0, non_blocking=True) + back)


def model(device):
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(),
                                 torch.nn.Linear(16 * 14 * 14, 10))
    return layers.to(device)


def train(layers, device, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(32, 3, 16, 16, generator=generator).to(device)
    labels = torch.randint(0, 10, (32,), generator=generator).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), 0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layers(images), labels).backward()
        optimizer.step()


def threads():
    models = [model(device) for device in range(DEVICES)]
    workers = [threading.Thread(target=train, args=(models[device], device, 30, 5)) for device in range(DEVICES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        show("trained", one)
        require("the same on both", torch.equal(one.cpu(), other.cpu()))


def moved():
    layers = model(0)
    train(layers, 0, 10, 6)
    layers.to(1)
    train(layers, 1, 10, 7)
    show("moved", layers[3].weight)


def pinned():
    values = torch.randn(1 << 20).pin_memory()
    for device in (1, 0):
        show(f"from pinned memory to {device}", values.to(device, non_blocking=True) * 2)


start()
if torch.cuda.device_count() < DEVICES:
    print("one GPU only: nothing to do")
else:
    for part in (products, copies, threads, moved, pinned):
        attempt(part.__name__, part)
finish()
