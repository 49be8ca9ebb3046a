"""What the PyTorch scripts share: the same numbers in every run, and lines that show every bit of a result."""
import hashlib
import os
import sys

# Before PyTorch is loaded: cuBLAS answers the same in every run only with a workspace of fixed size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

failures = 0


def start(seed=1234):
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    print("device:", torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))


def digest(tensor):
    """The tensor's bytes, as they come back from the device."""
    values = tensor.detach().to("cpu").contiguous()
    if values.numel() == 0:
        return "empty"
    return hashlib.sha256(values.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def show(name, tensor):
    print(f"{name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {digest(tensor)}")


def show_number(name, value):
    print(f"{name}: {float(value).hex()}")


def require(name, condition, why=""):
    global failures
    if not condition:
        failures += 1
        print(f"FAIL: {name} {why}")


def close(name, got, expected, tolerance):
    """The result must be near what the CPU computes: a bit-equal pair of wrong answers is no success."""
    got, expected = got.detach().to("cpu"), expected.detach()
    if not got.is_complex():
        got, expected = got.double(), expected.double()
    else:
        got, expected = got.to(torch.complex128), expected.to(torch.complex128)
    error = ((got - expected).abs() / (1 + expected.abs())).max().item()
    require(name, error <= tolerance, f"is {error:.3g} away from the CPU's")


def attempt(name, body):
    """Runs a part; an exception is reported under its name, and the next part goes on."""
    global failures
    try:
        body()
    except Exception as error:
        failures += 1
        print(f"FAIL: {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def finish():
    attempt("synchronize", torch.cuda.synchronize)
    print("FAIL" if failures else "PASS", flush=True)
    sys.exit(1 if failures else 0)
