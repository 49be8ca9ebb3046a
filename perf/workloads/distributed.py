"""A process for each GPU (torchrun): an MLP in DistributedDataParallel, then in FullyShardedDataParallel. Rank 0 prints what
a step takes, and a digest of losses, parameters, an all-to-all and sends in a ring, which every run has alike."""
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

STEPS, WARM = 200, 20
RANK, WORLD = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])


def say(*words):
    if RANK == 0:
        print(*words, flush=True)


def train(wrap, digest):
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    model = wrap(layers.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + RANK)
    for step in range(WARM + STEPS):
        if step == WARM:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        batch = torch.randn(64, 1024, device='cuda')
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            digest.update(repr(mean.item()).encode())
    torch.cuda.synchronize()
    say(wrap.__name__, f'{(time.perf_counter() - begun) / STEPS * 1000:.3f}')
    total = sum(one.detach().double().sum() for one in model.parameters())
    dist.all_reduce(total)
    digest.update(repr(total.item()).encode())


def exchange(digest):
    numbers = torch.arange(WORLD * 1000, device='cuda', dtype=torch.float32) * (RANK + 1)
    everyone = torch.empty_like(numbers)
    dist.all_to_all_single(everyone, numbers)
    digest.update(everyone.cpu().numpy().tobytes())
    before = torch.empty(1000, device='cuda')
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, numbers[:1000], (RANK + 1) % WORLD),
                                           dist.P2POp(dist.irecv, before, (RANK - 1) % WORLD)]):
        request.wait()
    digest.update(before.cpu().numpy().tobytes())


def main():
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    torch.use_deterministic_algorithms(True)
    dist.init_process_group('nccl')
    digest = hashlib.sha256()
    train(DistributedDataParallel, digest)
    train(FullyShardedDataParallel, digest)
    exchange(digest)
    say('digest', digest.hexdigest())
    dist.destroy_process_group()


main()
