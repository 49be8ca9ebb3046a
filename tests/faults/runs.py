"""One run of a plan: the program is started, somebody dies or stops, and this is what has to be true afterwards."""
import os
import re
import signal
import time

import pace
import processes
from partner import RIGHT, Partner, results
from plans import BOUND, HANG, MOVES, ORDERS, Outcome, is_clear_error


class Run:
    def __init__(self, plan, pool, options, life):
        self.plan, self.pool, self.options, self.life = plan, pool, options, life
        self.reaper, self.bound = pool.reaper, BOUND * options.instrumented.patience
        pace.start()
        self.outcome = Outcome(plan)
        self.known = {}  # role: pid
        self.since = {}  # pid: when it started
        self.struck = []
        self.struck_at = self.back_at = None
        self.moves = []  # (worker, next) of each move that was seen to begin

    # --- starting ---

    def command(self, plan):
        environment = dict(self.pool.environment)
        words = [*self.options.instrumented.launcher, os.path.join(self.options.programs, plan.program), *plan.arguments]
        if plan.wrapped:
            transport = ["--transport", plan.transport] if self.names_transport(plan) else []
            return [self.pool.gpupool, "run", *transport, "--memory", self.options.memory, "--wait", "20s", "--", *words], environment
        environment.update(LD_LIBRARY_PATH=os.path.join(self.pool.build, "lib", "gpupool"),
                           GPUPOOL_MANAGER=f"unix:{self.pool.state}/manager.sock",
                           GPUPOOL_MEMORY=self.options.memory, GPUPOOL_WAIT="20s")
        if self.names_transport(plan):
            environment["GPUPOOL_TRANSPORT"] = plan.transport
        return words, environment

    def names_transport(self, plan):
        """Who names shm keeps it."""
        return plan.transport != "shm" or not self.options.apart

    def start(self, plan, name):
        folder = os.path.join(self.pool.folder, name)
        os.makedirs(folder, exist_ok=True)
        words, environment = self.command(plan)
        return self.reaper.start(words, environment, folder)

    # --- who is who ---

    def learn(self, role, pid):
        """Numbers come back: what was known of an earlier process with this one is forgotten."""
        if pid not in self.since:
            self.reaper.ended.pop(pid, None)
            self.since[pid] = processes.started_at(pid)
        self.known[role] = pid

    def there(self, pid):
        """The process itself, be it a zombie, and not another one with its number."""
        return processes.started_at(pid) == self.since[pid]

    def look(self):
        """Learns the pids of this run's processes as they appear."""
        top, program = self.started.pid, self.plan.program
        family = [pid for pid in (top, *processes.descendants(top)) if pid not in (self.known.get("run"),)]
        if self.plan.wrapped:
            if "run" not in self.known and processes.state(top) != "":
                self.learn("run", top)
        for pid in family:
            name = processes.executable(pid)
            if name == program and "client" not in self.known and self.started_program(pid):
                self.learn("client", pid)
            elif name == "gpupool" and pid != top and "holder" not in self.known:
                fields = processes.stat(pid)
                if fields and int(fields[3]) == pid:  # in a session of its own
                    self.learn("holder", pid)
        if client := self.known.get("client"):
            worker = self.pool.worker_of(client)
            if worker and self.known.get("worker") != worker:
                self.learn("worker", worker)
            if self.options.moves:
                self.look_for_moves(client)

    def look_for_moves(self, client):
        coming = self.pool.next_of(client)
        if not coming or coming == self.known.get("next"):
            return
        self.learn("next", coming)
        self.moves.append((self.known.get("worker", 0), coming))
        if len(self.moves) == self.plan.move:
            self.appeared = time.monotonic()

    def look_for_client(self):
        """`gpupool run` was killed; its child may have become the program after that, and even have ended unseen."""
        top, program = self.started.pid, self.plan.program
        for pid in processes.children(os.getpid()):
            if processes.executable(pid) == program and pid != top:
                self.learn("client", pid)
                return
        for pid, (_, when) in self.reaper.ended.items():
            if when >= self.struck_at and self.reaper.names[pid] == program[:15]:
                self.known["client"], self.since[pid] = pid, None  # no process of now
                return

    def started_program(self, pid):
        return not self.plan.wrapped or pid != self.started.pid

    def find(self, role):
        if role in ("server", "manager"):
            return self.pool.roles().get(role, 0)
        if role == "copier":
            return self.pool.copier()
        pid = self.known.get(role, 0)
        if role == "worker" and self.moves and self.there(self.moves[-1][0]):
            pid = self.moves[-1][0]  # the one that the session leaves, or has just left
        return pid if pid and self.there(pid) else 0

    # --- striking ---

    def over(self):
        """The program has ended: (status, when)."""
        self.reaper.sweep()
        if "run" in self.struck and "client" not in self.known:
            self.look_for_client()
        client = self.known.get("client")
        if client and client in self.reaper.ended:
            return self.reaper.ended[client]
        if "run" in self.struck and not client and time.monotonic() < self.struck_at + self.bound / 4:
            return None
        return self.reaper.end_of(self.started.pid) if not self.orphaned() else None

    def orphaned(self):
        """`gpupool run` was killed: the program is our child now, and its end counts."""
        return "run" in self.struck and "client" in self.known and self.known["client"] not in self.reaper.ended \
            and processes.state(self.known["client"]) != ""

    def due(self):
        now = time.monotonic()
        if self.plan.endless:
            return "holds" in self.started.text(self.started.output)
        if not self.plan.early:
            return now >= self.started.began + self.plan.at * self.life
        if self.plan.early not in self.known or len(self.moves) < self.plan.move and self.plan.early == "next":
            return False
        self.appeared = getattr(self, "appeared", now)
        return now >= self.appeared + self.plan.early_delay

    def strike(self):
        """Waits for the moment and for the victims, then signals them. False: the program had ended before."""
        while not self.due():
            self.look()
            if self.over():
                return False
            time.sleep(0.001)
        while True:
            self.look()
            targets = {role: self.find(role) for role in self.plan.victims}
            if all(targets.values()):
                break
            if self.over():
                return False
            time.sleep(0.001)
        self.struck_at = time.monotonic()
        for role, pid in targets.items():
            if processes.send(pid, self.plan.signal):
                self.struck.append(role)
        self.targets = targets
        return bool(self.struck)

    def resume(self):
        for pid in self.targets.values():
            processes.send(pid, signal.SIGCONT)
        self.back_at = time.monotonic()

    # --- the run ---

    def execute(self):
        outcome, plan = self.outcome, self.plan
        self.pool.forget_sessions()
        counted = self.options.turns or self.options.moves
        turned = self.pool.suspensions()[0] if counted else 0
        odd = len(self.pool.odd_lines())
        self.partner = self.start_partner() if self.options.turns else None
        self.started = self.start(plan, "run-files")
        beside = self.start(BYSTANDER, "beside") if plan.bystander else None
        orders = self.start_orders() if plan.orders else None
        self.appeared = None
        del self.appeared
        try:
            outcome.hit = self.strike()
            self.await_end()
            self.judge()
            if beside:
                self.judge_bystander(beside)
            if orders:
                self.end_orders(orders)
                orders = None
            if self.partner:
                self.end_partner()
            self.await_clean()
            if plan.signal == signal.SIGKILL:  # nobody was slow
                outcome.notes += [f"SAID: {line}" for line in self.pool.odd_lines()[odd:]]
            if counted:
                outcome.turns = self.pool.suspensions()[0] - turned
        finally:
            self.end_all()
            if self.partner:
                self.partner.kill()
            if orders:
                self.end_orders(orders)
        return outcome

    def start_partner(self):
        partner = Partner(self.pool, self.options, self.plan.partner)
        if why := partner.await_work():
            self.outcome.notes.append(why)
        return partner

    def end_partner(self):
        """It goes on until nothing is left of the program, and ends then, with whatever the death allows it."""
        began = time.monotonic()
        while not self.partner.gone():
            self.look_for_orphans()
            if not (left := self.own_left() + self.pool.left_beside(self.partner)):
                break
            if pace.seconds(began) > self.bound + self.away():
                self.outcome.left += left
                break
            time.sleep(0.02)
        status, output, errors = self.partner.end()
        self.partner = None
        right, rest = results(output)
        said = f"PARTNER: status {status}, {right} right, then {rest[-300:]!r}, errors {errors[-500:]!r}"
        if status == 0 and right and not rest:
            self.outcome.partner = "right"
        elif self.concerns_partner(errors) and is_clear_error(status, rest, errors, RIGHT):
            self.outcome.partner = "error"
        else:
            self.outcome.notes.append(said)

    def concerns_partner(self, errors):
        """The death may end it."""
        victims = set(self.plan.victims) if self.outcome.hit and self.plan.signal == signal.SIGKILL else set()
        return "server" in victims or ("copier" in victims and "copier" in errors)

    def away(self):
        """Seconds until a killed server or manager must be there again."""
        return 10 if self.outcome.hit and {"server", "manager"} & set(self.plan.victims) else 0

    def start_orders(self):
        folder = os.path.join(self.pool.folder, "orders")
        os.makedirs(folder, exist_ok=True)
        words = ["/bin/bash", "-c", MOVES if self.options.moves else ORDERS, "orders", self.pool.gpupool, *self.plan.orders]
        return self.reaper.start(words, self.pool.environment, folder)

    def end_orders(self, orders):
        """They are a session of their own."""
        try:
            os.killpg(orders.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        while not self.reaper.end_of(orders.pid):
            time.sleep(0.002)

    def await_end(self):
        """Until everything that the run started has ended; continues what was stopped when its time has come."""
        paused = self.outcome.hit and self.plan.signal == signal.SIGSTOP
        began = time.monotonic()
        bound = self.life * 5 + HANG * self.options.instrumented.patience + (self.plan.pause if paused else 0)
        end = None
        while True:
            self.look()
            now = time.monotonic()
            if paused and self.back_at is None and now >= self.struck_at + self.plan.pause:
                self.resume()
            end = end or self.over()
            if end and (not paused or self.back_at):
                break
            if self.plan.endless and self.outcome.hit is False:
                return
            if pace.seconds(began, now) > bound:
                self.outcome.notes.append(f"HANG: not ended {now - (self.struck_at or self.started.began):.1f} s later"
                                          f"; {self.describe()}")
                self.end_all()
                return
            time.sleep(0.001)
        self.outcome.status, self.ended_at = end
        if self.outcome.hit:
            self.outcome.end_ms = (self.ended_at - self.struck_at) * 1000

    def describe(self):
        return ", ".join(f"{role} {pid} {processes.state(pid) or 'gone'} {processes.read(f'/proc/{pid}/wchan').decode()}"
                         for role, pid in self.known.items())

    def end_all(self):
        for role in ("run", "client", "holder"):
            pid = self.known.get(role)
            if pid and self.there(pid):
                processes.send(pid, signal.SIGKILL)
        processes.send(self.started.pid, signal.SIGKILL) if self.started.pid not in self.reaper.ended else None
        self.reaper.sweep()

    # --- judging ---

    def expected(self, program):
        with open(os.path.join(self.options.expected, program + ".txt")) as file:
            return file.read()

    def judge(self):
        outcome, plan = self.outcome, self.plan
        if outcome.notes:
            outcome.verdict = "hang"
            return
        output, errors = self.started.text(self.started.output), self.started.text(self.started.errors)
        expected = self.expected(plan.program)
        outcome.error = errors.strip()
        never = "run" in self.struck and "client" not in self.known  # before it had started the program
        killed = outcome.hit and plan.signal == signal.SIGKILL and ("client" in self.struck or never)
        if killed and (plan.endless or expected.startswith(output)):
            outcome.verdict = "killed"
            return
        # (Of several the client may be struck last, and see what happened to the others first.)
        if output == expected and (outcome.status == 0 or "run" in self.struck and outcome.status == -signal.SIGKILL):
            # (The program had ended, and `gpupool run`, which knew how, was killed before it could repeat it.)
            outcome.verdict = "right"
            return
        if outcome.hit and is_clear_error(outcome.status, output, errors, expected):
            outcome.verdict = "error"
            self.judge_error(errors)
            return
        outcome.verdict = "WRONG"
        outcome.notes.append(f"status {outcome.status}, output {output[-400:]!r}, errors {errors[-600:]!r}")

    def judge_error(self, errors):
        """An error was due: not too late, and only where somebody whom the session needs died or stopped too long."""
        outcome, plan = self.outcome, self.plan
        since = self.struck_at if plan.signal == signal.SIGKILL else min(self.struck_at + self.options.stall, self.back_at)
        late = pace.seconds(since, self.ended_at)
        if late > self.bound and outcome.status != 125:
            outcome.notes.append(f"LATE: {late * 1000:.0f} ms: {errors.strip()[-300:]}")
        connected = "the session" in errors or "GPU server is gone" in errors
        if plan.kind in ("kill-manager", "pause-manager", "kill-run", "pause-client") and connected:
            outcome.notes.append(f"NOTICED: {errors.strip()[-300:]}")
        if plan.kind == "kill-copier" and "copier" not in errors:
            outcome.notes.append(f"NOT NAMED: {errors.strip()[-300:]}")
        if plan.kind in ("pause-client", "kill-run", "pause-copier"):
            outcome.notes.append(f"FAILED: {errors.strip()[-300:]}")
        if self.options.moves and plan.signal == signal.SIGKILL:
            self.judge_side(errors)
        if plan.kind.startswith("pause-") and plan.pause < self.options.stall * 0.8:
            outcome.notes.append(f"IMPATIENT: {errors.strip()[-300:]}")

    def judge_side(self, errors):
        """Of two workers one has the session, and it is known which: only with that one it may end."""
        workers = {role: self.targets[role] for role in ("worker", "next") if role in self.struck}
        if not workers or len(self.struck) != len(workers):
            return
        serves = self.pool.worker_of(self.known.get("client", 0))
        if serves not in workers.values():
            self.outcome.notes.append(f"LOST: worker {serves} had the session, and {workers} died: {errors.strip()[-300:]}")
        if "worker" not in errors:
            self.outcome.notes.append(f"NOT NAMED: {errors.strip()[-300:]}")

    def judge_bystander(self, beside):
        """Another program of the same pool, which nothing happened to."""
        began = time.monotonic()
        while not self.reaper.end_of(beside.pid):
            if pace.seconds(began) > HANG:
                os.killpg(beside.pid, signal.SIGKILL)
                self.outcome.notes.append("HANG: the bystander did not end")
            time.sleep(0.002)
        status, _ = self.reaper.ended.pop(beside.pid)
        output, errors = beside.text(beside.output), beside.text(beside.errors)
        if self.plan.kind == "kill-copier" and "copier" in errors and is_clear_error(status, output, errors,
                                                                                  self.expected(BYSTANDER.program)):
            return
        away = {"manager"} & set(self.plan.victims)  # it may have asked for its lease just then
        if status == 0 and output == self.expected(BYSTANDER.program):
            return
        if not (away and status == 125 and errors.startswith("gpupool: ")):
            self.outcome.notes.append(f"BYSTANDER: status {status}, output {output!r}, errors {errors[-300:]!r}")

    def await_clean(self):
        began = time.monotonic()
        # A killed server or manager must first be there again.
        if self.away():
            self.pool.await_rest(self.away())
            began = time.monotonic()
        while True:
            self.look_for_orphans()
            left = self.own_left() + self.pool.left()
            if not left or pace.seconds(began) > self.bound:
                break
            time.sleep(0.02)
        self.outcome.clean_ms = (time.monotonic() - began) * 1000
        self.outcome.left = left
        if left:  # how long it does stay, for who looks for the cause
            while self.own_left() + self.pool.left() and pace.seconds(began) < self.bound + 8:
                time.sleep(0.05)
            left.append(f"after {time.monotonic() - began:.1f} s: {self.own_left() + self.pool.left() or 'gone'}")

    def look_for_orphans(self):
        self.reaper.sweep()
        for pid in processes.children(os.getpid()):
            if processes.executable(pid) == "gpupool" and pid not in self.known.values() and not self.is_order(pid) \
                    and pid not in (self.pool.roles().get("supervisor"), self.partner and self.partner.pid):
                self.learn(f"orphan {pid}", pid)

    @staticmethod
    def is_order(pid):
        """One that was killed with what gave it."""
        line = processes.command_line(pid)
        return " --server node" in line or " migrate " in line or line.endswith(" leases --json")

    def own_left(self):
        return [f"its {role}, process {pid} ({processes.state(pid)})" for role, pid in self.known.items()
                if role not in ("worker", "next") and self.there(pid)]


class _Bystander:
    program, arguments, transport, wrapped = "vector_add", [], "shm", True


BYSTANDER = _Bystander()
