"""End-to-end programs over a faulty transport (GPUPOOL_FAULTS, transports/transport.h): late messages, stalls, and the
loss of the peer at a message or in the middle of a transfer, all from a seed. A program ends with the right result, or
with a clear error within two seconds of the loss."""

import os
import random
import re

import pace
from network import Program, check, wait_until

BOUND = 2.0
CUT = r"faults: the wire is cut"
CLEAR = r"the GPU server is gone: |cannot connect to the worker: |the worker did not greet: |" \
        r"the worker's completion words did not arrive: "
# Those that check all they compute, and use the session in different ways.
PROGRAMS = """vector_add matmul reduction scan histogram transpose bitonic_sort stencil symbols managed_memory mapped_memory
memory_pools pitched_copies textures memset_attributes copy_sizes stress_allocations async_copies host_callbacks
graph_capture graph_manual graph_nodes per_thread_stream deep_queue stress_threads upload_order device_printf
function_pointers big_parameters separate virtual_memory contexts cooperative_groups fft""".split()


def drawn(seed):
    draw = random.Random(seed)
    program, transport = draw.choice(PROGRAMS), draw.choice(["shm", "ucx"])
    faults = {"seed": seed}
    if draw.random() < 0.5:
        faults["delay"] = f"{draw.choice([20, 200, 1000])}us"
    if draw.random() < 0.3:
        faults["stall"] = f"{draw.choice([1, 10])}ms"
    if draw.random() < 0.8:
        if transport == "ucx" and draw.random() < 0.4:
            faults["transfers"] = draw.randrange(1, 12)
        else:
            faults["lifetime"] = int(2 ** draw.uniform(0, 11))
    return program, transport, faults


def run_one(bench, seed, totals):
    program, transport, faults = drawn(seed)
    pool = bench.pool(local=True)
    text = ",".join(f"{name}={value}" for name, value in faults.items())
    what = f"seed {seed}: {program} over {transport}, {text}"
    running = Program([pool.gpupool, "run", "--transport", transport, "--memory", "1GiB", "--wait", "60s", "--",
                       *bench.instrumented.launcher, os.path.join(bench.programs, program)],
                      dict(pool.environment, GPUPOOL_FAULTS=text), folder=bench.programs)
    status, ended = running.end(120 * bench.patience)
    cut = running.find("err", CUT)
    with open(os.path.join(bench.expected, program + ".txt")) as expected:
        right = status == 0 and running.text("out") == expected.read().rstrip("\n")
    totals["runs"] += 1
    bench.note(f"{what}: {ended - running.began:.1f} s, {'right' if right else 'failed'}{', cut' if cut else ''}")
    totals["cut"] += cut is not None
    if right:
        totals["right"] += 1
        return
    check(cut, f"{what}: nothing was cut, and yet: exit status {status}\n{running.everything()}")
    took = pace.seconds(cut[0], ended)
    check(0 < status < 125, f"{what}: exit status {status} is no error of the program's\n{running.everything()}")
    check(re.search(CLEAR, running.text("err")), f"{what}: no line says why\n{running.everything()}")
    check(took <= BOUND * bench.patience, f"{what}: ended {took:.2f} s after the loss\n{running.everything()}")
    totals["clear"] += 1
    totals["longest"] = max(totals["longest"], took)


def faulty(bench):
    pool = bench.pool(local=True)
    totals = dict(runs=0, cut=0, right=0, clear=0, longest=0.0)
    for seed in bench.seeds(40):
        run_one(bench, seed, totals)
    wait_until(lambda: not pool.leases() and not pool.sessions(), 10 * bench.patience, "leases and sessions ended")
    check(totals["cut"] and totals["clear"] or totals["runs"] < 40, f"nothing was ever lost: {totals}")
    bench.row("programs over faulty(shm) and faulty(ucx)",
              f"{totals['runs']} runs, {totals['cut']} lost their peer; {totals['right']} right, {totals['clear']} "
              f"ended with a clear error, at most {totals['longest']:.2f} s after the loss (bound {BOUND:.0f} s)")
    # What cannot be read is said, by the program's first call.
    running = Program([pool.gpupool, "run", "--memory", "1GiB", "--", *bench.instrumented.launcher,
                       os.path.join(bench.programs, "vector_add")],
                      dict(pool.environment, GPUPOOL_FAULTS="colour=blue"))
    status, _ = running.end(20)
    check(status != 0 and "GPUPOOL_FAULTS: cannot read 'colour=blue'" in running.text("err"),
          f"nonsense was taken: {status}\n{running.everything()}")


CASES = {"faulty": faulty}
