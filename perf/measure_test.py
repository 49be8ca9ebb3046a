#!/usr/bin/env python3
"""perf/measure on software GPUs: that it measures every case every way, and what holds at any speed.

    measure_test.py path/to/measure path/to/bin
"""
import importlib.machinery
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile

MEASURE, BIN = sys.argv[1:]
failures = 0


def expect(true, text):
    global failures
    if not true:
        failures += 1
        print('FAILED:', text)


def load():
    loader = importlib.machinery.SourceFileLoader('measure', MEASURE)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader('measure', loader))
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module


def test_judgement(measure):
    entry = {'native': 100.0, 'shm': 120.0, 'shm_ratio': 1.2, 'shm_counts': {'awaited': 1.0}}
    for kind, limit, met in [('ratio', 1.1, False), ('ratio', 1.2, True), ('ns', 119, False), ('ns', 150, True),
                             ('awaited', 0, False), ('least', 120, True), ('least', 121, False), ('sent', 1, None)]:
        expect(measure.judge(entry, 'shm', kind, limit, '')['met'] is met, f'judge {kind} {limit}')
    expect(measure.judge(entry, 'ucx', 'ratio', 9, '')['met'] is None, 'a way that was not measured is not judged')


def test_run(measure, folder):
    file = folder + '/report.json'
    command = [MEASURE, '--quick', '--json', '--bin', BIN, '--software', '--output', file]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, 'TMPDIR': folder})
    print(done.stderr)
    expect(done.returncode == 0, f'exit status {done.returncode}')
    report = json.loads(done.stdout)
    with open(file, encoding='utf-8') as written:
        expect(json.load(written) == report, '--output and --json are the same')
    expect(report['errors'] == [], report['errors'])
    cases = {entry['case']: entry for entry in report['cases']}

    listed = subprocess.run([BIN + '/perf-cases', 'cases', '--list', '--quick', '--largest', str(16 << 20)],
                            stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    outside = ['start-to-first-kernel', 'start-of-main-to-first-kernel', 'start-to-exit', 'module-cold',
               'module-cached', 'client-memory']
    expect(len(listed) > 40, 'perf-cases lists its cases')
    for name in listed + outside:
        entry = cases.get(name, {})
        failed = entry.get('errors', {})
        if name in ('sgemm-4096', 'fft2-4096') and failed:  # NVIDIA's libraries have no code for software GPUs
            expect(all(failed.get(way) for way in ('native', 'shm', 'tcp')), f'{name}: no reason')
            continue
        expect(failed == {}, f'{name}: {failed}')
        for way in ('native', 'shm', 'tcp'):
            expect(entry.get(way, 0) > 0, f'{name}: nothing for {way}')
        for way in ('shm', 'tcp'):
            ratio = entry.get(way + '_ratio', math.nan)
            expect(math.isfinite(ratio) and ratio > 0, f'{name}: {way} ratio {ratio}')
            expect(name in outside or 'awaited' in entry.get(way + '_counts', {}), f'{name}: {way} was not counted')
    for name in ('worker-memory', 'bulk-htod-of-ucx_perftest', 'bulk-dtoh-of-ucx_perftest'):
        entry = cases.get(name, {})
        expect(entry.get('tcp') is not None or entry.get('errors', {}).get('tcp'), f'{name}: neither figure nor reason')

    for way in ('shm_counts', 'tcp_counts'):
        counts = cases['launches-10000'][way]
        expect(counts['awaited'] == 0, f'{counts["awaited"]} awaited a launch: {counts["calls"]}')
        expect(1 <= counts['posted'] < 1.1, f'{counts["posted"]} posted a launch')
        expect(cases['event-record'][way]['awaited'] == 0, 'event-record waits')
        expect(cases['module-cached'][way]['sent'] < 100_000 < cases['module-cold'][way]['sent'], 'code crossed again')

    text = measure.table(report, ['shm', 'ucx'])
    expect(all(f'| {name} ' in text for name in cases), 'the table lacks a case')
    expect(os.listdir(folder) == ['report.json'], f'left behind: {os.listdir(folder)}')


measure = load()
test_judgement(measure)
with tempfile.TemporaryDirectory() as folder:
    test_run(measure, folder)
sys.exit(1 if failures else 0)
