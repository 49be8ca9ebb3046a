"""What the harnesses have to know of a build under a sanitizer (tests/sanitizers/run --all runs them in one)."""
import os
import re


class Instrumented:
    """launcher: words before a program that is not instrumented, with a client library that is; none in other builds.
    patience: times as long as elsewhere, for bounds. Memory is not to be judged where it is the sanitizer's too."""

    def __init__(self, build):
        path, cache = os.path.join(build, "CMakeCache.txt"), {}
        if os.path.exists(path):  # a packed build has none
            with open(path) as lines:
                cache = dict(re.findall(r"^GPUPOOL_TEST_(\w+):\w+=(.*)$", lines.read(), re.M))
        self.programs = cache.get("PROGRAMS") or os.path.join(build, "programs")
        self.launcher = cache.get("LAUNCHER", "").split()
        self.patience = int(cache.get("PATIENCE", 1))

    def __bool__(self):
        return bool(self.launcher)
