"""One program in a lease of a pool with two servers, and the death of somebody who has a part in what becomes of that
lease, at a phase that a subclass comes to. Afterwards the program is right, or ends with the clear error that is due, and
nothing is left: no lease, no worker, no device memory."""
import argparse
import os
import random
import shutil
import signal
import tempfile
import time

import pace
import processes
from commit_seed import seed
from plans import is_clear_error
from two_servers import Broken, TwoServers

ROOT = os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "..")
PROGRAM, MIB, MEMORY, RIGHT = "steady_work", 192, "512MiB", "ready\nPASS\n"
PATIENCE = 60.0  # seconds, for each step that nothing keeps from being done
CLEAN = 15.0  # and until nothing is left; a server that was killed has to come back before
TELLING = 4  # runs: in fewer, each may have missed its phase
# Whose end is the program's, and how that ends then.
ENDS = {"client": (-signal.SIGKILL, 128 + signal.SIGKILL), "exit": (7,)}


class Missed(Exception):
    """The phase was over before it was seen."""


class AimedRun(processes.Stops):
    transport = "ucx"
    named = True  # the program is run with --transport
    pause = 0.0  # seconds that who is struck is stopped for; 0: it is killed

    def __init__(self, case, number, servers, programs):
        super().__init__()
        self.case, self.servers, self.programs = case, servers, programs
        self.phase, self.victim = case.split("-")
        self.delay = random.Random(f"{case} {number}").choice((0.0, 0.01, 0.1))
        self.folder = os.path.join(servers.folder, "run")
        self.end, self.exit = os.path.join(self.folder, "end"), os.path.join(self.folder, "exit")
        self.program = self.order = None
        self.client = self.old = 0
        self.lease, self.struck, self.notes = "", False, []

    # --- a subclass's ---

    def come_to_phase(self):
        raise NotImplementedError

    def parts(self):
        """Victims besides holder, client and manager, with their pids."""
        raise NotImplementedError

    def due(self):
        """Who was struck had the session: the program may end, with a clear error."""
        raise NotImplementedError

    def settle(self):
        """Behind the blow, or what it came too late for: the lease comes to rest."""

    # --- the course ---

    def until(self, condition, what, bound=PATIENCE):
        began = time.monotonic()
        while not condition():
            if pace.seconds(began) > bound:
                raise TimeoutError(f"{what}: not there after {bound} s")
            time.sleep(0.001)

    def start_program(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        words = ["run", "--server", "first", *(["--transport", self.transport] if self.named else []), "--memory", MEMORY, "--",
                 os.path.join(self.programs, PROGRAM), "--mib", str(MIB), "--until", self.end, "--exit", self.exit, "--pause",
                 "60000" if self.victim == "exit" else "2", "--mapped", "--ready"]
        self.program = self.servers.start(words, self.folder)
        self.until(lambda: self.text("out").startswith("ready") or self.program.poll() is not None, "its memory")
        if self.program.poll() is not None:
            raise Broken(f"the program does not begin: {self.text('err')}")
        if self.victim == "exit":
            self.until(lambda: os.path.exists(self.exit + ".rests"), "its rest")
        self.client = next(pid for pid in processes.descendants(self.program.pid) if processes.executable(pid) == PROGRAM)
        self.old = self.servers.workers("first")[-1]
        if (b"libucp" in processes.read(f"/proc/{self.client}/maps")) != (self.transport == "ucx"):
            raise Broken(f"the session is not over {self.transport}")
        self.lease = self.servers.listed("leases")[0]["id"]

    def text(self, name):
        return processes.read(os.path.join(self.folder, name)).decode(errors="replace")

    def find(self):
        if self.victim == "holder":
            return next((pid for pid in processes.descendants(self.program.pid) if processes.executable(pid) == "gpupool"
                         and int(processes.stat(pid)[3]) == pid), 0)
        return {"manager": self.servers.manager(), "client": self.client, **self.parts()}[self.victim]

    def strike(self):
        if self.victim == "exit":
            return self.have_exit()
        time.sleep(self.delay)
        victim = self.find()
        self.struck = bool(victim) and processes.running(victim) and \
            processes.send(victim, signal.SIGSTOP if self.pause else signal.SIGKILL)
        if self.pause:
            self.go_on(but=victim)
            time.sleep(self.pause)
        else:
            self.servers.await_death(victim)

    def have_exit(self):
        """What is stopped stays so meanwhile."""
        self.struck = self.program.poll() is None
        with open(self.exit, "w", encoding="ascii"):
            pass
        time.sleep(self.delay)

    def execute(self):
        try:
            self.start_program()
            try:
                self.come_to_phase()
                self.strike()
            except Missed:
                pass
            self.go_on()
            self.servers.come_back()
            self.until(lambda: self.order is None or self.order.poll() is not None, "the order's end")
            if not self.ends_it():
                self.settle()
            with open(self.end, "w", encoding="ascii"):
                pass
            self.until(lambda: self.program.poll() is not None, "the program's end")
            self.judge()
            self.until_clean()
        except TimeoutError as late:
            self.notes.append(f"HANG: {late}; {self.servers.state_of(self.lease)}; {self.text('order/err') if self.order else self.text('err')}")
        finally:
            self.go_on()
            for process in (self.order, self.program):
                if process and process.poll() is None:
                    process.kill()
                    process.wait()
        return self.notes

    def ends_it(self):
        """The blow is the program's end."""
        return self.struck and (self.victim == "exit" or self.victim == "client" and not self.pause)

    def living(self):
        return [pid for server in ("first", "second") for pid in self.servers.workers(server) if processes.running(pid)]

    def judge(self):
        status, output, errors = self.program.returncode, self.text("out"), self.text("err")
        if status == 0 and output == RIGHT:
            return
        if self.ends_it():
            well = status in ENDS[self.victim] and RIGHT.startswith(output) and (errors == "" or self.victim != "exit")
        else:
            well = self.struck and not self.pause and self.due() and is_clear_error(status, output, errors, RIGHT)
        if not well:
            self.notes.append(f"WRONG: status {status}, output {output[-200:]!r}, errors {errors[-500:]!r}")

    def until_clean(self):
        try:
            self.until(lambda: not self.servers.left() and not self.living(), "nothing", CLEAN)
        except TimeoutError:
            self.notes.append(f"LEFT: {self.servers.left()}, workers {self.living()}")


def arguments(about, cases):
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build", "release"), type=os.path.realpath)
    parser.add_argument("--program-folder", metavar="FOLDER", help="of the end-to-end programs; else of the build")
    parser.add_argument("--case", action="append", choices=cases)
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument("--seed", type=seed, default=0, help="`commit`: the checked-out commit's")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS", help="start no run later")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    return parser


def one(kind, case, number, options, programs):
    """Its lines of what is wrong, and whether somebody was struck. Each run has servers of its own."""
    folder, servers = tempfile.mkdtemp(prefix="gpupool-aimed-"), None
    try:
        servers = TwoServers(options.build, folder, getattr(options, "sharing", "never"))
        run = kind(case, number, servers, programs)
        notes = run.execute()
        if notes:
            notes.append(servers.logs())
        return notes, run.struck
    except Broken as broken:
        return [f"POOL: {broken}"], False
    finally:
        if servers:
            servers.end()
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def run_all(kind, cases, options, what, again):
    """The exit status. options: build, program_folder, runs, seed, within, keep."""
    programs = options.program_folder or os.path.join(options.build, "programs")
    if not os.access(os.path.join(programs, PROGRAM), os.X_OK):
        print(f"skipped: no programs in {programs} (they are built where there is nvcc)")
        return 77
    pace.start()
    began, runs, struck, failed = time.monotonic(), 0, 0, 0
    for number in range(options.seed, options.seed + options.runs):
        for case in cases:
            if time.monotonic() - began > options.within:
                break
            at = time.monotonic()
            notes, hit = one(kind, case, number, options, programs)
            runs, struck, failed = runs + 1, struck + hit, failed + bool(notes)
            print(f"{'FAILED' if notes else 'struck' if hit else 'missed'}  {time.monotonic() - at:5.1f} s  {case}", flush=True)
            for line in notes:
                print(f"  {line}")
            if notes:
                print(f"  again: {again} --case {case} --seed {number}")
    print(f"{runs} {what}, somebody struck in {struck}, {failed} failed")
    hardly = struck * 2 < runs and runs >= TELLING
    if hardly:
        print("FAILED: hardly anybody was struck: nothing was tested")
    return 1 if failed or hardly else 0
