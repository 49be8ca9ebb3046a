"""The program that the tested one takes turns with: one lease, and programs of it one after another until it is told to
end. What it used comes back wrong only where a turn lost it."""
import os
import signal
import time

import pace
import processes

# steady_work again and again, in one lease; ends with the first that fails.
PROGRAMS = """until [ -e "$1" ]; do
  "${@:2}" || exit
done"""
WORK = ["--mib", "1", "--rounds", "100", "--pause", "5"]
RIGHT = "PASS\n"
PATIENCE = 60.0  # seconds, for its beginning and its end


class Partner:
    def __init__(self, pool, options, transport):
        self.pool = pool
        folder = os.path.join(pool.folder, "partner")
        os.makedirs(folder, exist_ok=True)
        self.stop = os.path.join(folder, "stop")
        if os.path.exists(self.stop):
            os.unlink(self.stop)
        work = [*options.instrumented.launcher, os.path.join(options.programs, "steady_work"), *WORK]
        words = [pool.gpupool, "run", "--transport", transport, "--memory", options.memory, "--wait", "20s", "--",
                 "/bin/bash", "-c", PROGRAMS, "partner", self.stop, *work]
        self.started = pool.reaper.start(words, pool.environment, folder)
        self.pid = self.started.pid

    def workers(self):
        """Of its programs that run now."""
        return [worker for pid in processes.descendants(self.pid) if (worker := self.pool.worker_of(pid))]

    def gone(self):
        return self.pool.reaper.end_of(self.pid) is not None

    def await_work(self):
        """Its problem, or ''."""
        began = time.monotonic()
        while not self.workers() and not self.gone():
            if pace.seconds(began) > PATIENCE:
                return f"HANG: the partner does not begin: {self.started.text(self.started.errors)[-300:]}"
            time.sleep(0.005)
        return ""

    def end(self):
        """Tells it to end, and waits: (status, output, errors); status None: it did not."""
        with open(self.stop, "w", encoding="ascii"):
            pass
        began = time.monotonic()
        while not self.gone() and pace.seconds(began) < PATIENCE:
            time.sleep(0.002)
        status = self.pool.reaper.ended.pop(self.pid)[0] if self.gone() else None
        self.kill()
        return status, self.started.text(self.started.output), self.started.text(self.started.errors)

    def kill(self):
        """All of it that is still there: its holder is a session of its own and ends with it."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def results(output):
    """How many of its programs were right, and what it said besides."""
    count = 0
    while output.startswith(RIGHT):
        output, count = output[len(RIGHT):], count + 1
    return count, output
