"""Cases between two namespaces: what the wire does to frames, and what becomes of sessions when it is cut."""

import os
import random
import re
import signal
import subprocess
import time

import pace
from network import CLIENT, PORT, SERVER, Failure, check, gone, wait_until

PEER_BOUND = 2.0  # s: transports/transport.h, Options::peerTimeout
TTL = 3  # s: leases of these tests; the holder renews three times in it
CLEAR = r"^gpupool.*: the GPU server is gone: "

CONDITIONS = {
    "delay": [dict(delay=100, jitter=100), dict(delay=200, jitter=20)],
    "loss": [dict(loss=0.1), dict(loss=1), dict(loss=5, delay=50)],
    "reorder": [dict(reorder=2, delay=50, jitter=50), dict(reorder=20)],
    "duplicate": [dict(duplicate=1), dict(duplicate=20, delay=50)],
    "cap": [dict(rate=50_000), dict(rate=8_000, queue=32 << 10)],
    "all": [dict(delay=100, jitter=100, loss=0.5, duplicate=1, reorder=2, rate=100_000)],
}


def drawn(seed):
    """Conditions from a seed, for `--seeds`."""
    draw = random.Random(seed)
    conditions = dict(delay=draw.randrange(0, 200), jitter=draw.randrange(0, 100))
    conditions["loss"] = round(draw.choice([0, 0.1, 0.5, 1, 2, 5]) * draw.random(), 3)
    conditions["duplicate"] = draw.choice([0, 0, 1, 5])
    conditions["reorder"] = draw.choice([0, 0, 1, 5])
    conditions["rate"] = draw.choice([0, 0, 20_000, 50_000, 200_000])
    return conditions


def one_condition(bench, conditions, seconds):
    network, pool = bench.network(), bench.pool()
    network.set(**conditions)
    before = network.stats()
    try:
        program = pool.run([bench.load, "check", str(seconds), "4"])  # MiB at least: frames for the wire to spoil
        status, _ = program.end(seconds + 60)
        after = network.stats()
    finally:
        network.set()
    text = ", ".join(f"{name} {value}" for name, value in conditions.items() if value)
    happened = {name: after[name] - before[name] for name in after}
    right = re.search(r"right: (\d+) rounds, (\d+) bytes", program.text("out"))
    check(status == 0 and right, f"{text}: exit status {status}\n{program.everything()}")
    for name in ("lost", "duplicated", "reordered"):
        cause = {"lost": "loss", "duplicated": "duplicate", "reordered": "reorder"}[name]
        if conditions.get(cause, 0) >= 1:
            check(happened[name] > 0, f"{text}: the wire did nothing of the kind")
    faults = ", ".join(f"{count} {name}" for name, count in happened.items() if count and name != "forwarded")
    bench.row(text, f"right: {right[1]} rounds, {int(right[2]) >> 20} MiB checked; "
              f"{happened['forwarded']} frames" + (f", {faults}" if faults else ""))
    wait_until(lambda: not pool.leases(), 10, f"{text}: the lease given back")


def conditions_case(name):
    def case(bench):
        for conditions in CONDITIONS[name]:
            one_condition(bench, conditions, bench.seconds)
    return case


def drawn_conditions(bench):
    for seed in bench.seeds(4):
        one_condition(bench, drawn(seed), bench.seconds)


def lose_peer(bench, name, side, mode):
    """The wire is cut for good under a program: both sides notice in time, and all is free again."""
    network, pool = bench.network(), bench.pool()
    free = pool.free()
    program = pool.run([bench.load, mode, "60"], options=["--ttl", f"{TTL}s"])
    program.await_line("out", "ready", 20)
    if mode == "check":
        program.await_line("out", "round", 20)
    workers = pool.sessions()
    check(len(workers) == 1, f"there must be one session, there are {workers}")
    cut = network.link_down("client") if side == "link" else network.cut("right" if side == "reset" else side)
    if side == "reset":  # it dies, and nobody hears of it: what its kernel says is lost
        os.kill(workers[0], signal.SIGKILL)
    try:
        noticed = program.await_line("err", CLEAR, PEER_BOUND * bench.patience + 3)
        told = pace.seconds(cut, noticed[0])
        wait_until(lambda: gone(workers[0]), PEER_BOUND * bench.patience + 3, "the worker's end")
        worker = pace.seconds(cut)
        error = None
        if mode != "idle":
            error = program.await_line("out", "CUDA error: CUDA_ERROR_DEVICE_UNAVAILABLE", 5)[0]
            error = pace.seconds(cut, error)
        # Nobody can give the lease back: it ends when it was not renewed.
        wait_until(lambda: not pool.leases() and pool.free() == free, TTL + 6, "the lease's end")
        leased = time.monotonic() - cut
        if mode == "idle":
            program.kill()
        else:
            status, _ = program.end(15)
            check(status == 3, f"exit status {status}\n{program.everything()}")
        ended = time.monotonic() - cut
    finally:
        network.heal()
        if side == "link":
            network.link_up("client")
    lines = [line for line in program.text("err").splitlines() if re.search(CLEAR, line)]
    check(len(lines) == 1, f"one line must say so, these do: {lines}")
    check(max(told, worker, error or 0) <= PEER_BOUND * bench.patience,
          f"noticed after {told:.2f} s (client), {worker:.2f} s (worker); the bound is {PEER_BOUND} s")
    bench.row(name, f"client told after {told:.2f} s" + (f", call failed after {error:.2f} s" if error else "") +
              f", worker gone and its memory free after {worker:.2f} s (bound {PEER_BOUND:.0f} s), lease ended "
              f"after {leased:.1f} s (ttl {TTL} s), gpupool run after {ended:.1f} s")


def partition_long(bench):
    lose_peer(bench, "host vanishes, program busy", "both", "check")
    lose_peer(bench, "host vanishes, program waits", "both", "wait")
    lose_peer(bench, "host vanishes, program idle", "both", "idle")
    lose_peer(bench, "client's link goes down", "link", "check")
    lose_peer(bench, "worker dies, its RST is lost", "reset", "wait")


def partition_one_way(bench):
    lose_peer(bench, "only client to server lost", "left", "check")
    lose_peer(bench, "only server to client lost", "right", "check")
    lose_peer(bench, "only client to server lost, program idle", "left", "idle")
    lose_peer(bench, "only server to client lost, program waits", "right", "wait")


def partition_short(bench):
    network, pool = bench.network(), bench.pool()
    for length in (0.3, 0.7, 1.1):
        program = pool.run([bench.load, "check", str(3 * (length + 1.2))])
        program.await_line("out", "round", 20)
        for side in ("both", "left", "right"):
            network.cut(side)
            time.sleep(length)
            network.heal()
            time.sleep(1.2)
        status, _ = program.end(60)
        right = re.search(r"right: (\d+) rounds", program.text("out"))
        check(status == 0 and right, f"{length} s: exit status {status}\n{program.everything()}")
        bench.row(f"three partitions of {length} s, healed", f"right: {right[1]} rounds")


def manager_cut(bench):
    """Holder and manager cannot talk, client and worker can: the session runs until the lease's rules end it."""
    network, pool = bench.network(), bench.pool()
    ttl = 4
    program = pool.run([bench.load, "check", "8"], options=["--ttl", f"{ttl}s"])
    program.await_line("out", "round", 20)
    network.cut("both", PORT)
    time.sleep(ttl - 2)  # a renewal or two are lost
    check(program.process.poll() is None and pool.leases(), "the lease or the program ended too early")
    network.heal()
    status, _ = program.end(30)
    check(status == 0 and "right:" in program.text("out"), f"exit status {status}\n{program.everything()}")
    bench.row(f"manager unreachable for {ttl - 2} s of a ttl of {ttl} s", "right; the lease went on")
    wait_until(lambda: not pool.leases(), 10, "the lease given back")

    free = pool.free()
    program = pool.run([bench.load, "check", "30"], options=["--ttl", f"{ttl}s"])
    program.await_line("out", "round", 20)
    cut = network.cut("both", PORT)
    error = program.await_line("out", "CUDA error", ttl + 8)[0] - cut
    wait_until(lambda: not pool.leases() and pool.free() == free, 5, "the devices free")
    leased = time.monotonic() - cut
    status, _ = program.end(20)
    network.heal()
    said = program.text("err")
    check(status == 3 and "has not renewed it" in said, f"exit status {status}; it said:\n{said}")
    check(error >= ttl * 2 / 3 - 0.2, f"the session was stopped after {error:.1f} s, its ttl is {ttl} s")
    bench.row(f"manager unreachable for good, ttl {ttl} s",
              f"session ran on for {error:.1f} s, then a clear error; devices free after {leased:.1f} s")


def half_open(bench):
    """The client's host vanishes without a word: no connection of it stays open in manager or server."""
    network, pool = bench.network(), bench.pool()
    def from_client():
        return [pair for pair in network.sockets("server") if CLIENT in pair[1]]
    programs = [pool.run([bench.load, "idle", "60"], options=["--ttl", f"{TTL}s"]) for _ in range(3)]
    for program in programs:
        program.await_line("out", "ready", 20)
    # And somebody who connects to manager and server and never says anything.
    port = re.search(r"sessions from the network: \S+ port (\d+)", pool.log_of("server"))[1]
    quiet = bench.spawn(network.inside("client", ["python3", "-c", f"""
import socket, time
kept = [socket.create_connection(("{SERVER}", port)) for port in 3 * [{PORT}, {port}]]
print("ready", flush=True)
time.sleep(600)"""]))
    quiet.await_line("out", "ready", 10)
    before = len(from_client())
    check(before >= 15, f"only {before} connections to begin with")
    cut = network.cut()
    try:
        wait_until(lambda: not from_client(), 40, "half-open connections closed")
        closed = time.monotonic() - cut
        wait_until(lambda: not pool.leases() and not pool.sessions(), 10, "leases and sessions ended")
    finally:
        for program in programs + [quiet]:
            program.kill()
        network.heal()
    bench.row("half-open connections", f"{before} of a vanished host all closed after {closed:.1f} s")
    # The pool is as good as before.
    one_condition(bench, dict(), 1)


def unreachable(bench):
    """A manager's address that nobody answers at."""
    network, pool = bench.network(), bench.pool()
    for what, address, bound in (("black hole", "192.0.2.1:4780", 5), ("no such name", "no-such-host.invalid", 15),
                                 ("nobody listens", f"{SERVER}:9", 3),
                                 ("black hole, then a manager", f"192.0.2.1:4780,{SERVER}:{PORT}", 15)):
        good = what.endswith("a manager")
        words = [pool.gpupool, "run", "--transport", "ucx", "--memory", "1GiB", "--manager", address, "--",
                 bench.load, "check", "0"]
        # Black hole: routed to the other side, where nobody answers.
        program = bench.spawn(network.inside("client", words), pool.environment)
        status, at = program.end(bound + 10)
        took = pace.seconds(program.began, at)
        said = program.text("err").splitlines()
        if good:
            check(status == 0, f"{what}: exit status {status}\n{program.everything()}")
        else:
            check(status == 125 and len(said) == 1 and "no pool manager is reachable" in said[0] and
                  address.split(":")[0] in said[0], f"{what}: {status}\n{program.everything()}")
        check(took < bound, f"{what}: took {took:.1f} s, the bound is {bound} s")
        told = "right" if good else re.search(r"reachable \((tried [^)]*)\)", said[0])[1]
        bench.row(f"{what} ({address})", f"{told}; {took:.1f} s")
        if not good:  # and without the wrapper, from cuInit
            environment = dict(pool.environment, GPUPOOL_MANAGER=address, GPUPOOL_TRANSPORT="ucx")
            program = bench.spawn(network.inside("client", [bench.load, "check", "0"]), environment)
            status, at = program.end(bound + 10)
            took = pace.seconds(program.began, at)
            check(status == 3 and "CUDA_ERROR_NO_DEVICE" in program.text("out") and
                  "no pool manager is reachable" in program.text("err"), f"{what}: {status}\n{program.everything()}")
            check(took < bound, f"{what}: cuInit took {took:.1f} s, the bound is {bound} s")


def went_on(program, epoch):
    return program.find("err", f"server is gone, and it goes on at another one as epoch {epoch}: ")


def on_server(pool, name):
    return [line for line in pool.ask("leases").splitlines() if re.match(r"[0-9a-f]{8} ", line) and f" {name} " in line]


def workers_of(server):
    """Processes below it that have a session: they capture what kernels print."""
    found = subprocess.run(["pgrep", "-P", str(server)], text=True, stdout=subprocess.PIPE).stdout.split()
    return [pid for pid in found if "gpupool-output" in link_of(f"/proc/{pid}/fd/1")]


def link_of(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""


def protected_on_far(bench, pool):
    """A program on the server `far`, whose holder has a checkpoint and which works since."""
    program = pool.run([bench.load, "watched", "0"], input=True, environment={"GPUPOOL_LOG": "info"},
                       options=["--server", "far", "--protect=1h", "--protect-silence", "2s"])
    program.await_line("out", "round", 30)
    wait_until(lambda: re.search(r"is protected for .*checkpoint is .*the calls since then take", pool.ask("leases", "-v")),
               30, "it is protected")
    check(on_server(pool, "far"), f"it is not on that server: {pool.ask('leases')}")
    return program


def goes_on_near(bench, pool, program, cut, what):
    wait_until(lambda: went_on(program, 2), 30, f"{what}: it goes on\n{program.everything()}")
    took = pace.seconds(cut, went_on(program, 2)[0])
    check(on_server(pool, "node"), f"{what}: the lease is not on the other server: {pool.ask('leases')}")
    at = time.monotonic()
    wait_until(lambda: any(when > at for when, line in program.lines["out"] if line.startswith("round")), 20,
               f"{what}: it works there")
    return took


def ends_right(bench, pool, program, what):
    program.say("")
    status, _ = program.end(60)
    check(status == 0 and "right:" in program.text("out"), f"{what}: exit status {status}\n{program.everything()}")
    check(not went_on(program, 3), f"{what}: it went on more than once\n{program.everything()}")
    wait_until(lambda: not pool.leases(), 20, f"{what}: the lease given back")


def failover(bench):
    """A protected program whose server is cut off from it and from the manager goes on at another one; so it does when that
    server's whole machine stops, and when the server is cut off from the program alone. What comes back has nothing of it,
    and does not reach the program."""
    network, pool = bench.network(), bench.pool(part="client")
    free = pool.free()
    far = pool.join("far")
    server = far.process.pid  # `ip netns exec` has become it
    wait_until(lambda: len(pool.free()) == len(free) + 2, 10, "both servers' GPUs")
    program = protected_on_far(bench, pool)
    old = workers_of(server)
    check(len(old) == 1, f"there must be one session on it, there are {old}")
    cut = network.cut()
    took = goes_on_near(bench, pool, program, cut, "partition")
    network.heal()
    wait_until(lambda: all(gone(pid) for pid in old), 30, "partition: what is left there ends")
    wait_until(lambda: not on_server(pool, "far"), 20, "partition: the lease has left it for good")
    wait_until(lambda: "far" in pool.ask("servers") and sum(pool.free()) >= sum(free) + 2 * free[0] - (1 << 30), 30,
               "partition: its GPUs are free")
    ends_right(bench, pool, program, "partition")
    bench.row("server cut off, the partition heals", f"went on after {took:.1f} s; nothing is left on the old server")

    program = protected_on_far(bench, pool)
    cut = network.cut()
    # Its machine has no time to say anything: no connection of it ends.
    for pid in [*workers_of(server), server]:
        os.kill(int(pid), signal.SIGKILL)
    took = goes_on_near(bench, pool, program, cut, "machine stops")
    network.heal()
    far.end(20)
    far = pool.join("far")
    wait_until(lambda: not on_server(pool, "far"), 20, "machine stops: its next life has nothing of the lease")
    ends_right(bench, pool, program, "machine stops")
    bench.row("server's machine stops, and comes back", f"went on after {took:.1f} s")
    far.kill()

    far = pool.join("far", wire=False)
    program = protected_on_far(bench, pool)
    old = workers_of(far.process.pid)
    cut = network.cut()
    took = goes_on_near(bench, pool, program, cut, "cut off from the program")
    wait_until(lambda: all(gone(pid) for pid in old), 30, "cut off from the program: what is left there ends")
    network.heal()
    ends_right(bench, pool, program, "cut off from the program")
    bench.row("server cut off from the program alone", f"went on after {took:.1f} s")
    far.kill()


CASES = {name: conditions_case(name) for name in CONDITIONS}
CASES.update({
    "drawn": drawn_conditions,
    "partition-long": partition_long,
    "partition-one-way": partition_one_way,
    "partition-short": partition_short,
    "manager-cut": manager_cut,
    "half-open": half_open,
    "unreachable": unreachable,
    "failover": failover,
})
