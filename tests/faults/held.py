"""One run in which a lease is held in files and restored (`gpupool checkpoint --hold`, `gpupool restore`), and somebody who
has a part in that dies or stops at a known moment of it. Afterwards each of the lease's programs has gone on and is right,
be it that the lease was held and had to be restored (again), or has ended with a clear error where that is due; and nothing
is left."""
import os
import random
import re
import shutil
import signal
import time

import pace
import processes
from plans import HANG, Outcome, is_clear_error

# moment: (of which order, who may be struck). "worker" is the one that a session leaves, "next" the one that rebuilds it,
# "order" the command, "both" are server and manager.
EVERYBODY = ("server", "manager", "holder", "client", "order")
MOMENTS = {
    "drain": ("hold", ("worker", *EVERYBODY)),  # the sessions are ordered to stop; their programs stand in the way
    "half": ("hold", ("worker", *EVERYBODY)),  # half of the contents are in the files
    "whole": ("hold", ("worker", "both", *EVERYBODY)),  # the files have their place; the manager has not stored that
    "stored": ("hold", ("both", *EVERYBODY[:4])),
    "placed": ("restore", EVERYBODY),  # the manager has stored where; the server has not been told
    "rebuilding": ("restore", ("next", *EVERYBODY)),  # a worker reads the files
    "rebuilt": ("restore", ("next", *EVERYBODY[:4])),  # the sessions wait for their programs, and those stand still
    "switched": ("restore", ("next", *EVERYBODY[:4])),  # the programs are at the new workers
}
STOPPED = ("server", "manager", "client", "next")
KINDS = {f"{moment}-{what}-{who}": (moment, signal.SIGKILL if what == "kill" else signal.SIGSTOP, who)
         for moment, (_, victims) in MOMENTS.items() for what in ("kill", "pause")
         for who in victims if what == "kill" or who in STOPPED}
KINDS.update({f"{moment}-exit-client": (moment, 0, "client") for moment in MOMENTS})  # the programs end by themselves
# Where a session may end with an error, of those whose death is not the end of all.
ENDS = {"worker": ("drain", "half", "whole"), "next": ("rebuilt", "switched"), "server": ("drain", "half", "rebuilt", "switched")}
MIB, MEMORY = 96, "512MiB"  # of a program; of their lease
PROGRAM, RIGHT = "steady_work", "ready\nPASS\n"
# Programs beside one another; each one's status, in the end, in a file.
SCRIPT = """for i in $(seq "$1"); do
  ("${@:3}" --until "$2/end" --exit "$2/exit" >"$2/out-$i" 2>"$2/err-$i"; echo $? >"$2/status-$i") &
done
wait"""
EXIT = 7  # the status of a program that is told to end in the middle
PATIENCE = 60.0  # seconds, for each step that nothing keeps from being done


class Plan:
    def __init__(self, kind, seed, options):
        dice = random.Random(f"held {kind} {seed}")
        self.kind, self.seed, self.options = kind, seed, options
        self.moment, self.signal, self.victim = KINDS[kind]
        self.order = MOMENTS[self.moment][0]
        self.programs = dice.choice((1, 1, 2))
        self.delay = dice.choice((0.0, dice.random() ** 2 * 0.08))
        # Its client gives a worker up that has not greeted for as long as the stall time.
        self.pause = options.pause or 0.3 + dice.random() * (options.stall / 4 if self.victim == "next" else 3)
        self.transport = dice.choice(options.transports)

    def __str__(self):
        return (f"{self.kind} of {self.programs} programs that began over {self.transport}, {self.delay * 1000:.0f} ms later"
                + (f", for {self.pause:.1f} s" if self.signal == signal.SIGSTOP else ""))


class Ended(Exception):
    """The order or the program ended before the moment came."""


class Run(processes.Stops):
    def __init__(self, plan, pool, options):
        super().__init__()
        self.plan, self.pool, self.options, self.reaper = plan, pool, options, pool.reaper
        pace.start()
        self.outcome = Outcome(plan)
        self.folder = os.path.join(pool.folder, "held")
        self.name = f"held-{plan.seed}"
        self.order, self.clients, self.lease = None, [], ""
        self.since = {}  # pid: when it started

    # --- steps ---

    def start(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        # Who names shm keeps it.
        transport = [] if self.plan.transport == "shm" else ["--transport", self.plan.transport]
        words = [self.pool.gpupool, "run", *transport, "--memory", MEMORY, "--", "/bin/bash", "-c", SCRIPT,
                 "programs", str(self.plan.programs), self.folder, *self.options.instrumented.launcher,
                 os.path.join(self.options.programs, PROGRAM), "--mib", str(MIB), "--pause",
                 "2" if self.plan.signal else "60000", "--mapped", "--ready"]
        self.started = self.reaper.start(words, self.pool.environment, self.pool.folder)
        self.until(lambda: sum(self.text("out", i).startswith("ready") for i in self.numbers()) == self.plan.programs, "the programs")
        self.clients = [pid for pid in processes.descendants(self.started.pid) if processes.executable(pid) == PROGRAM]
        self.until(lambda: all(self.pool.worker_of(pid) for pid in self.clients), "the workers")
        self.workers = {pid: self.pool.worker_of(pid) for pid in self.clients}
        self.lease = self.pool.listed("leases")[0]["id"]

    def numbers(self):
        return range(1, self.plan.programs + 1)

    def text(self, what, number):
        return processes.read(os.path.join(self.folder, f"{what}-{number}")).decode(errors="replace")

    def give(self, *words):
        folder = os.path.join(self.pool.folder, "order")
        os.makedirs(folder, exist_ok=True)
        self.order = self.reaper.start([self.pool.gpupool, *words], self.pool.environment, folder)
        self.since[self.order.pid] = processes.started_at(self.order.pid)

    def until(self, condition, what, ended=False):
        began = time.monotonic()
        while not condition():
            if ended and self.order_ended():
                raise Ended
            if self.reaper.end_of(self.started.pid):
                raise Ended
            if pace.seconds(began) > PATIENCE:
                raise TimeoutError(f"{what}: not there after {PATIENCE} s")
            time.sleep(0.001)

    def order_ended(self):
        return self.reaper.end_of(self.order.pid)

    def state(self):
        """The lease's, "": it is gone, None: nobody says."""
        status, output, _ = self.pool.tool("leases", "--json", bound=20)
        if status != 0:
            return None
        found = re.search(r'"id": *"%s".*?"state": *"(\w+)"' % self.lease, output, re.DOTALL)
        return found.group(1) if found else ""

    # --- what is seen of an order ---

    def checkpoints(self):
        return self.pool.environment["GPUPOOL_SERVER_CHECKPOINT_FOLDER"]

    def drafts(self):
        return [os.path.join(self.checkpoints(), name) for name in os.listdir(self.checkpoints()) if name.startswith(".")]

    def written(self):
        """Bytes of files that have no place yet; -1: there are none."""
        total = -1
        for draft in self.drafts():
            try:
                total = max(total, 0) + sum(entry.stat().st_size for entry in os.scandir(draft))
            except FileNotFoundError:
                pass
        return total

    def published(self):
        return os.path.exists(os.path.join(self.checkpoints(), self.name, "manifest"))

    def have_left(self):
        return not any(processes.running(pid) for pid in self.workers.values())

    def said(self, text):
        return text.encode() in processes.read(os.path.join(self.pool.state, "server.log"))

    # --- the moments ---

    def hold(self):
        self.give("checkpoint", "--hold", "--drain", "20s", self.lease, self.name)

    def held(self):
        self.hold()
        self.until(self.order_ended, "gpupool checkpoint")
        if self.order_ended()[0] != 0:
            raise TimeoutError(f"not held: {self.order.text(self.order.errors)}")
        self.until(lambda: self.said(f"lease {self.lease} revoked"), "the lease to leave its server")
        since = time.monotonic()
        self.until(lambda: self.beat_is_from(since), "a beat behind that")  # so the manager has heard it, too
        self.until(self.have_left, "the workers' ends")

    def beat_is_from(self, since):
        now = time.monotonic()
        return now - self.pool.listed("servers")[0]["lastBeatMs"] / 1000 > since

    def restore(self):
        self.give("restore", self.lease, self.name)

    def come_to(self, moment):
        getattr(self, "until_" + moment)()

    def until_drain(self):
        self.stop(*self.clients)
        self.hold()
        self.until(lambda: self.written() >= 0, "a file", ended=True)

    def until_half(self):
        self.hold()
        self.until(lambda: self.written() >= self.plan.programs * MIB << 19, "half of the contents", ended=True)

    def until_whole(self):
        self.hold()
        self.until(lambda: self.written() > 0, "contents", ended=True)
        self.stop(self.pool.roles()["manager"])
        self.until(self.published, "the checkpoint", ended=True)
        if self.plan.victim != "worker":
            self.until(self.have_left, "the workers' ends")

    def until_stored(self):
        self.hold()
        self.until(self.order_ended, "gpupool checkpoint")

    def until_placed(self):
        self.held()
        self.stop(self.pool.roles()["server"])
        self.restore()
        self.until(lambda: self.state() == "granting", "its placement", ended=True)

    def until_rebuilding(self):
        self.held()
        self.restore()
        self.until(lambda: self.next() != 0, "a new worker", ended=True)

    def until_rebuilt(self):
        self.held()
        self.stop(*self.clients)
        self.restore()
        self.until(lambda: self.said(f"lease {self.lease}: restored"), "the sessions")

    def until_switched(self):
        self.held()
        self.restore()
        self.until(lambda: all(self.pool.worker_of(pid) not in (0, self.workers[pid]) for pid in self.clients), "the programs")

    def next(self):
        return self.pool.next_of(self.clients[0])

    # --- the blow ---

    def find(self):
        """Those who are to be struck, 0 for one that is not there."""
        if self.plan.victim == "both":
            return [self.pool.roles().get(role, 0) for role in ("server", "manager")]
        if self.plan.victim in ("server", "manager"):
            return [self.pool.roles().get(self.plan.victim, 0)]
        return [self.find_other()]

    def find_other(self):
        if self.plan.victim == "holder":
            return next((pid for pid in processes.descendants(self.started.pid) if processes.executable(pid) == "gpupool"
                         and int(processes.stat(pid)[3]) == pid), 0)
        return {"client": lambda: self.clients[0], "order": lambda: self.order.pid, "next": self.next,
                "worker": lambda: self.workers[self.clients[0]]}[self.plan.victim]()

    def strike(self):
        began = time.monotonic()
        while time.monotonic() < began + self.plan.delay:
            time.sleep(0.001)
        if not self.plan.signal:
            return self.have_exit()
        victims = [pid for pid in self.find() if pid and processes.running(pid)]
        self.outcome.hit = any([processes.send(pid, self.plan.signal) for pid in victims])
        self.struck_at = time.monotonic()
        if self.plan.signal == signal.SIGSTOP:
            self.stopped = [pid for pid in self.stopped if pid in victims or not processes.send(pid, signal.SIGCONT)]
            time.sleep(self.plan.pause)
            self.stopped += victims
        self.go_on()

    def have_exit(self):
        """What is stopped stays so for a moment."""
        self.outcome.hit = not self.reaper.end_of(self.started.pid)
        with open(os.path.join(self.folder, "exit"), "w", encoding="ascii"):
            pass
        self.struck_at = time.monotonic()
        time.sleep(0.02)
        self.go_on()

    # --- the run ---

    def execute(self):
        try:
            self.start()
            try:
                self.come_to(self.plan.moment)
                self.strike()
            except Ended:
                pass
            self.go_on()
            self.await_end()
            self.judge()
            self.await_clean()
        except TimeoutError as late:
            self.outcome.notes.append(f"HANG: {late}; lease {self.state()}")
        finally:
            self.end_all()
        return self.outcome

    def await_end(self):
        """The program is told to end, and the lease restored wherever it is held."""
        began = time.monotonic()
        if self.order:
            self.await_order(began)
        with open(os.path.join(self.folder, "end"), "w", encoding="ascii"):
            pass
        bound, answer = HANG * 2 * self.options.instrumented.patience + self.plan.pause, ""
        while not self.reaper.end_of(self.started.pid):
            if self.state() == "held":
                self.judge_held()
                status, _, answer = self.pool.tool("restore", self.lease, self.name, bound=60)
                self.outcome.turns += status == 0
            if pace.seconds(began) > bound:
                raise TimeoutError(f"not ended {time.monotonic() - began:.0f} s later; {self.states()}; restore: {answer.strip()}")
            time.sleep(0.01)
        self.ended_at = self.reaper.end_of(self.started.pid)[1]
        if self.outcome.hit:
            self.outcome.end_ms = (self.ended_at - self.struck_at) * 1000

    def await_order(self, began):
        while not self.order_ended():
            if pace.seconds(began) > PATIENCE:
                raise TimeoutError(f"the order has not ended: {processes.command_line(self.order.pid)}")
            time.sleep(0.002)

    def judge_held(self):
        """Held: nothing of it is anywhere."""
        began = time.monotonic()
        while not self.have_left():
            if pace.seconds(began) > 10:
                self.outcome.notes.append("TWICE: the lease is held, and its workers run")
                return
            time.sleep(0.01)

    def states(self):
        return ", ".join(f"program {pid} {processes.state(pid) or 'gone'}" for pid in self.clients) + f", lease {self.state()!r}"

    def judge(self):
        outcome, verdicts = self.outcome, []
        for number in self.numbers():
            status, output, errors = self.text("status", number), self.text("out", number), self.text("err", number)
            outcome.error = outcome.error or errors.strip()
            verdicts.append(self.verdict(int(status or -1), output, errors))
            if verdicts[-1] == "WRONG":
                outcome.notes.append(f"status {status.strip()}, output {output[-200:]!r}, errors {errors[-500:]!r}")
        for verdict in ("WRONG", "killed", "error"):
            if verdict in verdicts:
                outcome.verdict = verdict
                break
        else:
            outcome.verdict = "right"
        if self.plan.signal and verdicts.count("killed") > 1 or self.plan.victim in ("worker", "next") and verdicts.count("error") > 1:
            outcome.notes.append(f"TOO MANY: {verdicts}: {outcome.error[-300:]}")

    def verdict(self, status, output, errors):
        plan, hit = self.plan, self.outcome.hit
        if output == RIGHT and status == 0:
            return "right"
        killed = hit and plan.signal == signal.SIGKILL
        if killed and plan.victim == "client" and status == 128 + signal.SIGKILL and RIGHT.startswith(output):
            return "killed"
        if hit and not plan.signal and status == EXIT and RIGHT.startswith(output) and errors == "":
            return "killed"
        due = plan.victim == "holder" or plan.moment in ENDS.get(plan.victim, ())
        if killed and due and is_clear_error(status, output, errors, RIGHT):
            return "error"
        return "WRONG"

    def await_clean(self):
        if self.outcome.hit and self.plan.victim in ("server", "manager", "both"):
            self.pool.await_rest(20)
        began = time.monotonic()
        while left := self.half_files() + self.pool.left():
            if pace.seconds(began) > 5 * self.options.instrumented.patience:
                break
            time.sleep(0.02)
        self.outcome.left, self.outcome.clean_ms = left, (time.monotonic() - began) * 1000
        for name in os.listdir(self.checkpoints()):
            shutil.rmtree(os.path.join(self.checkpoints(), name))

    def half_files(self):
        left = [f"a draft: {draft}" for draft in self.drafts()]
        for name in os.listdir(self.checkpoints()):
            if name.startswith("."):
                continue
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(os.path.join(self.checkpoints(), name))}
            if "manifest" not in sizes or len(sizes) != self.plan.programs + 1 or \
                    any(size < MIB << 20 for file, size in sizes.items() if file != "manifest"):
                left.append(f"a checkpoint that is not whole: {sizes}")
        return left

    def end_all(self):
        """Whatever did not end by itself."""
        self.go_on()
        for started in (self.order, self.started):
            if started and not self.reaper.end_of(started.pid):
                try:
                    os.killpg(started.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for pid in self.clients:
            if processes.executable(pid) == PROGRAM:
                processes.send(pid, signal.SIGKILL)
        self.reaper.sweep()
