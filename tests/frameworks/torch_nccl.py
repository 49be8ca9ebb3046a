"""NCCL in one process on two GPUs: collectives by themselves, and DataParallel, which broadcasts and reduces with them.
With one GPU the script has nothing to show."""
import os

# Multicast is not offered by the pool, so both sides go without.
os.environ["NCCL_NVLS_ENABLE"] = "0"

from common_torch import attempt, close, finish, require, show, start, torch
from torch.cuda import nccl

DEVICES = 2
SIZES = (1, 1000, 1 << 18, 1 << 23)


def tensors(size, dtype=torch.float32):
    """Whole numbers, whose sums are exact in every order."""
    return [torch.arange(size, dtype=torch.int32).remainder(1000).add(rank).to(dtype).to(rank) for rank in range(DEVICES)]


def all_reduce():
    for size in SIZES:
        for dtype in (torch.float32, torch.float16, torch.int32):
            parts = tensors(size, dtype)
            expected = sum(part.cpu().double() for part in parts)
            nccl.all_reduce(parts)
            for part in parts:
                close(f"all_reduce of {size}", part, expected, 1e-3)
            show(f"all_reduce of {size}", parts[0])


def others():
    parts = tensors(1 << 16)
    nccl.broadcast(parts, root=0)
    require("broadcast", torch.equal(parts[0].cpu(), parts[1].cpu()))
    parts = tensors(1 << 16)
    gathered = [torch.empty(DEVICES << 16, device=rank) for rank in range(DEVICES)]
    nccl.all_gather(parts, gathered)
    require("all_gather", torch.equal(gathered[0].cpu(), gathered[1].cpu()))
    show("all_gather", gathered[1])
    scattered = [torch.empty(1 << 15, device=rank) for rank in range(DEVICES)]
    nccl.reduce_scatter(parts, scattered)
    show("reduce_scatter", torch.cat([part.cpu() for part in scattered]))
    total = torch.empty(1 << 16, device=0)
    nccl.reduce(parts, output=total, root=0)
    show("reduce", total)


def data_parallel():
    torch.manual_seed(3)
    layers = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(),
                                                       torch.nn.Linear(512, 10)).cuda(), device_ids=[0, 1])
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    values, labels = torch.randn(64, 256).cuda(), torch.randint(0, 10, (64,)).cuda()
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layers(values), labels).backward()
        optimizer.step()
    show("DataParallel", layers.module[2].weight)


start()
if torch.cuda.device_count() < DEVICES:
    print("one GPU only: nothing to do")
else:
    for part in (all_reduce, others, data_parallel):
        attempt(part.__name__, part)
finish()
