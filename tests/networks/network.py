"""Two hosts and a bad wire between them, out of network namespaces: what the cases of `run` stand on.

    client namespace 10.87.0.1 ---veth--- [wire namespace: network-wire] ---veth--- 10.87.0.2 server namespace

The pool (manager, server, workers) lives in the server's namespace, programs and their lease holders in the
client's. Everything is removed when the process ends."""

import atexit
import os
import re
import shutil
import signal
import subprocess
import threading
import time

import pace

CLIENT, SERVER = "10.87.0.1", "10.87.0.2"
PORT = 4780


class Skip(Exception):
    """The case cannot run on this machine; says why."""


class Failure(Exception):
    """The product did not do what it should; says what."""


def check(condition, text):
    if not condition:
        raise Failure(text)


def call(*words):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout.strip()


def must(*words):
    status, text = call(*words)
    if status != 0:
        raise Skip(f"`{' '.join(words)}` is not possible here: {text}")


def why_no_namespaces():
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    if shutil.which("ip") is None:
        return "`ip` (iproute2) is not installed"
    name = f"gpn{os.getpid()}probe"
    status, text = call("ip", "netns", "add", name)
    if status != 0:
        return f"no network namespaces here: {text}"
    status, text = call("ip", "-n", name, "link", "add", "name", "left", "type", "veth", "peer", "name", "right")
    call("ip", "netns", "del", name)
    return "" if status == 0 else f"no veth here: {text}"


class Network:
    """The namespaces and the wire."""

    def __init__(self, wire, seed, spins=False):
        reason = why_no_namespaces()
        if reason:
            raise Skip(reason)
        self.names = {part: f"gpn{os.getpid()}{part}" for part in ("client", "server", "wire")}
        self.wire = None
        atexit.register(self.remove)
        for name in self.names.values():
            must("ip", "netns", "add", name)
            must("ip", "-n", name, "link", "set", "lo", "up")
        middle = self.names["wire"]
        for part, address in (("client", CLIENT), ("server", SERVER)):
            # All four ends begin in the middle, where their offloads are turned off.
            must("ip", "-n", middle, "link", "add", "name", part, "type", "veth", "peer", "name", "gpn")
            must("ip", "netns", "exec", middle, wire, "--plain", part, "gpn")
            must("ip", "-n", middle, "link", "set", "gpn", "netns", self.names[part])
            must("ip", "-n", middle, "link", "set", part, "up")
            must("ip", "-n", self.names[part], "address", "add", address + "/24", "dev", "gpn")
            must("ip", "-n", self.names[part], "link", "set", "gpn", "up")
        self.route()
        self.wire = subprocess.Popen(
            ["ip", "netns", "exec", middle, wire, "client", "server", "--seed", str(seed),
             *(["--spin"] if spins else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.wire.stdout.readline()

    def route(self):
        # What is for nobody here goes over the wire too, and is dropped on the other side: a black hole.
        must("ip", "-n", self.names["client"], "route", "add", "default", "via", SERVER)

    def link_down(self, part):
        must("ip", "-n", self.names[part], "link", "set", "gpn", "down")
        return time.monotonic()

    def link_up(self, part):
        must("ip", "-n", self.names[part], "link", "set", "gpn", "up")
        self.route()

    def command(self, text):
        self.wire.stdin.write(text + "\n")
        self.wire.stdin.flush()
        answer = self.wire.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            raise RuntimeError(f"network-wire: '{text}' -> '{answer}'")
        return answer

    def set(self, **conditions):
        self.command("set " + " ".join(f"{name}={value}" for name, value in conditions.items()))

    def cut(self, side="both", port=0):
        self.command(f"cut {side} port={port}" if port else f"cut {side}")
        return time.monotonic()

    def heal(self):
        self.command("heal")

    def stats(self):
        return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", self.command("stats"))}

    def inside(self, part, words):
        return ["ip", "netns", "exec", self.names[part], *words]

    def sockets(self, part):
        """Established TCP connections in the namespace, as (local, peer)."""
        lines = subprocess.run(self.inside(part, ["ss", "-Htn", "state", "established"]), text=True,
                               stdout=subprocess.PIPE).stdout.splitlines()
        return [tuple(line.split()[2:4]) for line in lines]

    def remove(self):
        if self.wire is not None:
            self.wire.stdin.close()
            self.wire.wait()
            self.wire = None
        for name in self.names.values():
            _, pids = call("ip", "netns", "pids", name)
            for pid in pids.split():
                if pid.isdigit():
                    os.kill(int(pid), signal.SIGKILL)
            call("ip", "netns", "del", name)


class Local:
    """No network at all: everything on this host, for the cases that need none."""

    def inside(self, part, words):
        return words


class Pool:
    """A pool of software GPUs: in the server's namespace, or on this host; or with the client, where another server may
    join it from the server's namespace (`join`)."""

    def __init__(self, build, state, network, memory="4GiB", environment=None, part="server"):
        self.network, self.state, self.build = network, state, build
        self.address = CLIENT if part == "client" else SERVER
        self.gpupool = os.path.join(build, "bin", "gpupool")
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(("GPUPOOL_", "CUDA_", "UCX_"))}
        self.environment.update(GPUPOOL_STATE=state, GPUPOOL_SOFT_MEMORY=memory,
                                XDG_CACHE_HOME=state + ".cache", **(environment or {}))
        words = [self.gpupool, "up", "--detach", "--software", "2", "--transport", "ucx", "--name", "node"]
        if isinstance(network, Network):
            words += ["--listen", self.address, "--port", str(PORT)]
        else:
            words[words.index("ucx")] = "shm"
        self.log = open(state + ".log", "w+")
        atexit.register(self.down)
        done = subprocess.run(network.inside(part, words), env=self.environment, stdout=self.log,
                              stderr=self.log)
        check(done.returncode == 0, f"the pool did not come up; see {state}.log")

    def join(self, name, wire=True):
        """One more server, in the server's namespace, with software GPUs of its own, as a process. It reaches the manager
        over the wire, or over a Unix socket, which no cut ends."""
        folder = os.path.join(self.state + ".servers", name)
        os.makedirs(folder, exist_ok=True)
        manager = f"{self.address}:{PORT}" if wire else f"unix:{self.state}/manager.sock"
        words = [os.path.join(self.build, "bin", "gpupool-server"), "--config", "/dev/null", "--name", name, "--manager",
                 manager, "--listen", f"{SERVER}:0", "--state", folder, "--device-locks", folder,
                 "--module-cache", os.path.join(folder, "cache"), "--driver", os.path.realpath(os.path.join(self.build, "lib", "libcuda-soft.so"))]
        environment = dict(self.environment, GPUPOOL_SOFT_IDENTITY=name, GPUPOOL_SOFT_DEVICES="2", GPUPOOL_LOG="info")
        server = Program(self.network.inside("server", words), environment)
        server.await_line("err", "joined the pool manager", 30)
        return server

    def down(self):
        if os.path.exists(self.state):
            subprocess.run([self.gpupool, "down"], env=self.environment, stdout=subprocess.DEVNULL)
        for folder in (".cache", ".servers"):
            shutil.rmtree(self.state + folder, ignore_errors=True)

    def ask(self, *words):
        """The tool on the pool's own host, over its Unix socket: no wire between."""
        done = subprocess.run([self.gpupool, *words], env=self.environment, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        return done.stdout

    def log_of(self, part):
        with open(os.path.join(self.state, part + ".log"), errors="replace") as text:
            return text.read()

    def leases(self):
        return re.findall(r"^[0-9a-f]{8,}", self.ask("leases"), re.M)

    def free(self):
        return [int(n) for n in re.findall(r'"freeBytes": *(\d+)', self.ask("devices", "--json"))]

    def process(self, name):
        with open(os.path.join(self.state, "pool.processes")) as lines:
            for line in lines:
                words = line.split()
                if name in line:
                    return int(words[1])
        raise RuntimeError(f"no process {name} in pool.processes")

    def sessions(self):
        """Workers that serve a session: those that capture what kernels print."""
        found = []
        for child in subprocess.run(["pgrep", "-P", str(self.process("server"))], text=True,
                                    stdout=subprocess.PIPE).stdout.split():
            try:
                if "gpupool-output" in os.readlink(f"/proc/{child}/fd/1"):
                    found.append(int(child))
            except OSError:
                pass
        return found

    def run(self, words, transport="ucx", options=(), environment=None, input=False):
        everywhere = dict(self.environment, **(environment or {}))
        if isinstance(self.network, Network):
            everywhere["GPUPOOL_MANAGER"] = f"{self.address}:{PORT}"
        lease = [self.gpupool, "run", "--transport", transport, "--memory", "1GiB", "--wait", "60s", *options]
        return Program(self.network.inside("client", [*lease, "--", *words]), everywhere, input)


class Program:
    """A running program: its output by lines, each with the time it came."""

    def __init__(self, words, environment, input=False, folder=None):
        self.began = time.monotonic()
        self.process = subprocess.Popen(words, env=environment, cwd=folder, text=True, bufsize=1,
                                        stdin=subprocess.PIPE if input else subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.lines = {"out": [], "err": []}
        self.changed = threading.Condition()
        self.readers = [threading.Thread(target=self.read, args=(kind, stream), daemon=True)
                        for kind, stream in (("out", self.process.stdout), ("err", self.process.stderr))]
        for reader in self.readers:
            reader.start()
        atexit.register(self.kill)

    def read(self, kind, stream):
        for line in stream:
            with self.changed:
                self.lines[kind].append((time.monotonic(), line.rstrip("\n")))
                self.changed.notify_all()

    def text(self, kind):
        with self.changed:
            return "\n".join(line for _, line in self.lines[kind])

    def find(self, kind, pattern):
        with self.changed:
            for at, line in self.lines[kind]:
                if re.search(pattern, line):
                    return at, line
        return None

    def await_line(self, kind, pattern, bound):
        """(time, line) of the first line that matches."""
        began = time.monotonic()
        while True:
            found = self.find(kind, pattern)
            if found:
                return found
            if pace.seconds(began) >= bound or (self.process.poll() is not None and not self.reading()):
                raise Failure(f"no line like '{pattern}' within {bound} s; it said:\n{self.everything()}")
            with self.changed:
                self.changed.wait(0.05)

    def reading(self):
        return any(reader.is_alive() for reader in self.readers)

    def say(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self, bound):
        """Its exit status, and when that was known."""
        began = time.monotonic()
        while (status := self.process.poll()) is None:
            if pace.seconds(began) >= bound:
                self.kill()
                raise Failure(f"did not end within {bound} s; it said:\n{self.everything()}")
            time.sleep(0.01)
        at = time.monotonic()
        for reader in self.readers:
            reader.join(5)
        return status, at

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def everything(self):
        return f"--- stdout\n{self.text('out')}\n--- stderr\n{self.text('err')}"


def wait_until(condition, bound, what):
    """Seconds until it held. The bound is in seconds as pace.py counts them."""
    began = time.monotonic()
    while not condition():
        check(pace.seconds(began) < bound, f"{what}: not within {bound} s")
        time.sleep(0.02)
    return time.monotonic() - began


def memory_of(pid, name="VmRSS"):
    """MiB."""
    try:
        with open(f"/proc/{pid}/status") as lines:
            for line in lines:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as text:
            return text.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
