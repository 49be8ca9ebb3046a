"""The GPUs of this machine for benchmarks with two servers, which have one each (perf/moves, perf/silence)."""
import re
import subprocess


def two_gpus():
    """The UUIDs of the first two, one for each server; none where there are fewer than two."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    found = re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)
    return found[:2] if len(found) > 1 else []
