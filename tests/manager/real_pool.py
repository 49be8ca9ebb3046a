"""A pool of real processes for tests/manager/real: a manager with its store, and two servers with two software GPUs each.
What an outsider sees of it: the processes, the lock files that workers hold, the servers' logs, and what `gpupool` lists."""
import json
import os
import re
import signal
import sys
import time

import pace
import processes
from real_faults import FAKETIME

HERE = os.path.dirname(os.path.realpath(__file__))
NAMES = ("north", "south")
DEVICE_BYTES = 2 << 30
USUAL_TTL = 15
BEGAN = re.compile(rb"session \w+: began, worker (\d+), client (\d+)")
GRANTED = re.compile(rb"lease (\w+) granted to \S+ pid (\d+)")
REVOKED = re.compile(rb"lease (\w+) revoked: (.*)")


class Broken(Exception):
    """The pool itself does not work: nothing more can be learned from it."""


class Member:
    """The manager or a server: a process that may be stopped, killed and started again."""

    def __init__(self, name, words, environment, folder, reaper):
        self.name, self.words, self.environment, self.reaper = name, words, environment, reaper
        self.folder = os.path.join(folder, name)
        os.makedirs(self.folder, mode=0o700)
        self.started, self.lives, self.kills, self.log_at = None, 0, 0, 0

    def start(self):
        self.started = self.reaper.start(self.words, self.environment, self.folder)
        self.lives, self.log_at = self.lives + 1, 0

    @property
    def pid(self):
        return self.started.pid

    def lives_still(self):
        return self.started is not None and self.reaper.end_of(self.pid) is None

    def beside(self, name):
        """A folder for what is started because of it."""
        path = os.path.join(self.folder, name)
        os.makedirs(path, exist_ok=True)
        return path

    def send(self, number):
        if self.lives_still():
            processes.send(self.pid, number)

    def kill(self):
        self.kills += self.lives_still()
        self.send(signal.SIGKILL)
        while self.lives_still():
            time.sleep(0.002)

    def stop(self, bound=30):
        """As systemctl does."""
        if wrong := self.end(bound):
            raise Broken("; ".join(wrong))

    def new_log(self):
        """Whole lines since the last call, of this life."""
        if self.started is None:
            return b""
        with open(self.started.errors, "rb") as file:
            file.seek(self.log_at)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self.log_at += end
        return text[:end]

    def end(self, bound):
        """In order: what is wrong with how it ended."""
        if not self.lives_still():
            return [f"{self.name} had ended before: {self.reaper.ended[self.pid][0]}"]
        self.send(signal.SIGTERM)
        began = time.monotonic()
        while self.lives_still():
            if pace.seconds(began) > bound:
                self.kill()
                return [f"{self.name} did not end within {bound} s of SIGTERM"]
            time.sleep(0.01)
        status = self.reaper.ended[self.pid][0]
        return [] if status == 0 else [f"{self.name} ended with status {status}"]


class Clock:
    """The manager's calendar, by libfaketime. Other clocks are the machine's: nobody can set them."""
    name = "clock"

    def __init__(self, folder):
        self.path = os.path.join(folder, "clock")
        self.set(0)
        self.environment = {"LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": self.path, "FAKETIME_NO_CACHE": "1",
                            "DONT_FAKE_MONOTONIC": "1"}

    def set(self, seconds):
        with open(self.path + ".new", "w", encoding="ascii") as file:
            file.write(f"{seconds:+d}\n")
        os.rename(self.path + ".new", self.path)


class RealPool:
    """faked: the manager's calendar can be set."""

    def __init__(self, build, folder, reaper, ttl, faked=False):
        self.build, self.folder, self.reaper, self.ttl = build, folder, reaper, ttl
        self.gpupool = os.path.join(build, "bin", "gpupool")
        self.locks, self.runtime, self.cache = (os.path.join(folder, name) for name in ("locks", "run", "cache"))
        for path in (self.locks, self.runtime, self.cache):
            os.makedirs(path, mode=0o700)
        self.mark = f"GPUPOOL_STATE={folder}/state"
        self.address = f"unix:{folder}/manager.sock"
        self.environment = {key: value for key, value in os.environ.items()
                            if not key.startswith("GPUPOOL_") and key != "CUDA_VISIBLE_DEVICES"}
        self.environment.update(GPUPOOL_STATE=f"{folder}/state", GPUPOOL_MANAGER=self.address, XDG_RUNTIME_DIR=self.runtime,
                                XDG_CACHE_HOME=self.cache, GPUPOOL_SOFT_MEMORY=f"{DEVICE_BYTES >> 30}GiB",
                                GPUPOOL_SOFT_DEVICES="2", GPUPOOL_LOG="info")
        self.clock = Clock(folder) if faked else None
        self.manager = self.make_manager()
        self.wires = [self.make_wire(name) for name in NAMES]
        self.servers = [self.make_server(name, self.wire_to(name), self.locks) for name in NAMES]
        self.twin = self.make_twin()
        self.clients = {}  # of workers' sessions, by worker: the client
        self.granted = {}  # by lease: the program, or its `gpupool run`
        self.revoked = []  # (lease, why) that nobody has looked at

    def make_manager(self):
        def seconds(part):
            return f"{round(self.ttl * part * 1000)}ms"
        store = f"{self.folder}/manager.db"
        words = [os.path.join(self.build, "bin", "gpupool-manager"), "--config", "/dev/null",
                 "--socket", f"{self.folder}/manager.sock", "--store", store]
        if self.ttl < USUAL_TTL:  # else all bounds are the manager's own
            words += ["--min-ttl", "100ms", "--beat", "200ms", "--silent", seconds(0.5), "--drift", seconds(0.15),
                      "--kill", seconds(1), "--call", seconds(1.5)]
        environment = {**self.environment, **(self.clock.environment if self.clock else {})}
        manager = Member("manager", words, environment, self.folder, self.reaper)
        manager.store = store
        return manager

    def wire_to(self, name):
        return f"{self.folder}/wire-{name}.sock"

    def make_wire(self, name):
        words = [sys.executable, os.path.join(HERE, "relay.py"), self.wire_to(name), f"{self.folder}/manager.sock"]
        return Member(f"wire-{name}", words, self.environment, self.folder, self.reaper)

    def make_server(self, name, manager, locks, **environment):
        words = [os.path.join(self.build, "bin", "gpupool-server"), "--config", "/dev/null", "--manager", f"unix:{manager}",
                 "--name", name, "--state", f"{self.folder}/state-{name}", "--device-locks", locks,
                 "--listen", "127.0.0.1:0", "--driver", os.path.join(self.build, "lib", "libcuda-soft.so"),
                 "--warm", "1", "--fabric", "none", "--handshake-time", "60s"]
        os.makedirs(f"{self.folder}/state-{name}", mode=0o700)
        return Member(name, words, {**self.environment, **environment}, self.folder, self.reaper)

    def make_twin(self):
        """Offers the GPUs of the first server, as if on another machine: it does not see that one's locks."""
        locks = os.path.join(self.folder, "locks-twin")
        os.makedirs(locks, mode=0o700)
        return self.make_server("twin", f"{self.folder}/manager.sock", locks,
                                GPUPOOL_SOFT_IDENTITY=f"{self.folder}/state-{NAMES[0]}/server-{NAMES[0]}")

    def members(self):
        return [self.manager, *self.wires, *self.servers]

    # --- up and down ---

    def up(self):
        self.segments_before = self.segments()
        for member in self.members():
            member.start()
        self.await_rest(60)
        self.files_at_rest = self.files()

    def down(self, bound=20):
        """What is left of it, for people."""
        wrong = []
        for member in reversed(self.members()):
            wrong += member.end(bound)
        began = time.monotonic()
        while (found := self.own_processes()) and pace.seconds(began) < bound:
            time.sleep(0.05)
            self.reaper.sweep()
        wrong += [f"after the end: process {pid}: {line}" for pid, line in found.items()]
        for pid in found:
            processes.send(pid, signal.SIGKILL)
        left = self.files() - {f"{self.folder}/manager.db"} - {f"{self.folder}/state-{name}/server-{name}.state" for name in NAMES}
        return wrong + [f"after the end: {path}" for path in sorted(left)]

    def destroy(self):
        for pid in self.own_processes():
            processes.send(pid, signal.SIGKILL)
        began = time.monotonic()
        while self.own_processes() and pace.seconds(began) < 20:
            time.sleep(0.02)
            self.reaper.sweep()

    # --- what can be seen ---

    def own_processes(self):
        return processes.marked(self.mark.encode() + b"\0")

    def workers(self):
        """Of living and of dead servers: orphans are ours."""
        parents = [server.pid for server in [*self.servers, self.twin] if server.started] + [os.getpid()]
        return [pid for parent in parents for pid in processes.children(parent)
                if processes.executable(pid) == "gpupool-worker"]

    def locks_of(self, worker):
        """Of the GPUs that its session uses. A worker that waits has none."""
        found = set()
        try:
            for number in os.listdir(f"/proc/{worker}/fd"):
                target = os.readlink(f"/proc/{worker}/fd/{number}")
                if os.path.dirname(target) in (self.locks, self.locks + "-twin"):
                    found.add(os.path.basename(target).removesuffix(" (deleted)"))
        except OSError:
            pass  # it ends, or closed one just now
        return found

    def sessions(self):
        """{(worker, when it started): locks} of the workers that serve one."""
        found = {}
        for worker in self.workers():
            since = processes.started_at(worker)
            if locks := self.locks_of(worker):
                found[worker, since] = locks
        return found

    def read_logs(self):
        for server in [*self.servers, self.twin]:
            text = server.new_log()
            for match in BEGAN.finditer(text):
                self.clients[int(match.group(1))] = int(match.group(2))
            self.granted.update((match.group(1).decode(), int(match.group(2))) for match in GRANTED.finditer(text))
            self.revoked += [(match.group(1).decode(), match.group(2).decode()) for match in REVOKED.finditer(text)]

    def listed(self, what):
        status, output, errors = self.reaper.run([self.gpupool, what, "--json"], self.environment, self.runtime, 60)
        if status != 0:
            raise Broken(f"gpupool {what}: {status}: {errors.strip()}")
        return json.loads(output)

    def files(self):
        """Names that runs may leave: sockets, temporary files, segments."""
        found = set()
        for folder, _, names in os.walk(self.folder):
            found.update(os.path.join(folder, name) for name in names)
        own = [f"{self.folder}/{name}/" for name in ("programs", "cache/gpupool/modules", "state-twin", "locks-twin", "twin",
                                                  *(one.name for one in self.members()))]
        found = {path for path in found if not any(path.startswith(folder) for folder in own) or ".new" in path}
        found.discard(f"{self.folder}/cache/gpupool/modules.key")  # of the caches' names, for ever
        # SQLite's own, which come and go with the manager; the output of `listed`.
        found -= {f"{self.folder}/manager.db{suffix}" for suffix in ("-wal", "-shm", "-journal")}
        found.discard(f"{self.folder}/clock")
        found -= {f"{self.runtime}/out", f"{self.runtime}/err"}
        return found | (self.segments() - self.segments_before)

    @staticmethod
    def segments():
        """Shared memory of the machine that has a name of gpupool's, or of System V."""
        with open("/proc/sysvipc/shm", encoding="ascii") as table:
            numbers = {f"shmid {line.split()[1]}" for line in table.readlines()[1:] if int(line.split()[6]) == 0}
        return numbers | {os.path.join("/dev/shm", name) for name in os.listdir("/dev/shm") if "gpupool" in name}

    # --- at rest ---

    def unrest(self):
        """Why not everything is free and ready yet; ''."""
        for member in self.members():
            if not member.lives_still():
                raise Broken(f"{member.name} has ended: {self.reaper.ended[member.pid][0]}: "
                             f"{member.started.text(member.started.errors)[-600:]}")
        try:
            servers = {server["name"]: server for server in self.listed("servers")}
            leases, devices = self.listed("leases"), self.listed("devices")
        except Broken as error:
            return str(error)
        for member in self.servers:
            one = servers.get(member.name)
            if not one or not one["alive"] or one["pid"] != member.pid:
                return f"server {member.name} has not joined"
        if leases:
            return "leases: " + ", ".join(f"{lease['id']} of {lease['holder']} on {lease['server']}" for lease in leases)
        unfree = [f"GPU {device['ordinal']} of {device['server']}: {device['freeBytes']} bytes free {device['problem']}"
                  for device in devices if device["freeBytes"] != DEVICE_BYTES or not device["healthy"] or device["leases"]]
        if unfree or len(devices) != 2 * len(self.servers):
            return "; ".join(unfree) or f"{len(devices)} devices"
        return self.remains()

    def remains(self):
        """Of programs that have ended."""
        if sessions := self.sessions():
            return f"sessions: workers {sorted(pid for pid, _ in sessions)}"
        mine = {member.pid for member in self.members()}
        for pid, line in self.own_processes().items():
            if pid not in mine and processes.executable(pid) != "gpupool-worker":
                return f"process {pid}: {line}"
        for member in self.members():
            for child in processes.children(member.pid):
                if processes.state(child) == "Z":
                    return f"a zombie, process {child}, of {member.name}"
        if files := self.files() - getattr(self, "files_at_rest", self.files()):
            return "files: " + " ".join(sorted(files))
        return ""

    def await_rest(self, bound):
        began = time.monotonic()
        while why := self.unrest():
            if pace.seconds(began) > bound:
                raise Broken(f"not at rest after {bound} s: {why}")
            time.sleep(0.05)
