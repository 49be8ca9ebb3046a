"""A pool of software GPUs with REST, for tests/manager/rest and tests/manager/web_page: `gpupool up` in a folder of its own."""
import json
import os
import re
import subprocess
import time

PATIENCE = 60  # seconds; nothing takes one


def eventually(condition, what):
    until = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(what)
        time.sleep(0.05)


def port_in(log):
    def find():
        with open(log, encoding="utf-8", errors="replace") as file:
            found = re.search(r"REST on \S+, port (\d+)", file.read())
        return found and int(found.group(1))

    return eventually(find, f"{log} names no port for REST")


class Pool:
    def __init__(self, build, folder, *words):
        self.gpupool = os.path.join(build, "bin", "gpupool")
        self.folder = os.path.join(folder, "pool")
        self.environment = {**os.environ, "GPUPOOL_STATE": self.folder, "GPUPOOL_LOG": "info"}
        for name in list(self.environment):
            if name.startswith("GPUPOOL_MANAGER"):
                del self.environment[name]
        self.run("up", "--detach", "--software", "2", "--http-listen", "127.0.0.1:0", *words)
        self.port = port_in(os.path.join(self.folder, "manager.log"))

    def run(self, *words):
        return subprocess.run([self.gpupool, *words], env=self.environment, check=True, timeout=4 * PATIENCE,
                              stdout=subprocess.PIPE, text=True).stdout

    def listed(self, what):
        return json.loads(self.run(what, "--json"))
