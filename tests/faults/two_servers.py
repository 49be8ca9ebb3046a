"""A pool with two servers of software GPUs, as two machines would be: each has its own state folder, and takes sessions from
the network. A server that is killed is started again by come_back(); the manager by its supervisor."""
import json
import os
import re
import signal
import subprocess
import time

import processes

NAMES = ("first", "second")
BEGAN = re.compile(rb"session \w+: began, worker (\d+)")
COMES = re.compile(rb"session \w+: comes from another server as epoch \d+, worker (\d+)")
CAME = re.compile(rb"session \w+: has come from another server to worker (\d+)")
JOIN_S = 60


class Broken(Exception):
    """The pool itself does not work: nothing can be learned from it."""


class TwoServers:
    def __init__(self, build, folder, sharing="never"):
        """sharing: whether sessions that move share memory with the other server, too: client/session.cpp"""
        self.build, self.folder, self.state = build, folder, os.path.join(folder, "pool")
        self.checkpoints = os.path.join(folder, "checkpoints")
        os.makedirs(self.checkpoints)
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith("GPUPOOL_") and name != "CUDA_VISIBLE_DEVICES"}
        self.environment.update(GPUPOOL_STATE=self.state, XDG_CACHE_HOME=os.path.join(folder, "cache"),
                                GPUPOOL_SOFT_MEMORY="1GiB", GPUPOOL_DISTURB_SHARING=sharing)
        status, text = self.tool("up", "--detach", "--software", "1", "--name", "node")
        if status != 0:
            raise Broken(f"gpupool up: {text}")
        self.processes = {name: self.start_server(name) for name in NAMES}
        self.await_servers()
        self.free = self.free_bytes()

    def start_server(self, name):
        state = os.path.join(self.folder, name)
        for path in (state, state + "-locks"):
            os.makedirs(path, exist_ok=True)
        words = ["--config", "/dev/null", "--name", name, "--manager", f"unix:{self.state}/manager.sock", "--state", state,
                 "--listen", "127.0.0.1:0", "--checkpoint-folder", self.checkpoints, "--device-locks", state + "-locks", "--module-cache", state + "-cache",
                 "--driver", os.path.join(self.build, "lib", "libcuda-soft.so")]
        with open(state + ".log", "ab") as log:
            return subprocess.Popen([os.path.join(self.build, "bin", "gpupool-server"), *words], stdin=subprocess.DEVNULL,
                                    stdout=log, stderr=log, env=dict(self.environment, GPUPOOL_LOG="info",
                                                                     GPUPOOL_SOFT_IDENTITY=name, GPUPOOL_SOFT_DEVICES="1"))

    def await_servers(self):
        deadline = time.monotonic() + JOIN_S
        while not self.all_there():
            if time.monotonic() > deadline:
                raise Broken(f"the servers do not join: {self.logs()}")
            time.sleep(0.05)

    def all_there(self):
        """As these processes: for a while the manager lists dead ones as alive."""
        try:
            there = {one["name"]: one for one in self.listed("servers")}
        except Broken:
            return False
        return all(name in there and there[name]["alive"] and there[name]["pid"] == self.processes[name].pid
                   and there[name]["warmWorkers"] > 0 for name in NAMES)

    def await_death(self, pid):
        """Of a server that was killed; of anybody else it waits for nothing."""
        for process in self.processes.values():
            if process.pid == pid:
                process.wait(JOIN_S)

    def come_back(self):
        """Servers that were killed; the manager has its supervisor."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.processes[name] = self.start_server(name)
        self.await_servers()

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.tool("down")

    # --- commands ---

    def start(self, words, folder):
        """Its output in files of that folder."""
        with open(os.path.join(folder, "out"), "wb") as out, open(os.path.join(folder, "err"), "wb") as err:
            return subprocess.Popen([os.path.join(self.build, "bin", "gpupool"), *words], stdin=subprocess.DEVNULL, stdout=out,
                                    stderr=err, env=self.environment)

    def tool(self, *words):
        try:
            done = subprocess.run([os.path.join(self.build, "bin", "gpupool"), *words], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90, check=False,
                                  env=self.environment)
            return done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            return None, str(late)

    def listed(self, what):
        status, text = self.tool(what, "--json")
        if status != 0:
            raise Broken(f"gpupool {what}: {text}")
        return json.loads(text)

    def state_of(self, lease):
        """"": it is gone; None: nobody says."""
        try:
            return next((one["state"] for one in self.listed("leases") if one["id"] == lease), "")
        except Broken:
            return None

    def free_bytes(self):
        return [(one["server"], one["freeBytes"]) for one in self.listed("devices")]

    def left(self):
        """What is not as it was before, for people."""
        try:
            leases, free = self.listed("leases"), self.free_bytes()
        except Broken as broken:
            return str(broken)
        if leases:
            return "leases: " + ", ".join(f"{one['id']} {one['state']}" for one in leases)
        return "" if sorted(free) == sorted(self.free) else f"device memory: {free}, before {self.free}"

    # --- who is who ---

    def pid_of(self, name):
        return self.processes[name].pid

    def manager(self):
        for line in processes.read(os.path.join(self.state, "pool.processes")).decode().splitlines():
            role, pid, _ = line.split()
            if role == "manager":
                return int(pid)
        return 0

    def log(self, name):
        return processes.read(os.path.join(self.folder, name + ".log"))

    def logs(self):
        return "".join(f"--- {name}\n{self.log(name).decode(errors='replace')[-6000:]}" for name in NAMES)

    def workers(self, name):
        """That have, or are to have, a session there, in their order."""
        found = [match for what in (BEGAN, COMES) for match in what.finditer(self.log(name))]
        return [int(match[1]) for match in sorted(found, key=lambda match: match.start())]

    def arrived(self, name):
        return [int(match[1]) for match in CAME.finditer(self.log(name))]

    @staticmethod
    def unread(pid):
        """Bytes that have come for it over TCP, and that it has not read."""
        inodes = set()
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            return 0
        total = 0
        for line in processes.read("/proc/net/tcp").decode().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes:
                total += int(fields[4].split(":")[1], 16)
        return total
