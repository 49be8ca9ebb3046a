"""A loop of killed_steps.py until a line comes on standard input: what `perf/moves --workload` moves.

    moved_steps.py WORKLOAD

Prints `ready` after its first 20 steps, and at the end the longest step behind these and the median one, in milliseconds.
"""
import statistics
import sys
import threading
import time

from killed_steps import WORKLOADS


def main():
    step, _ = WORKLOADS[sys.argv[1]]()
    for _ in range(20):
        float(step())
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    print("ready", flush=True)
    times = []
    while not ended.is_set() or not times:
        began = time.perf_counter()
        float(step())
        times.append(1000 * (time.perf_counter() - began))
    print(f"longest {max(times):.0f} ms, median {statistics.median(times):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
