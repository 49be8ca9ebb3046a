#!/usr/bin/env python3
"""perf/nccl on software GPUs, with programs that print as nccl-tests do: figures, ratios, and what is wrong.

    nccl_test.py path/to/nccl path/to/bin
"""
import sys
import tempfile

sys.dont_write_bytecode = True
import tool_run  # noqa: E402

NCCL, BIN = sys.argv[1:]
# Through the pool it takes twice as long: a lease has a holder.
PROGRAM = '''#!/bin/sh
time=10.00 bandwidth=200.00
[ -z "$GPUPOOL_HOLDER" ] || { time=20.00 bandwidth=150.00; }
echo "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong"
echo "           0             0     float    none      -1     0.61    0.00    0.00       0     0.54    0.00    0.00       0"
echo "           8             2     float     sum      -1    $time    0.00    0.00       0    13.87    0.00    0.00       0"
echo "    16777216       4194304     float     sum      -1    82.59  203.15  $bandwidth       %s    78.08  214.87  214.87       0"
'''


def run(folder, value, *arguments):
    return tool_run.run(NCCL, BIN, folder, 'all_reduce_perf', PROGRAM % value, '--tests', folder, '--operations', 'all_reduce', *arguments)


with tempfile.TemporaryDirectory() as folder:
    status, report, text = run(folder, '0', '--repeat', '2')
    assert status == 0 and report['errors'] == [], report['errors']
    assert [row['bytes'] for row in report['sizes']] == [8, 16777216]
    small, large = report['sizes']
    assert small['median'] == {'native': [10, 0], 'shm': [20, 0]} and len(small['rounds']['shm']) == 2, small
    assert large['median']['shm'][1] == 150, large
    assert '| 8 | 10.0 µs | 20.0 µs | 2.00 **missed** |' in text, text
    assert '| 16777216 | 200.0 GB/s | 150.0 GB/s | 0.75 **missed** |' in text, text

    status, report, _ = run(folder, '3', '--repeat', '1')
    assert status != 0 and any('3 wrong elements of 16777216' in error for error in report['errors']), report['errors']
print('PASS')
