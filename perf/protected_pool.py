"""A pool of this machine's GPU, or of a software GPU, whose workers or server are killed: perf/checkpoints, perf/killed."""
import os
import re
import shutil
import signal
import subprocess
import tempfile

GOES_ON = re.compile(r"session \w+: goes on")
WORKER = re.compile(r"session \w+: (?:began, |has .* to )worker (\d+)")


class Pool:
    def __init__(self, build, protect_memory, transport="ucx"):
        self.gpupool = os.path.join(build, "bin", "gpupool")
        self.folder = tempfile.mkdtemp(prefix="gpupool-protected-")
        self.state = os.path.join(self.folder, "state")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUPOOL_")}
        self.environment.update(GPUPOOL_STATE=self.state, GPUPOOL_SERVER_PROTECT_MEMORY=protect_memory)
        self.run("up", "--detach", "--transport", transport, "--name", "node")

    def run(self, *words):
        ended = subprocess.run([self.gpupool, *words], env=self.environment, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise RuntimeError(f"gpupool {' '.join(words)}: {ended.stdout}{ended.stderr}")
        return ended.stdout

    def log(self, begin=0):
        """What the server has logged, from that byte on."""
        with open(os.path.join(self.state, "server.log"), "rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")

    def log_bytes(self):
        return os.path.getsize(os.path.join(self.state, "server.log"))

    def kill_worker(self):
        """That of the latest session, if there is one."""
        found = WORKER.findall(self.log())
        if found:
            os.kill(int(found[-1]), signal.SIGKILL)

    def kill_server(self):
        """Its supervisor starts the next one."""
        with open(os.path.join(self.state, "pool.processes"), encoding="utf-8") as file:
            processes = dict(line.split()[:2] for line in file)
        os.kill(int(processes["server"]), signal.SIGKILL)

    def readopted(self, begin):
        """How many sessions a server that was started again has gone on with, of its log from that byte on."""
        return len(GOES_ON.findall(self.log(begin)))

    def end(self):
        subprocess.run([self.gpupool, "down"], env=self.environment, capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
