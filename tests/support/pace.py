"""Seconds that a busy machine does not count.

A bound such as "within 2 s of its peer's death" is about what gpupool does. On a machine where more wants to run than there
are cores, everything takes longer, and a test that measures seconds would fail for the machine's sake. Here a second counts
for as much as each runnable thread gets of a core: half of it where four threads want two cores. On an idle machine
these are ordinary seconds, so the bounds stay as sharp as they are.
"""
import bisect
import os
import threading
import time

INTERVAL = 0.1
LATE = 2 * INTERVAL  # a sampler that slept longer was kept from running: what lies beyond does not count


class _Sampler(threading.Thread):
    """Ten times a second: what counts of the time since the last sample."""

    def __init__(self, cores, runnable, clock=time.monotonic):
        super().__init__(daemon=True)
        self.cores, self.runnable, self.clock = cores, runnable, clock
        self.times, self.counted = [clock()], [0.0]

    def sample(self):
        now = self.clock()
        passed = min(now - self.times[-1], LATE)
        share = min(1.0, self.cores / max(1, self.runnable()))
        self.counted.append(self.counted[-1] + passed * share)
        self.times.append(now)

    def run(self):
        while True:
            time.sleep(INTERVAL)
            self.sample()

    def at(self, moment):
        """What counts of the time until `moment`."""
        after = bisect.bisect_left(self.times, moment)
        if after == 0:
            return moment - self.times[0]
        if after == len(self.times):
            return self.counted[-1] + moment - self.times[-1]
        begin, end = self.times[after - 1], self.times[after]
        part = (moment - begin) / (end - begin) if end > begin else 1.0
        return self.counted[after - 1] + part * (self.counted[after] - self.counted[after - 1])


def _runnable():
    """Threads of the machine that run or want to, without the one that asks."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].split("/")[0]) - 1


_samplers = {}  # by process: a fork has no threads of its parent's


def start():
    """From here on it is known what counts. Called before anything is measured."""
    pid = os.getpid()
    if pid not in _samplers:
        _samplers[pid] = _Sampler(len(os.sched_getaffinity(0)), _runnable)
        _samplers[pid].start()
    return _samplers[pid]


def seconds(begin, end=None):
    """What counts of the time between two moments of time.monotonic() (the second: now)."""
    sampler = start()
    return sampler.at(time.monotonic() if end is None else end) - sampler.at(begin)
