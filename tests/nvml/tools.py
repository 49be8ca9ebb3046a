"""pynvml and nvitop in a lease of 1 GiB of a software GPU: that they show the lease's GPU and this process's memory."""
import os
import subprocess
import sys
import time

import cupy
import pynvml

BYTES = 64 << 20
failures = []


def check(what, condition):
    print(f"{what}: {'right' if condition else 'WRONG'}")
    if not condition:
        failures.append(what)


def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def tool(*words):
    run = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120)
    if run.returncode != 0:
        print(run.stdout, run.stderr)
    return run.stdout if run.returncode == 0 else ""


data = cupy.zeros(BYTES, dtype=cupy.uint8)
cupy.cuda.Device().synchronize()
properties = cupy.cuda.runtime.getDeviceProperties(0)
pynvml.nvmlInit()
check("as many GPUs as CUDA has", pynvml.nvmlDeviceGetCount() == cupy.cuda.runtime.getDeviceCount())
device = pynvml.nvmlDeviceGetHandleByIndex(0)
name, uuid = pynvml.nvmlDeviceGetName(device), pynvml.nvmlDeviceGetUUID(device)
check("CUDA's name", name == properties["name"].decode())
# CuPy takes the bytes for a text, which ends at a zero.
check("CUDA's UUID", uuid.replace("-", "")[3:].startswith(bytes(properties["uuid"]).hex()))
bus = cupy.cuda.Device(0).pci_bus_id
at_bus = pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())
check("CUDA's PCI address", pynvml.nvmlDeviceGetUUID(at_bus) == uuid)
check("its memory is used", until(lambda: pynvml.nvmlDeviceGetMemoryInfo(device).used >= BYTES))
check("the share of the lease", pynvml.nvmlDeviceGetMemoryInfo(device).total == 1 << 30)
processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
check("by this process", [one.pid for one in processes] == [os.getpid()] and processes[0].usedGpuMemory >= BYTES)
try:
    pynvml.nvmlDeviceGetPowerUsage(device)
    check("a software GPU has no power", False)
except pynvml.NVMLError_NotSupported:
    pass
try:
    pynvml.nvmlDeviceResetGpuLockedClocks(device)
    check("nothing can be set", False)
except pynvml.NVMLError_NotSupported:
    pass

shown = tool("nvitop", "--once")
check("nvitop", "1024MiB" in shown and str(os.getpid()) in shown)
pynvml.nvmlShutdown()
print("PASS" if not failures else f"FAIL: {failures}")
