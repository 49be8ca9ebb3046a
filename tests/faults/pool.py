"""A pool of this machine alone, for one job: brought up, watched, and compared with what it was at rest."""
import json
import os
import re
import subprocess
import time

import processes

ROLES = ("supervisor", "manager", "server")
BEGAN = re.compile(rb"session (\w+): began, worker (\d+), client (\d+)")
MOVES = re.compile(rb"session (\w+): moves to worker (\d+)")
MOVED = re.compile(rb"session (\w+): has moved to worker (\d+)")
COMES = re.compile(rb"session (\w+): comes from another server as epoch \d+, worker (\d+), client (\d+)")  # or from files
CAME = re.compile(rb"session (\w+): has come from another server to worker (\d+)")
NOT_MOVED = re.compile(rb"disturbing a session: not moved: (.*) \(\d+ moved")
# What no server may have to say while sessions move, of a worker that nobody stopped.
ODD = re.compile(rb".*(?:did not exit after its session|and nobody asked|answered nonsense|out of its order|did not answer the order).*")
# What the workers of a pool that is disturbed say (server/worker/suspender.cpp), in the server's log.
CYCLES = re.compile(rb"\bresumed: \d+ bytes")
REFUSED = re.compile(rb"not (?:suspended|resumed): (.*)")
TURN_TIME = "100ms"  # the shortest that there is
SUSPEND_AHEAD = 32 << 20  # the copier's from its start, so that it is there whenever the server is


class Broken(Exception):
    """The pool itself does not work: nothing more can be learned from it."""


class Pool:
    def __init__(self, build, folder, reaper, real, stall, disturb=None, lease=0, turns=False,
                 moves="", held=False):
        """disturb: the seed by which its sessions are suspended and resumed, or moved (moves: move, or stream for as if to
        another machine); None: they are not. lease:
        bytes of one. turns: two of them take turns, for there is no room for both. held: its server has a folder for
        checkpoints."""
        self.build, self.folder, self.reaper, self.real = build, folder, reaper, real
        self.gpupool = os.path.join(build, "bin", "gpupool")
        self.state = os.path.join(folder, "state")
        self.runtime, self.cache = os.path.join(folder, "run"), os.path.join(folder, "cache")
        for path in (self.runtime, self.cache):
            os.makedirs(path, mode=0o700, exist_ok=True)
        self.environment = {key: value for key, value in os.environ.items()
                            if not key.startswith("GPUPOOL_") and key != "CUDA_VISIBLE_DEVICES"}
        self.environment.update(GPUPOOL_STATE=self.state, XDG_RUNTIME_DIR=self.runtime, XDG_CACHE_HOME=self.cache,
                                GPUPOOL_STALL_TIME=f"{stall}s", GPUPOOL_DISTURB_SHARING="never")
        if not real:
            self.environment["GPUPOOL_SOFT_MEMORY"] = "2GiB"
        self.disturb, self.lease, self.moves = disturb, lease, moves
        if disturb is not None:  # with room for a program and the bystander: what is not forgotten is missing soon
            self.environment.update(GPUPOOL_DISTURB=f"{moves or 'suspend'}:{disturb}",
                                    GPUPOOL_SERVER_SUSPEND_MEMORY=str(2 * lease + SUSPEND_AHEAD),
                                    GPUPOOL_SERVER_SUSPEND_MEMORY_AHEAD=str(SUSPEND_AHEAD))
        if held:
            self.environment["GPUPOOL_SERVER_CHECKPOINT_FOLDER"] = os.path.join(folder, "checkpoints")
            os.makedirs(self.environment["GPUPOOL_SERVER_CHECKPOINT_FOLDER"], exist_ok=True)
        self.turns = turns
        if turns:  # three may be leased: the program's, its partner's and the bystander's
            memory = lease * 7 // 4
            self.environment.update(GPUPOOL_SOFT_MEMORY=str(memory), GPUPOOL_SERVER_OVERCOMMIT="2.0",
                                    GPUPOOL_SERVER_TURN_TIME=TURN_TIME, GPUPOOL_SERVER_SUSPEND_MEMORY=str(2 * memory),
                                    GPUPOOL_SERVER_SUSPEND_MEMORY_AHEAD=str(SUSPEND_AHEAD))
        self.log_at = 0
        self.workers = {}  # of sessions: client pid -> worker pid and when it started, the latest
        self.next = {}  # the same of the workers that they move to, or moved to last
        self.clients = {}  # session: client pid
        self.taken = set()  # (worker, when it started) of all sessions
        self.base = None

    # --- up and down ---

    def up(self, use):
        """use: called when the pool is there and sessions move in it: what is kept once one has moved is there before the
        picture is taken."""
        software = [] if self.real else ["--software", "1"]
        unused = self.gpu_memory()
        status, output, errors = self.tool("up", "--detach", "--name", "node", *software, bound=90)
        if status != 0:
            raise Broken(f"gpupool up: {status}: {output}{errors}")
        self.await_rest(30)
        if self.disturb is not None or self.turns:
            for _ in range(10):  # it may end before its worker has come
                use()
                if self.suspensions()[0] != 0 and self.copier():
                    break
            else:
                raise Broken("no session was moved" if self.moves else "no session was suspended and resumed")
            self.await_rest(30)
        self.base = self.picture()
        if self.real:  # one waiting worker's context
            self.base["context"] = self.base["memory"] - unused

    def suspensions(self):
        """How many in the server's log, and why some were not: {reason: how often}."""
        text = processes.read(os.path.join(self.state, "server.log"))
        refused = {}
        for match in (NOT_MOVED if self.moves else REFUSED).finditer(text):
            why = match.group(1).decode(errors="replace")
            refused[why] = refused.get(why, 0) + 1
        return len((MOVED if self.moves else CYCLES).findall(text)), refused

    def odd_lines(self):
        return [line.decode(errors="replace") for line in ODD.findall(processes.read(os.path.join(self.state, "server.log")))]

    def down(self):
        status, output, errors = self.tool("down", bound=60)
        left = [] if status == 0 else [f"gpupool down: {status}: {output}{errors}".strip()]
        deadline = time.monotonic() + 2
        while (found := self.own_processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
            self.reaper.sweep()
        left += [f"after gpupool down: process {pid}: {line}" for pid, line in found.items()]
        if os.path.exists(self.state):
            left.append(f"after gpupool down: files: {' '.join(sorted(os.listdir(self.state)))}")
        return left

    def tool(self, *words, bound=30):
        return self.reaper.run([self.gpupool, *words], self.environment, self.folder, bound)

    # --- who is who ---

    def roles(self):
        """{role: pid} of those that are there, as the supervisor wrote it down."""
        found = {}
        for line in processes.read(os.path.join(self.state, "pool.processes")).decode().splitlines():
            role, pid, since = line.split()
            if processes.started_at(int(pid)) == int(since):
                found[role] = int(pid)
        return found

    def own_processes(self):
        return processes.marked(f"GPUPOOL_STATE={self.state}\0".encode())

    def copiers(self):
        """The server's; one that outlived the server before this one is the supervisor's child."""
        roles = self.roles()
        return [pid for role in ("server", "supervisor") for pid in processes.children(roles.get(role, 0))
                if processes.executable(pid) == "gpupool-worker" and " --copier " in processes.command_line(pid)]

    def copier(self):
        """Its pid, 0 if there is none: it is killed, or waits for the next suspension to start it."""
        return next(iter(self.copiers()), 0)

    def read_log(self):
        """Learns from the server's log which worker serves which client, and which is the next."""
        with open(os.path.join(self.state, "server.log"), "rb") as file:
            file.seek(self.log_at)
            text = file.read()
        end = text.rfind(b"\n") + 1
        text = text[:end]
        lines = [match for what in (BEGAN, MOVES, MOVED, COMES, CAME) for match in what.finditer(text)]
        for match in sorted(lines, key=lambda line: line.start()):
            self.learn(match)
        self.log_at += end

    def learn(self, match):
        worker = int(match.group(2))
        if match.re in (BEGAN, COMES):
            self.clients[match.group(1)] = int(match.group(3))
        client = self.clients.get(match.group(1))
        known = self.next.get(client, (0, 0))  # it may have ended since
        process = known if known[0] == worker else (worker, processes.started_at(worker))
        self.taken.add(process)
        (self.next if match.re in (MOVES, COMES) else self.workers)[client] = process

    def forget_sessions(self):
        """All are over: numbers of processes come back."""
        self.read_log()
        for known in (self.workers, self.next, self.clients, self.taken):
            known.clear()

    def worker_of(self, client):
        self.read_log()
        return self.workers.get(client, (0, 0))[0]

    def next_of(self, client):
        """The worker that its session moves to, or has moved to last; 0: none."""
        self.read_log()
        return self.next.get(client, (0, 0))[0]

    def idle_workers(self):
        server = self.roles().get("server", 0)
        self.read_log()
        copiers = self.copiers()
        return [pid for pid in processes.children(server) if pid not in copiers
                and (pid, processes.started_at(pid)) not in self.taken
                and processes.executable(pid) == "gpupool-worker"]

    # --- at rest ---

    def listed(self, what):
        status, output, errors = self.tool(what, "--json", bound=10)
        if status != 0:
            raise Broken(f"gpupool {what}: {status}: {errors.strip()}")
        return json.loads(output)

    def unready(self, warm=2):
        """Why the pool cannot serve yet, or ''. warm: how many workers must wait (two do, and one with a context)."""
        roles = self.roles()
        dead = [role for role in ROLES if not processes.running(roles.get(role, -1))]
        if dead:
            return f"no {', '.join(dead)}"
        try:
            servers = [one for one in self.listed("servers") if one["pid"] == roles["server"] and one["alive"]]
        except Broken as error:
            return str(error)
        if not servers:
            return "the server has not joined"
        return "" if servers[0]["warmWorkers"] >= warm else f"{servers[0]['warmWorkers']} workers are ready"

    def await_rest(self, bound):
        deadline = time.monotonic() + bound
        while why := self.unready():
            if time.monotonic() > deadline:
                raise Broken(f"the pool is not ready after {bound} s: {why}")
            time.sleep(0.02)

    def picture(self):
        """What must be the same again whenever nothing runs."""
        roles, deadline = self.roles(), time.monotonic() + 10
        if copier := self.copier():
            roles["copier"] = copier
        # Workers that start count twice: wait for the one that takes its device's context.
        while len(self.idle_workers()) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        return {
            "pids": roles,
            "descriptors": {role: processes.descriptors(pid) for role, pid in roles.items()},
            "resident": {role: processes.resident_kib(pid) for role, pid in roles.items()},
            "workers": len(self.idle_workers()),
            "free": [device["freeBytes"] for device in self.listed("devices")],
            "files": self.files(),
            "memory": self.settled_gpu_memory(),
        }

    def files(self):
        """Names that a run may leave: sockets, temporary files, segments."""
        found = set()
        for top in (self.state, self.runtime, self.cache):
            for folder, _, names in os.walk(top):
                found.update(os.path.join(folder, name) for name in names)
        found = {path for path in found if not path.startswith(os.path.join(self.cache, "gpupool", "modules"))
                 or ".new" in path or "tmp" in os.path.basename(path)}
        # SQLite's own, which come and go with the manager.
        found -= {os.path.join(self.state, "manager.db" + suffix) for suffix in ("-wal", "-shm", "-journal")}
        found -= {os.path.join(self.state, name) for name in ("pool.log", "pool.processes.new")}
        folders = {os.path.join(self.runtime, name) for name in os.listdir(self.runtime)}
        return found | folders | self.segments()

    @staticmethod
    def segments():
        """Shared memory of the whole machine that has a name: what a dead process leaves of it stays for ever."""
        with open("/proc/sysvipc/shm", encoding="ascii") as table:
            numbers = {f"shmid {line.split()[1]}" for line in table.readlines()[1:]}
        # faketime's are those of a tests/manager/real that runs beside this.
        return numbers | {os.path.join("/dev/shm", name) for name in os.listdir("/dev/shm") if "faketime" not in name}

    def gpu_memory(self):
        """MiB of all processes. Not what the device says is used: the driver keeps up to 120 MiB of its own there for a
        while after any program, also without a pool (H200, driver 580)."""
        if not self.real:
            return None
        answer = subprocess.run(["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"],
                                capture_output=True, text=True, timeout=30)
        return sum(int(line) for line in answer.stdout.split())

    @staticmethod
    def gpu_users():
        answer = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"],
                                capture_output=True, text=True, timeout=30)
        return "by process: " + ("; ".join(answer.stdout.splitlines()) or "none")

    def settled_gpu_memory(self, bound=10, still=1.0):
        """Once it has not changed for a while: a context that is being made is not all there yet."""
        memory, since, deadline = self.gpu_memory(), time.monotonic(), time.monotonic() + bound
        while memory is not None and time.monotonic() - since < still and time.monotonic() < deadline:
            time.sleep(0.1)
            if (now := self.gpu_memory()) != memory:
                memory, since = now, time.monotonic()
        return memory

    # --- what a run left ---

    def left(self):
        """Differences from the picture at rest, for people; empty: nothing is left."""
        found, base = [], self.base
        roles = self.roles()
        idle, copiers = self.idle_workers(), self.copiers()
        self.reaper.sweep()
        if len(copiers) > 1:
            found.append(f"{len(copiers)} copiers: {copiers}")
        if copiers:
            roles["copier"] = copiers[0]
        for role, pid in roles.items():
            for child in processes.children(pid):
                if processes.state(child) == "Z":
                    found.append(f"a zombie, process {child}, of the {role}")
                elif role == "server" and child not in idle + copiers:
                    found.append(f"worker {child}")
                elif role == "supervisor" and child not in roles.values():
                    found.append(f"process {child} of the {role}: {processes.command_line(child)}")
        if found:
            return found
        if why := self.unready(warm=0):  # new workers may still be starting: they are nobody's leftovers
            return [why]
        try:
            found += [f"lease of {lease['holder']}" for lease in self.listed("leases")]
            devices = self.listed("devices")
            if not found and [device["freeBytes"] for device in devices] != base["free"]:
                found.append("leased device memory: " + ", ".join(
                    f"{device['freeBytes']} bytes free {device['problem']}".strip() for device in devices))
        except Broken as error:
            return [str(error)]
        doors = tuple(f".doors/{pid}" for pid in copiers)  # of one that was started since
        if files := {file for file in self.files() - base["files"] if not file.endswith(doors)}:
            found.append("files: " + " ".join(sorted(files)))
        return found + self.left_in_servers(roles)

    def left_beside(self, partner):
        """The same, while a partner of whoever ran goes on: whatever is not the partner's."""
        workers = partner.workers()
        idle, server = self.idle_workers() + self.copiers(), self.roles().get("server", 0)
        self.reaper.sweep()
        found = [f"worker {child}" for child in processes.children(server) if child not in idle + workers]
        try:
            if len(leases := self.listed("leases")) > 1:
                found.append("leases beside the partner's: " + ", ".join(
                    f"{lease['holder']} {lease.get('turn')}" for lease in leases))
        except Broken as error:
            found.append(str(error))
        return found

    def left_in_servers(self, roles):
        found, base = [], self.base
        # A session that had to wait for its worker had one more started: the next session takes it. Two descriptors each.
        more = len(self.idle_workers()) - base["workers"]
        if more > 2:
            found.append(f"{more} more workers wait than at rest")
        for role, pid in roles.items():
            now, most = processes.descriptors(pid), base["descriptors"][role]
            if role == "server":  # it watches one that it has taken over by a descriptor
                most += 2 * max(more, 0) + len(set(self.copiers()) - set(processes.children(pid)))
            if now > most:  # with fewer workers at rest there are fewer by right
                found.append(f"descriptors of the {role}: {now}, {most} at rest")
        if base["memory"]:
            memory = self.gpu_memory()
            most = base["memory"] + max(more, 0) * base["context"]
            if memory - most > 16:
                found.append(f"GPU memory: {memory} MiB, {most} MiB at rest with {max(more, 0)} more workers; "
                             f"{self.gpu_users()}; workers that wait: {self.idle_workers()}")
        return found

    def growth(self, since, runs):
        """Resident memory of the pool's own processes, `since` -> now: lines for people, and what is too much."""
        lines, wrong = [], []
        roles = self.roles()
        if copier := self.copier():
            roles["copier"] = copier
        for role, pid in roles.items():
            if self.base["pids"].get(role) != pid or role not in since:
                continue  # it was killed and started again meanwhile
            now = processes.resident_kib(pid)
            lines.append(f"{role} {since[role] / 1024:.1f} -> {now / 1024:.1f} MiB")
            # The copier keeps what the most sessions at once had, and its budget bounds that.
            slabs = 2 * self.lease >> 10 if role == "copier" else 0
            if now - since[role] > 4096 + 2 * runs + slabs:
                wrong.append(f"the {role} grew from {since[role]} to {now} KiB in {runs} runs")
        return lines, wrong
