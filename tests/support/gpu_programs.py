"""What tests/on_gpu runs: the end-to-end programs, the library programs and the framework scripts."""
import functools
import glob
import importlib.util
import os
import re
import subprocess
import sys

TESTS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
LIBRARIES = ("cublas", "cublasLt", "cufft", "curand", "cusparse", "cusolver", "cudnn", "nvrtc", "nvJitLink", "cudart")


class Program:
    def __init__(self, kind, name, command, timeout, folder, expected=None, status=None):
        self.kind, self.name, self.command, self.timeout, self.folder = kind, name, command, timeout, folder
        self.expected, self.status = expected, status  # what it must print and end with, where that is known
        self.missing = None  # why it cannot run here
        self.one_host = False  # client and worker share memory, or it cannot run


def end_to_end_programs(folder):
    """The manifest is CMake's own: tests/end_to_end/programs/programs.cmake, one gpupool_program(...) a program."""
    with open(os.path.join(TESTS, "end_to_end", "programs", "programs.cmake")) as file:
        text = re.sub(r"^\s*#.*$", "", file.read(), flags=re.MULTILINE)
    for match in re.finditer(r"gpupool_program\(([^)]*)\)", text):
        words = re.findall(r'"[^"]*"|\S+', match.group(1))
        name, keys, key = words[0], {}, None
        for word in words[1:]:
            if word in ("SOURCES", "FLAGS", "FILES", "ARGUMENTS", "STATUS", "TIMEOUT", "NEEDS"):
                keys[key := word] = []
            else:
                keys[key].append(word)
        with open(os.path.join(TESTS, "end_to_end", "expected", name + ".txt"), "rb") as file:
            expected = file.read()
        command = [os.path.join(folder, name), *keys.get("ARGUMENTS", [])]
        program = Program("end_to_end", name, command, float(keys.get("TIMEOUT", ["60"])[0]) + 30, folder, expected,
                          int(keys.get("STATUS", ["0"])[0]))
        program.one_host = "one_host" in keys.get("NEEDS", [])
        if not os.access(command[0], os.X_OK):
            program.missing = "not built"
        yield program


def library_programs(folder, real):
    sources = glob.glob(os.path.join(TESTS, "libraries", "*.cpp")) + glob.glob(os.path.join(TESTS, "libraries", "*.cu"))
    for source in sorted(sources):
        name = os.path.splitext(os.path.basename(source))[0]
        program = Program("libraries", name, [os.path.join(folder, name)], 120, folder, status=0)
        if not real:
            program.missing = "holds machine code for real GPUs only, and there is none here"
        elif not os.access(program.command[0], os.X_OK):
            program.missing = "not built"
        yield program


@functools.cache
def import_error(framework):
    """Numba and NumPy release apart, and not every Numba can be imported beside every NumPy."""
    if framework != "numba":
        return ""
    tried = subprocess.run([sys.executable, "-c", "from numba import cuda"], stderr=subprocess.PIPE, text=True, check=False)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode != 0 else ""


def framework_scripts(real):
    for script in sorted(glob.glob(os.path.join(TESTS, "frameworks", "*.py"))):
        name = os.path.splitext(os.path.basename(script))[0]
        framework = name.split("_")[0]
        if name.endswith("_speed") or framework not in ("torch", "cupy", "jax", "numba"):
            continue
        program = Program("frameworks", name, [sys.executable, script], 240, os.path.dirname(script), status=0)
        if not real:
            program.missing = "needs a real GPU, and there is none here"
        elif importlib.util.find_spec(framework) is None:
            program.missing = f"{framework} is not installed"
        elif why := import_error(framework):
            program.missing = f"{framework} does not work here: {why}"
        yield program


def library_folders():
    """Where NVIDIA's libraries lie: in Python's packages, as pip installs them, or in a toolkit."""
    folders = [folder for path in sys.path for folder in sorted(glob.glob(os.path.join(path, "nvidia", "*", "lib")))]
    folders += [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "lib64"), "/usr/local/cuda/lib64"]
    found = {}
    for library in LIBRARIES:
        for folder in folders:
            if glob.glob(os.path.join(folder, f"lib{library}.so.*")):
                found[library] = folder
                break
    return found


def real_gpu():
    """Whether this machine's own driver has a GPU; asked in another process, so that this one holds nothing on it."""
    question = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    return subprocess.run([sys.executable, "-c", question], stderr=subprocess.DEVNULL).returncode == 0
