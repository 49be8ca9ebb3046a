#!/usr/bin/env python3
"""perf/torchrun on software GPUs, with a program in the place of PyTorch's: figures, ratios, and results that differ.

    torchrun_test.py path/to/torchrun path/to/bin
"""
import sys
import tempfile

sys.dont_write_bytecode = True
import tool_run  # noqa: E402

TORCHRUN, BIN = sys.argv[1:]
# Through the pool (a lease has a holder) it takes half as long.
PROGRAM = '''#!/bin/sh
[ "$1 $2" = "--nproc-per-node 2" ] && [ "${3##*/}" = distributed.py ] || exit 3
time=2.000 digest=abc
[ -z "$GPUPOOL_HOLDER" ] || { time=1.000 digest=%s; }
echo "DistributedDataParallel $time"
echo "FullyShardedDataParallel 4.000"
echo "digest $digest"
'''


def run(folder, value, *arguments):
    return tool_run.run(TORCHRUN, BIN, folder, 'program', PROGRAM % value, '--torchrun', folder + '/program', *arguments)


with tempfile.TemporaryDirectory() as folder:
    status, report, text = run(folder, 'abc', '--repeat', '2')
    assert status == 0 and report['errors'] == [], report['errors']
    assert [len(row['rounds']['shm']) for row in report['steps']] == [2, 2], report['steps']
    assert '| DistributedDataParallel | 2.00 | 1.00 | 0.50 |' in text, text
    assert '| FullyShardedDataParallel | 4.00 | 4.00 | 1.00 |' in text, text

    status, report, _ = run(folder, 'def', '--repeat', '1')
    assert status != 0 and any('differ in their results' in error for error in report['errors']), report['errors']
print('PASS')
