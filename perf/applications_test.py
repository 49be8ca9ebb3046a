#!/usr/bin/env python3
"""perf/applications on software GPUs: every way is measured, a workload that fails is named and fails the command.

    applications_test.py path/to/applications path/to/bin
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

APPLICATIONS, BIN = sys.argv[1:]


def run(folder, *arguments):
    file = folder + '/report.json'
    done = subprocess.run([APPLICATIONS, '--software', '--bin', BIN, '--json', file, *arguments], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, 'TMPDIR': folder})
    print(done.stdout, done.stderr)
    with open(file, encoding='utf-8') as written:
        return done.returncode, json.load(written)


def namespaces_are_possible():
    name = f'gpa{os.getpid()}'
    made = subprocess.run(['ip', 'netns', 'add', name], stderr=subprocess.DEVNULL, check=False).returncode == 0
    if made:
        subprocess.run(['ip', 'netns', 'del', name], check=True)
    return made


with tempfile.TemporaryDirectory() as folder:
    status, report = run(folder, '--scripts', 'driver', '--turns', '2', '--repeat', '2', '--also', 'beside')
    assert status == 0 and report['errors'] == [], report['errors']
    assert [row['workload'] for row in report['workloads']] == ['driver-memset-4KiB', 'driver-memset-1MiB-synchronize']
    for row in report['workloads']:
        assert {way: len(times) for way, times in row['rounds'].items()} == {
            'native': 2, 'shm': 2, 'ucx': 2, 'beside': 2}, row
        assert report['round_trips_us']['ucx'] > 0 and report['bare_gb_s']['ucx'] > 0, report
        assert abs(row['ratio']['shm'] - row['seconds']['native'] / row['seconds']['shm']) < 1e-9, row

    if os.geteuid() == 0 and shutil.which('ip') and namespaces_are_possible():
        status, report = run(folder, '--scripts', 'driver', '--turns', '2', '--repeat', '1', '--transports', 'ucx',
                             '--wire', '0,5,3000')
        assert status == 0 and report['errors'] == [], report['errors']
        assert list(report['round_trips_us']) == ['ucx', 'wire-0', 'wire-5', 'wire-3000'], report
        assert report['round_trips_us']['wire-5'] >= 5, report
        for row in report['workloads']:
            assert len(row['rounds']['wire-5']) == 1, row
        assert report['round_trips_us']['wire-0'] > 0 and report['round_trips_us']['wire-3000'] >= 3000, report
        awaiting = next(row for row in report['workloads'] if row['workload'].endswith('synchronize'))
        assert awaiting['seconds']['wire-3000'] >= 0.003, awaiting

    os.mkdir(folder + '/workloads')
    with open(folder + '/workloads/broken.py', 'w', encoding='utf-8') as script:
        script.write('raise SystemExit("no such thing")\n')
    status, report = run(folder, '--workloads', folder + '/workloads', '--repeat', '1', '--transports', 'shm')
    assert status != 0 and any('no such thing' in error for error in report['errors']), report['errors']
print('PASS')
