"""Several processes: tensors through queues in both directions, events, a tensor that outlives its sender, DDP and FSDP by
NCCL with a process for each GPU where there are two. Prints the same natively and through a pool."""
import copy
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COUNT = 1 << 20


def say(text):
    print(text, flush=True)


def double(incoming, outgoing, done):
    """The other process: doubles what comes in place, and sends tensors of its own back."""
    while (item := incoming.get()) is not None:
        kind, tensor = item
        if kind == "double":
            tensor.mul_(2)
            torch.cuda.synchronize()
            outgoing.put(int(tensor.sum().item()))
        elif kind == "make":
            outgoing.put(torch.arange(tensor, device="cuda") + 7)
            done.wait()  # a sender keeps what others use
        del tensor, item
    outgoing.put("ended")


def queues(context):
    to, back, done = context.Queue(), context.Queue(), context.Event()
    other = context.Process(target=double, args=(to, back, done))
    other.start()
    for count in (10, COUNT):
        own = torch.arange(count, device="cuda")
        part = own[2:count // 2]  # lies within its allocation
        to.put(("double", part))
        assert back.get(timeout=120) == int(torch.arange(count)[2:count // 2].sum()) * 2
        expected = torch.arange(count)
        expected[2:count // 2] *= 2
        assert torch.equal(own.cpu(), expected)
        say(f"{count} values: doubled by the other process, in place")
    to.put(("make", COUNT))
    got = back.get(timeout=120)
    assert torch.equal(got.cpu(), torch.arange(COUNT) + 7)
    got += 1
    assert torch.equal(got.cpu(), torch.arange(COUNT) + 8)
    say("a tensor of the other process: right, and written to")
    del got
    done.set()
    to.put(None)
    assert back.get(timeout=120) == "ended"
    other.join(120)
    assert other.exitcode == 0
    say("the other process has ended well")


def record(handle, ready, tensor):
    event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), handle)
    event.wait()
    assert int(tensor.sum().item()) == COUNT * 3
    event.record()
    ready.set()


def events(context):
    ready = context.Event()
    event = torch.cuda.Event(enable_timing=False, interprocess=True)
    tensor = torch.ones(COUNT, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(100_000_000)
    tensor.mul_(3)
    event.record()
    other = context.Process(target=record, args=(event.ipc_handle(), ready, tensor))
    other.start()
    assert ready.wait(120)
    event.synchronize()
    other.join(120)
    assert other.exitcode == 0
    say("an event: waited for and recorded by the other process")


def train(rank, world, port, losses):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    numbers = torch.full((COUNT,), rank + 1, device="cuda")
    dist.all_reduce(numbers)
    assert bool((numbers == world * (world + 1) // 2).all())
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
    sums = [torch.zeros(1, device="cuda") for _ in range(world)]
    dist.all_gather(sums, sum(p.detach().abs().sum() for p in model.parameters()).reshape(1))
    assert all(torch.equal(one, sums[0]) for one in sums)
    sharded(rank)
    if rank == 0:
        losses.put(loss.item())
    dist.destroy_process_group()


def sharded(rank):
    """FSDP: each rank has a part of the parameters. It learns what DDP learns from the same batches."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # pylint: disable=import-outside-toplevel
    torch.manual_seed(2)
    whole = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).cuda()
    models = [FSDP(copy.deepcopy(whole), use_orig_params=True),
              torch.nn.parallel.DistributedDataParallel(whole, device_ids=[rank])]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    torch.manual_seed(rank)
    for _ in range(20):
        batch = torch.randn(32, 64, device="cuda")
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    with FSDP.summon_full_params(models[0]):
        gathered = [p.detach().clone() for p in models[0].parameters()]
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(gathered, whole.parameters(), strict=True))


def data_parallel(context, world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    losses = context.Queue()
    processes = [context.Process(target=train, args=(rank, world, port, losses)) for rank in range(world)]
    for process in processes:
        process.start()
    loss = losses.get(timeout=300)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    say(f"DDP and FSDP with a process for each GPU: {world} of them agree, loss {loss:.4f}")


def main():
    context = mp.get_context("spawn")
    queues(context)
    events(context)
    if torch.cuda.device_count() > 1 and "--no-nccl" not in sys.argv:
        data_parallel(context, 2)
    say("PASS")


if __name__ == "__main__":
    main()
