"""What strikes a real pool (real_run.py), by kind: one of its processes stops or dies, the wire, the disk, the store or the
clock of the manager is not what it should be, or a GPU shows up twice. Everything random comes from a seed."""
import os
import resource
import shutil
import signal
import time

import pace
import processes

KINDS = ("stop-manager", "kill-manager", "stop-server", "kill-server", "mixed", "stuck-worker", "partition", "full-disk",
         "slow-disk", "old-store", "empty-store", "twin", "clock")
LONG_KINDS = ("long-stop",)  # by name only: a minute or two each
FORGETTING = ("old-store", "empty-store")  # the manager does not know every lease: sessions end, and nothing worse
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
FREEZER = "/sys/fs/cgroup/freezer"  # of cgroups' first version: what is frozen does not even die by SIGKILL


def missing(kind):
    """Why a kind cannot be tried on this machine; ''."""
    if kind == "clock" and not os.access(FAKETIME, os.R_OK):
        return "Debian's package faketime is not installed"
    if kind == "stuck-worker" and not os.access(os.path.join(FREEZER, "cgroup.procs"), os.W_OK):
        return "there is no freezer of the first version of cgroups that this user may use"
    if kind == "slow-disk" and not shutil.which("strace"):
        return "strace is not installed"
    return ""


class Fault:
    """Strikes once, at a moment of the run, and is healed after a while."""

    def __init__(self, dice, member, ttl, span):
        self.member, self.at = member, dice.random() * span
        long = dice.random() < 0.4
        self.lasts = ttl * (1.3 + dice.random()) if long else dice.random() ** 2 * ttl * 0.5
        self.struck_at = self.over = None

    def __str__(self):
        return f"{self.member.name}: {type(self).__name__} at {self.at:.2f} s for {self.lasts:.2f} s"

    def begin(self):
        self.struck_at = time.monotonic()
        self.strike()

    def end(self):
        self.over = True
        self.heal()


class Stopped(Fault):
    def strike(self):
        self.member.send(signal.SIGSTOP)

    def heal(self):
        self.member.send(signal.SIGCONT)


class StoppedLong(Stopped):
    def __init__(self, dice, *rest):
        super().__init__(dice, *rest)
        self.lasts = 20 + 40 * dice.random()


class Killed(Fault):
    def strike(self):
        self.member.kill()

    def heal(self):
        self.member.start()


class KilledStuck(Fault):
    """A server is killed and started again while workers of its earlier life cannot die: as one that the kernel keeps in a
    driver's call."""

    def strike(self):
        self.group = os.path.join(FREEZER, f"gpupool-real-{os.getpid()}")
        os.makedirs(self.group)
        self.stuck = [pid for pid in processes.children(self.member.pid) if processes.executable(pid) == "gpupool-worker"]
        for pid in self.stuck:
            self.put("cgroup.procs", pid)
        self.put("freezer.state", "FROZEN")
        self.member.kill()
        self.member.start()

    def heal(self):
        self.put("freezer.state", "THAWED")
        for pid in self.stuck:
            processes.send(pid, signal.SIGKILL)
        began = time.monotonic()
        while os.path.isdir(self.group) and pace.seconds(began) < 20:
            try:
                os.rmdir(self.group)
            except OSError:
                time.sleep(0.02)
                self.member.reaper.sweep()

    def put(self, name, value):
        try:
            with open(os.path.join(self.group, name), "w", encoding="ascii") as file:
                file.write(str(value))
        except ProcessLookupError:
            pass  # a worker that has just ended


class DiskFull(Fault):
    """No file of the manager can be written any more. (Python ignores SIGXFSZ, and so do its children.)"""

    def strike(self):
        if self.member.lives_still():
            resource.prlimit(self.member.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def heal(self):
        if self.member.lives_still():
            resource.prlimit(self.member.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class DiskSlow(Fault):
    """What the manager writes takes long to be on the disk."""

    def __init__(self, dice, *rest):
        super().__init__(dice, *rest)
        self.delay = 0.05 + dice.random() ** 2 * 2

    def strike(self):
        calls = "fsync,fdatasync"
        words = [shutil.which("strace"), "-f", "-p", str(self.member.pid), "-o", "/dev/null", "-e", f"trace={calls}",
                 "-e", f"inject={calls}:delay_enter={round(self.delay * 1e6)}"]
        self.strace = self.member.reaper.start(words, dict(os.environ), self.member.beside("strace"))

    def heal(self):
        processes.send(self.strace.pid, signal.SIGINT)
        began = time.monotonic()
        while not self.member.reaper.end_of(self.strace.pid):
            if pace.seconds(began) > 20:
                processes.send(self.strace.pid, signal.SIGKILL)
            time.sleep(0.01)


class StoreOld(Fault):
    """The store is copied as docs/admin.md says, and put back later: what was leased in between is not in it."""

    def strike(self):
        self.member.stop()
        for path in self.files():
            shutil.copy2(path, path + ".copy")
        self.copied = self.files()
        self.member.start()

    def heal(self):
        self.member.kill()
        for path in self.files():
            os.unlink(path)
        for path in self.copied:
            os.rename(path + ".copy", path)
        self.member.start()

    def files(self):
        return [self.member.store + suffix for suffix in ("", "-wal", "-shm") if os.path.exists(self.member.store + suffix)]


class StoreEmpty(StoreOld):
    def strike(self):
        self.member.kill()
        for path in self.files():
            os.unlink(path)

    def heal(self):
        self.member.start()


class Twin(Fault):
    """Another server offers the GPUs of one that there is."""

    def __init__(self, dice, member, ttl, span):
        super().__init__(dice, member, ttl, span)
        self.at *= 0.5
        self.lasts += ttl

    def strike(self):
        self.member.start()

    def heal(self):
        self.member.stop()


class ClockSet(Fault):
    """The calendar of the manager's machine, up to a month forward or back."""

    def __init__(self, dice, *rest):
        super().__init__(dice, *rest)
        self.seconds = round(dice.choice((-1, 1)) * 60 ** (1 + dice.random() * 2.6))

    def strike(self):
        self.member.set(self.seconds)

    def heal(self):
        self.member.set(0)


def plan(dice, kind, pool, ttl, span):
    """The faults of a run, by the time at which they strike."""
    def one(make, member):
        return make(dice, member, ttl, span)

    def manager(make):
        return [one(make, pool.manager) for _ in range(dice.choice((1, 2, 2, 3)))]

    def servers(*make):
        return [one(dice.choice(make), dice.choice(pool.servers)) for _ in range(dice.choice((1, 2, 2, 3)))]

    def mixed():
        members = [pool.manager, pool.manager, *pool.servers]
        return [one(dice.choice((Stopped, Killed)), dice.choice(members)) for _ in range(dice.choice((1, 2, 2, 3)))]

    makers = {
        "stop-manager": lambda: manager(Stopped), "kill-manager": lambda: manager(Killed),
        "stop-server": lambda: servers(Stopped), "kill-server": lambda: servers(Killed), "mixed": mixed,
        "long-stop": lambda: [one(StoppedLong, dice.choice([pool.manager, *pool.servers]))],
        "stuck-worker": lambda: [one(KilledStuck, dice.choice(pool.servers))],
        "partition": lambda: [one(dice.choice((Stopped, Stopped, Killed)), dice.choice(pool.wires))
                              for _ in range(dice.choice((1, 2, 2, 3)))],
        "full-disk": lambda: manager(DiskFull) + ([one(Killed, pool.manager)] if dice.random() < 0.3 else []),
        "slow-disk": lambda: [one(DiskSlow, pool.manager)],
        "old-store": lambda: [one(StoreOld, pool.manager)], "empty-store": lambda: [one(StoreEmpty, pool.manager)],
        "twin": lambda: [one(Twin, pool.twin)] + ([one(dice.choice((Stopped, Killed)), pool.servers[0])]
                                                  if dice.random() < 0.6 else []),
        "clock": lambda: [one(ClockSet, pool.clock)] + ([one(Killed, pool.manager)] if dice.random() < 0.5 else []),
    }
    return sorted(makers[kind](), key=lambda fault: fault.at)
