"""What goes wrong, and how PyTorch says it: out of memory and after, device-side asserts, wrong devices."""
import re
import subprocess
import sys

from common_torch import attempt, finish, require, show, start, torch


def text(error):
    """The error's first line without the figures that other programs on the GPU move."""
    line = str(error).splitlines()[0] if str(error) else ""
    line = re.sub(r" of which .*", "", line)
    return f"{type(error).__name__}: {line}"


def fails(name, body, kind=RuntimeError):
    try:
        body()
    except kind as error:
        print(f"{name}: {text(error)}")
        return
    require(name, False, "did not fail")


def out_of_memory():
    total = torch.cuda.mem_get_info()[1]
    fails("more than there is", lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"),
          torch.cuda.OutOfMemoryError)
    fails("more than any GPU has", lambda: torch.empty(1 << 46, dtype=torch.uint8, device="cuda"),
          torch.cuda.OutOfMemoryError)
    # In pieces until it is full: then the memory must be there again.
    pieces = []
    try:
        while len(pieces) < 1000:
            pieces.append(torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        print("in pieces: OutOfMemoryError")
    require("in pieces", 0 < len(pieces) < 1000, f"{len(pieces)} pieces fit")
    pieces[0].fill_(3)
    require("a piece", pieces[0][::1 << 20].eq(3).all().item())
    pieces.clear()
    torch.cuda.empty_cache()
    x = torch.ones(1 << 28, device="cuda")
    require("after it", x.sum().item() == 1 << 28)
    show("after it", x[:1000])


def wrong_uses():
    fails("no such device", lambda: torch.zeros(1, device="cuda:99"))
    fails("two devices", lambda: torch.ones(3, device="cuda") + torch.ones(3))
    fails("shapes", lambda: torch.ones(3, 4, device="cuda") @ torch.ones(3, 4, device="cuda"))
    fails("numpy", lambda: torch.ones(3, device="cuda").numpy(), TypeError)


# Each in a process of its own, since the error stays: with the context, or with the broken capture.
ASSERT = """
import torch
x = torch.arange(10, device="cuda")
bad = torch.tensor([3, 100], device="cuda")
try:
    print(x[bad].sum().item())
except RuntimeError as error:
    print(str(error).splitlines()[0])
try:
    torch.ones(3, device="cuda").sum().item()
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""

CAPTURE = """
import torch
x = torch.ones(3, device="cuda")
x.sum().item()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


def in_child(name, script, needle, times):
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    print(f"{name}: status {child.returncode}: {child.stdout.strip()}")
    require(name, child.stdout.count(needle) == times, child.stderr[-300:])


def device_assert():
    in_child("device assert", ASSERT, "device-side assert triggered", 2)


def read_back_in_capture():
    in_child("read-back in a capture", CAPTURE, "captur", 1)


start()
for part in (out_of_memory, wrong_uses, device_assert, read_back_in_capture):
    attempt(part.__name__, part)
finish()
