"""Back-pressure: who sends to a peer that takes nothing, or takes it slowly, waits; nobody buffers without a bound."""

import contextlib
import os
import re
import signal
import time

import pace
from network import check, gone, memory_of, wait_until

KINDS = ("launches", "pageable", "pinned", "downloads", "memsets", "callbacks")
MOST = 256  # MiB: of a client, all in all
GROWTH = 64  # MiB: of a worker, server or manager while a client is paused
PAUSE = 4.0  # s; well below transport::Options::stallTimeout
STALL = 2  # s: that, and with it the bound of each step of opening a session, where it is stopped in them
OPENING_DELAY = 200  # ms, one way
OPENING_STEP = 0.06  # s, between their starts
OPENINGS = 24


class Watched:
    """The largest resident size of some processes, in MiB."""

    def __init__(self, pids):
        self.begin = {pid: memory_of(pid) for pid in pids}
        self.most = dict(self.begin)

    def watch(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for pid in self.most:
                self.most[pid] = max(self.most[pid], memory_of(pid))
            time.sleep(0.05)

    def growth(self):
        return max(self.most[pid] - self.begin[pid] for pid in self.most)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as text:
        return [int(child) for child in text.read().split()]


def tell(pids, what):
    """How many were there. 0, pid_of's of a program that has ended, would be this process and all of its group."""
    told = 0
    for pid in pids:
        try:
            if pid > 0:
                os.kill(pid, what)
                told += 1
        except ProcessLookupError:
            pass  # it was about to end
    return told


def pid_of(program):
    """Of the CUDA program itself, below `gpupool run` and perhaps `ip netns exec`; 0: it is not there."""
    for child in children(program.process.pid):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            with open(f"/proc/{child}/comm") as name:
                if name.read().strip().startswith("network_load"):
                    return child
    return 0


def posted(program):
    found = re.search(r"right: (\d+) posted, (\d+) bytes", program.text("out"))
    return int(found[1]), int(found[2]) >> 20


def start(bench, pool, transport, kinds, seconds, mebibytes=32):
    programs = {kind: pool.run([bench.load, kind, str(seconds), str(mebibytes)], transport=transport, input=True)
                for kind in kinds}
    for program in programs.values():
        program.await_line("out", "ready", 60)
    return programs


def finish(programs, bound):
    for kind, program in programs.items():
        status, _ = program.end(bound)
        check(status == 0 and "right:" in program.text("out"), f"{kind}: exit status {status}\n{program.everything()}")


def worker_paused(bench):
    """Stopped workers, clients that post as fast as they can."""
    for transport in ("shm", "ucx"):
        pool = bench.pool(local=True, memory="8GiB")
        programs = start(bench, pool, transport, KINDS, PAUSE + 1)
        workers = pool.sessions()
        check(len(workers) == len(KINDS), f"{len(workers)} sessions for {len(KINDS)} programs")
        clients = {kind: pid_of(program) for kind, program in programs.items()}
        together = Watched(clients.values())
        tell(workers, signal.SIGSTOP)
        try:
            for program in programs.values():
                program.say("go")
            together.watch(PAUSE)
        finally:
            tell(workers, signal.SIGCONT)
        together.watch(1)
        finish(programs, 120)
        for kind, program in programs.items():
            most = together.most[clients[kind]]
            count, mebibytes = posted(program)
            bench.check_memory(most, MOST, f"{kind} over {transport}: the client grew to {most:.0f} MiB")
            bench.row(f"worker paused, {kind} over {transport}",
                      f"client at most {most:.0f} MiB (bound {MOST}); right: {count} posted, {mebibytes} MiB")
        wait_until(lambda: not pool.leases(), 20, "the leases given back")


def slow_network(bench):
    """One Mbit/s under clients that post as fast as they can; then the cap is lifted and all of it must be right."""
    network, pool = bench.network(), bench.pool()
    for kind in KINDS:
        programs = start(bench, pool, "ucx", [kind], 3, mebibytes=1)
        program = programs[kind]
        watched = Watched([pid_of(program)])
        workers = Watched(pool.sessions())
        network.set(rate=1000, queue=32 << 10)
        try:
            program.say("go")
            watched.watch(3)
            workers.watch(0.1)
        finally:
            network.set()
        finish(programs, 120)
        most = max(watched.most.values())
        count, mebibytes = posted(program)
        bench.check_memory(most, MOST, f"{kind}: the client grew to {most:.0f} MiB")
        bench.row(f"1 Mbit/s, {kind}", f"client at most {most:.0f} MiB (bound {MOST}), worker grew by "
                  f"{workers.growth():.0f} MiB; right: {count} posted, {mebibytes} MiB")
    wait_until(lambda: not pool.leases(), 20, "the lease given back")


def client_paused(bench):
    """Stopped clients in the middle of their work: what worker, server and manager hold for them is bounded."""
    for transport in ("shm", "ucx"):
        pool = bench.pool(local=True, memory="8GiB")
        programs = start(bench, pool, transport, KINDS, 3)
        clients = [pid_of(program) for program in programs.values()]
        for program in programs.values():
            program.say("go")
        time.sleep(1.5)
        # A machine that stood still meanwhile has had some of them come to their end.
        stopped = tell(clients, signal.SIGSTOP)
        check(stopped >= len(clients) // 2, f"only {stopped} clients were stopped")
        try:
            time.sleep(0.3)  # what was under way
            workers = Watched(pool.sessions())
            others = Watched([pool.process("server"), pool.process("manager")])
            workers.watch(PAUSE)
            others.watch(0.1)
            check(not any(gone(worker) for worker in workers.most), "a worker ended because its client was paused")
        finally:
            tell(clients, signal.SIGCONT)
        finish(programs, 120)
        for what, one in (("a worker", workers), ("server or manager", others)):
            bench.check_memory(one.growth(), GROWTH, f"{what} grew by {one.growth():.0f} MiB over {transport}")
        bench.row(f"{stopped} clients paused for {PAUSE:.0f} s over {transport}",
                  f"workers grew by at most {workers.growth():.1f} MiB, server and manager by {others.growth():.1f} MiB "
                  f"(bound {GROWTH}); all went on and were right")
        wait_until(lambda: not pool.leases(), 20, "the leases given back")


def opening_paused(bench):
    """Clients and workers stand still while sessions are opened, for longer than a step of that may take, and the
    workers a little longer: nobody gives up for time in which it did not run itself."""
    network, pool = bench.network(), bench.pool(memory="32GiB", environment={"GPUPOOL_STALL_TIME": f"{STALL}s"})
    network.set(delay=OPENING_DELAY)
    try:
        programs = []
        for _ in range(OPENINGS):
            programs.append(pool.run([bench.load, "check", "1"]))
            time.sleep(OPENING_STEP)
        wait_until(lambda: sum(map(bool, map(pid_of, programs))) >= OPENINGS // 2, 60, "half of the programs begun")
        # A program that begins now would run while its worker stands still, and give up with reason: it waits.
        tell([one.process.pid for one in programs if not pid_of(one)], signal.SIGSTOP)
        clients = [client for client in map(pid_of, programs) if client]
        workers = children(pool.process("server"))
        tell(workers + clients, signal.SIGSTOP)
        time.sleep(STALL + 0.4)
        tell(clients, signal.SIGCONT)
        time.sleep(0.3)
        tell(workers + [one.process.pid for one in programs], signal.SIGCONT)
        finish({f"program {number}": program for number, program in enumerate(programs)}, 60)
    finally:
        network.set()
    check(len(clients) >= OPENINGS // 2, f"only {len(clients)} programs were stopped")
    bench.row(f"clients and workers stopped for {STALL + 0.4:.1f} s while programs begin", f"right: {len(programs)}, of them stopped: {len(clients)}")
    wait_until(lambda: not pool.leases(), 20, "the leases given back")


def mute(bench):
    """Clients of the manager that ask and ask and read no answer, or never say that they have finished with one."""
    pool = bench.pool(local=True)
    manager = Watched([pool.process("manager")])
    askers = [bench.spawn([bench.mute, "unix:" + os.path.join(pool.state, "manager.sock"), "3", *how])
              for how in ([], ["reads"]) for _ in range(4)]
    manager.watch(3)
    taken = 0
    for asker in askers:
        status, _ = asker.end(20)
        found = re.search(r"(\d+) requests", asker.text("out"))
        check(status == 0 and found, asker.everything())
        check("then no more was taken" in asker.text("out"), "a client's calls are kept without bound")
        taken += int(found[1])
    bench.check_memory(manager.growth(), GROWTH, f"the manager grew by {manager.growth():.0f} MiB for {taken} requests")
    began = time.monotonic()
    check("LEASE" in pool.ask("leases"), "the manager answers nobody any more")
    bench.row("four clients ask the manager and never read, four never finish a call", f"it took {taken} requests and grew by {manager.growth():.1f} MiB "
              f"(bound {GROWTH}); another was answered within {time.monotonic() - began:.2f} s")


def last_words(bench):
    """Workers told to end in the middle of data on its way: why reaches the client, past what lies before it."""
    pool = bench.pool(local=True, memory="8GiB")
    kinds = (*KINDS, "held")
    for transport in ("shm", "ucx"):
        for kind in kinds:
            for _ in range(2):
                program = start(bench, pool, transport, [kind], 20)[kind]
                program.say("go")
                program.await_line("out", "posting", 10)
                time.sleep(0.3)
                told = time.monotonic()
                os.kill(pool.sessions()[0], signal.SIGTERM)
                program.await_line("out", "CUDA error|CORRUPTED", 10)
                took = pace.seconds(told)
                program.end(10)
                said = program.text("err")
                check("the GPU server is shutting down" in said and "CORRUPTED" not in program.text("out"),
                      f"{kind} over {transport}: {program.everything()}")
                check(took < 2 * bench.patience, f"{kind} over {transport}: {took:.1f} s until its next call failed")
                wait_until(lambda: not pool.leases(), 20, "the lease given back")
        bench.row(f"sessions ended by order over {transport}", f"{2 * len(kinds)} of {2 * len(kinds)} clients heard why")


CASES = {"mute": mute, "worker-paused": worker_paused, "slow-network": slow_network, "client-paused": client_paused,
         "opening-paused": opening_paused,
         "last-words": last_words}
