"""What every workload script of perf/applications has in common: its options, the timing loop, the lines it prints.

A script makes its workloads with @workload and ends with main(synchronize). One workload is a function that prepares and
returns (step, count): `count` steps are timed together and synchronized at the end. One line is printed for each:

    <name> <seconds of one step, the median of the turns>
"""
import argparse
import fnmatch
import statistics
import time

WORKLOADS = {}


def workload(function):
    WORKLOADS[function.__name__.replace('_', '-')] = function
    return function


def median_seconds(step, count, turns, synchronize):
    for _ in range(2 * count + 1):
        step()
    times = []
    for _ in range(turns):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


def main(synchronize):
    parser = argparse.ArgumentParser()
    parser.add_argument('--turns', type=int, default=11, help='timings of which the median is taken')
    parser.add_argument('--only', default='*', help='these workloads only: patterns, separated by commas')
    options = parser.parse_args()
    for name in WORKLOADS:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.only.split(',')):
            continue
        step, count = WORKLOADS[name]()
        print(f'{name} {median_seconds(step, count, options.turns, synchronize):.6e}', flush=True)
