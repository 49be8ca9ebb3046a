"""What perf/applications, perf/nccl and perf/torchrun have in common: perf/measure as a module, and a command that runs
something natively and through a pool of this machine, in turns."""
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys

HERE = os.path.dirname(os.path.realpath(__file__))


def load_measure():
    """perf/measure as a module: it knows how to find libraries, the pool and what native is here."""
    loader = importlib.machinery.SourceFileLoader('measure', HERE + '/measure')
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader('measure', loader))
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module


measure = load_measure()


def names(text):
    return [name for name in text.split(',') if name]


class Turns(measure.Bench):
    """options: those of read_options. one(what..., way) runs it once."""

    def up(self):
        software = ['--software', str(self.options.gpus)] if self.software else []
        measure.say(measure.run([self.bin + '/gpupool', 'up', '--detach', *software], self.pool_environment)[0].strip())

    def all_ways(self, number, *what):
        """Native first in odd rounds (number counts from 0), last in even ones."""
        for way in self.ways() if number % 2 == 0 else reversed(self.ways()):
            measure.say(f'round {number + 1} of {self.options.repeat}: {", ".join([*what, way])}')
            self.guarded(', '.join([*what, way]), self.one, *what, way)

    def environment_of(self, way, **more):
        return dict(self.environment if way == 'native' else self.pool_environment, NCCL_NVLS_ENABLE='0', **more)

    def command_of(self, way, command):
        if way == 'native':
            return command
        return [self.bin + '/gpupool', 'run', '--transport', way, '--gpus', str(self.options.gpus), '--wait', '30s', '--',
                *command]

    def figures(self):
        return {'command': ' '.join([f'perf/{os.path.basename(sys.argv[0])}', *sys.argv[1:]]), 'hardware': self.hardware,
                'gpus': self.options.gpus, 'rounds': self.options.repeat, 'errors': self.errors}


def title(report):
    hardware = report['hardware']
    return (f'{report["gpus"]} × {hardware["gpu"]} (driver {hardware["driver"]}), {hardware["cores"]} cores, '
            f'{hardware["system"]}; {report["rounds"]} rounds; `{report["command"]}`')


def read_options(parser, bound):
    """Adds what such commands have in common."""
    built = [os.path.join(HERE, place) for place in ('../build/release/bin', '../bin')]
    default = next((place for place in built if os.path.exists(place + '/perf-cases')), built[0])
    parser.add_argument('--bin', default=default, help='the folder of gpupool, its servers and perf-cases')
    parser.add_argument('--transports', type=names, default=['shm', 'ucx'], help='shm,ucx (ucx is tcp here)')
    parser.add_argument('--gpus', type=int, default=2, help='GPUs of a run (2)')
    parser.add_argument('--repeat', type=int, default=3, help='rounds (3)')
    parser.add_argument('--bound', type=int, default=bound, help='seconds that one run may take (%(default)s)')
    parser.add_argument('--software', action='store_true', help='software GPUs, also where there is a real one')
    parser.add_argument('--json', metavar='FILE', help='write everything measured to this file too')
    options = parser.parse_args()
    if unknown := set(options.transports) - {'shm', 'ucx'}:
        parser.error(f'no such transport: {", ".join(sorted(unknown))}')
    options.native_lib = None
    options.largest = 0
    return options


def main(bench, table, rows):
    """The exit status. rows: the name of what report() has measured."""
    options = bench.options
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the pool is taken down
    try:
        bench.prepare()
        bench.measure()
        report = bench.report()
    except (measure.Failure, OSError) as error:
        sys.exit(f'{os.path.basename(sys.argv[0])}: {error}')
    finally:
        bench.close()
    if options.json:
        with open(options.json, 'w', encoding='utf-8') as file:
            json.dump(report, file, ensure_ascii=False, indent=1)
    print(table(report, options.transports))
    return 1 if report['errors'] or not report[rows] else 0
