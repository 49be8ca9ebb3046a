"""A pool for tests of its REST: a manager with tokens, and a server of two software GPUs, as services run them."""
import http.client
import json
import os
import signal
import subprocess

from rest_pool import PATIENCE, eventually, port_in


class OwnPool:
    """store: the folder for the manager's store. servers: the build with gpupool-server and its worker, where that is another."""

    def __init__(self, build, folder, store, servers=None):
        self.folder, self.started, self.token = folder, [], ""
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUPOOL_")}
        self.environment.update(GPUPOOL_STATE=f"{folder}/state", GPUPOOL_MANAGER=f"unix:{folder}/manager.sock",
                                GPUPOOL_LOG="info", XDG_CACHE_HOME=f"{folder}/cache", GPUPOOL_SOFT_DEVICES="2",
                                GPUPOOL_SOFT_MEMORY="512MiB")
        self.log = os.path.join(folder, "manager.log")
        self.manager = self.start("manager", os.path.join(build, "bin", "gpupool-manager"), "--config", "/dev/null", "--socket",
                                  f"{folder}/manager.sock", "--store", os.path.join(store, "manager.db"), "--http-listen",
                                  "127.0.0.1:0")
        self.port = port_in(self.log)
        os.mkdir(f"{folder}/server", mode=0o700)
        servers = servers or build
        self.start("server", os.path.join(servers, "bin", "gpupool-server"), "--config", "/dev/null", "--manager",
                   self.environment["GPUPOOL_MANAGER"], "--name", "node", "--state", f"{folder}/server", "--device-locks",
                   f"{folder}/server", "--driver", os.path.join(servers, "lib", "libcuda-soft.so"), "--fabric", "none",
                   "--nvml", "none", "--warm", "1")
        eventually(lambda: self.ask("GET", "/v1/devices")[1]["devices"], "no server came")
        made = subprocess.run([os.path.join(servers, "bin", "gpupool"), "tokens", "create", "--role", "operator", "-o", "json",
                               "operator"], check=True, timeout=PATIENCE, stdout=subprocess.PIPE, env=self.environment)
        self.token = json.loads(made.stdout)["token"]

    def start(self, name, *words):
        with open(os.path.join(self.folder, name + ".log"), "wb") as log:
            self.started.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log))
        return self.started[-1]

    def ask(self, method, path, body=None):
        """(status, what was answered)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            headers = {"Authorization": "Bearer " + self.token} if self.token else {}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" else text
        finally:
            connection.close()

    def made(self, path, body):
        """The id of what was made."""
        status, answer = self.ask("POST", path, body)
        assert status == 200, (path, status, answer)
        return answer["id"]

    def end(self):
        """How the processes have ended, the manager last."""
        statuses = []
        for process in reversed(self.started):
            process.send_signal(signal.SIGTERM)
            statuses.append(process.wait(PATIENCE))
        return statuses
