"""What the harnesses have to know of a build under a sanitizer (tests/sanitizers/run --all runs them in one)."""
import os
import re
import subprocess

HERE = os.path.dirname(os.path.realpath(__file__))


class Instrumented:
    """launcher: words before a program that is not instrumented, with a client library that is; none in other builds.
    patience: times as long as elsewhere, for bounds. Memory is not to be judged where it is the sanitizer's too."""

    def __init__(self, build):
        self.launcher, self.patience, cache = [], 1, {}
        path = os.path.join(build, "CMakeCache.txt")
        if os.path.exists(path):  # a packed build has none
            with open(path) as lines:
                cache = dict(re.findall(r"^(\w+):\w+=(.*)$", lines.read(), re.M))
        self.programs = cache.get("GPUPOOL_PROGRAMS_FROM") or os.path.join(build, "programs")
        if sanitizer := cache.get("GPUPOOL_SANITIZE"):
            library = "libtsan.so" if "thread" in sanitizer else "libasan.so"
            found = subprocess.run([cache["CMAKE_CXX_COMPILER"], f"-print-file-name={library}"], capture_output=True,
                                   text=True, check=True).stdout.strip()
            self.launcher, self.patience = [os.path.join(HERE, "program"), found], 4

    def __bool__(self):
        return bool(self.launcher)
