"""One run of tests/manager/real: clients that lease and compute, faults that strike the pool meanwhile, and what has to be
true all the time and at the end. Everything random comes from a seed."""
import json
import os
import random
import re
import signal
import time

import pace
import processes
from real_faults import FORGETTING, plan
from real_pool import DEVICE_BYTES, NAMES, Broken
from plans import is_clear_error

PROGRAMS = {"vector_add": [], "async_copies": [], "reduction": [], "managed_memory": [], "host_callbacks": []}
ON_TWO = ("two_devices", ["--devices", "2"])
CLIENTS = 5
SHARE = 768 << 20  # of a device, where a program does not lease it whole
STEP = 0.02
BACK_WITHIN = 2.0  # seconds, of pace.py, of a manager that is started again
PATIENCE = 90.0  # after the last fault, as pace.py counts: a program that has not ended then never will


class Wish:
    """One program and what it leases."""

    def __init__(self, dice, ttl):
        self.program, self.arguments = dice.choice(list(PROGRAMS.items()))
        self.gpus = 1
        if dice.random() < 0.15:
            (self.program, self.arguments), self.gpus = ON_TWO, 2
        self.wrapped = dice.random() < 0.4
        self.transport = "ucx" if dice.random() < 0.2 else "shm"
        self.server = dice.choice(NAMES) if dice.random() < 0.5 else ""
        # The program itself stands still, and its lease outlives its time to live.
        self.pause = ttl * (0.2 + dice.random() * 1.6) if not self.wrapped and dice.random() < 0.5 else 0
        self.pause_delay = dice.random() ** 2 * 0.2
        self.bytes = SHARE if not self.wrapped and self.gpus == 1 and dice.random() < 0.4 else DEVICE_BYTES

    def __str__(self):
        return (f"{self.program} on {self.gpus} x {self.bytes >> 20} MiB{' of ' + self.server if self.server else ''} over "
                f"{self.transport}, {'with' if self.wrapped else 'without'} gpupool run"
                + (f", stopped for {self.pause:.2f} s" if self.pause else ""))

    def environment(self, pool):
        found = dict(pool.environment, GPUPOOL_GPUS=str(self.gpus), GPUPOOL_TTL=f"{round(pool.ttl * 1000)}ms",
                     GPUPOOL_TRANSPORT=self.transport, GPUPOOL_WAIT=f"{round(2 * PATIENCE)}s", GPUPOOL_LOG="warning")
        if self.server:
            found["GPUPOOL_SERVER"] = self.server
        if self.bytes != DEVICE_BYTES:
            found["GPUPOOL_MEMORY"] = str(self.bytes)
        if not self.wrapped:
            found["LD_LIBRARY_PATH"] = os.path.join(pool.build, "lib", "gpupool")
        return found


class Client:
    """One after another, programs that lease, compute and give back."""

    def __init__(self, dice, run, number):
        self.dice, self.run, self.pool = dice, run, run.pool
        self.folder = os.path.join(run.pool.folder, "programs", str(number))
        os.makedirs(self.folder, exist_ok=True)
        self.next_at = dice.random() * run.ttl * 0.5
        self.wish = self.started = None

    def step(self, now):
        if self.started is None:
            if now >= self.next_at and now < self.run.span:
                self.start()
            return
        if self.wish.pause:
            self.pause()
        if ended := self.pool.reaper.end_of(self.started.pid):
            right = self.run.judge(self, ended[0])
            again = self.dice.random() ** 3 if right else 0.2 + self.dice.random() * 0.3  # nobody to ask, perhaps
            self.started, self.next_at = None, now + again * self.run.ttl

    def start(self):
        self.wish, self.stopped_at, self.seen_at = Wish(self.dice, self.run.ttl), None, None
        words = [*self.run.options.instrumented.launcher, os.path.join(self.run.options.programs, self.wish.program),
                 *self.wish.arguments]
        if self.wish.wrapped:
            words = [self.pool.gpupool, "run", "--", *words]
        self.started = self.pool.reaper.start(words, self.wish.environment(self.pool), self.folder)
        self.run.wishes[self.started.pid] = self.wish.bytes

    def pause(self):
        """For a while, once its session has begun."""
        now = time.monotonic()
        if self.seen_at is None:
            if self.started.pid in self.pool.clients.values():
                self.seen_at = now
        elif self.stopped_at is None:
            if now >= self.seen_at + self.wish.pause_delay:
                self.stopped_at = now
                processes.send(self.started.pid, signal.SIGSTOP)
        elif now >= self.stopped_at + self.wish.pause:
            processes.send(self.started.pid, signal.SIGCONT)
            self.wish.pause = 0

    def end(self):
        if self.started and self.pool.reaper.end_of(self.started.pid) is None:
            os.killpg(self.started.pid, signal.SIGKILL)


class Listing:
    """`gpupool devices --json`, again and again, while other things go on: it may have to wait for a stopped manager."""

    def __init__(self, pool):
        self.pool, self.folder = pool, os.path.join(pool.folder, "programs", "listing")
        os.makedirs(self.folder, exist_ok=True)
        self.started, self.asked_during, self.count = None, {}, 0

    def step(self):
        """A new answer, and the sessions that there were when it was asked for; or None."""
        if self.started is None:
            self.asked_during = self.pool.sessions()
            self.started = self.pool.reaper.start([self.pool.gpupool, "devices", "--json"], self.pool.environment, self.folder)
            return None
        ended = self.pool.reaper.end_of(self.started.pid)
        if not ended:
            return None
        answer, self.started = self.started.text(self.started.output) if ended[0] == 0 else "", None
        if not answer:
            return None
        self.count += 1
        return json.loads(answer), self.asked_during

    def end(self):
        if self.started:
            processes.send(self.started.pid, signal.SIGKILL)
            while not self.pool.reaper.end_of(self.started.pid):
                time.sleep(0.002)


class Run:
    def __init__(self, pool, options, kind, seed):
        self.pool, self.options, self.kind, self.seed, self.ttl = pool, options, kind, seed, pool.ttl
        dice = random.Random(f"{kind} {seed}")
        self.span = 1.5 + 1.5 * self.ttl
        self.faults = plan(dice, kind, pool, self.ttl, self.span)
        self.clients = [Client(random.Random(f"{kind} {seed} {number}"), self, number) for number in range(CLIENTS)]
        self.disturbed = {fault.member.name for fault in self.faults}
        self.wishes, self.notes, self.counts = {}, [], {"right": 0, "error": 0, "unsure": 0}
        self.errors, self.late, self.listing, self.judged = [], 0.0, Listing(pool), 0
        self.restarted_at, self.back = None, 0.0  # of the manager; the longest until it answered again
        self.kills_before = pool.manager.kills

    def __str__(self):
        return f"{self.kind}: " + ", ".join(str(fault) for fault in self.faults)

    def kills(self):
        return self.pool.manager.kills - self.kills_before

    # --- the run ---

    def execute(self):
        pace.start()
        self.pool.read_logs()
        self.pool.clients.clear()
        self.pool.granted.clear()
        self.pool.revoked.clear()
        self.began = self.calm_at = self.last = time.monotonic()
        try:
            while self.goes_on():
                self.step(time.monotonic() - self.began)
                time.sleep(STEP)
        finally:
            self.end_all()
        try:
            self.pool.await_rest(PATIENCE)
            self.use_every_device()
            self.pool.await_rest(PATIENCE)
        except Broken as error:
            self.note(f"LEFT: {error}")

    def goes_on(self):
        now = time.monotonic()
        if any(not fault.over for fault in self.faults) or now - self.began < self.span:
            self.calm_at = now
        if all(client.started is None for client in self.clients):
            return self.calm_at == now
        if pace.seconds(self.calm_at) < PATIENCE:
            return True
        self.notes += [f"HANG: {client.wish}: {client.started.text(client.started.errors)[-300:]!r}"
                       for client in self.clients if client.started]
        return False

    def step(self, now):
        moment = time.monotonic()
        self.late, self.last = max(self.late, moment - self.last), moment
        self.pool.reaper.sweep()
        self.strike(now)
        self.pool.read_logs()
        self.look_at_ends()
        for client in self.clients:
            client.step(now)
        self.look_at_sessions()
        if found := self.listing.step():
            self.see_back()
            self.look_at_devices(*found)

    def see_back(self):
        """A manager that was started again answers."""
        if self.restarted_at is None:
            return
        seconds, self.restarted_at = pace.seconds(self.restarted_at), None
        self.back = max(self.back, seconds)
        if seconds > BACK_WITHIN * self.options.instrumented.patience:
            self.note(f"BACK LATE: the manager answered {seconds:.2f} s after it was started again")

    def strike(self, now):
        busy = {fault.member for fault in self.faults if fault.struck_at and not fault.over}
        for fault in self.faults:
            if fault.struck_at is None and now >= fault.at and fault.member not in busy:
                fault.begin()
                busy.add(fault.member)
                if fault.member is self.pool.manager:
                    self.restarted_at = None  # it is disturbed before it has answered
            elif fault.struck_at and not fault.over and time.monotonic() >= fault.struck_at + fault.lasts:
                lives = self.pool.manager.lives
                fault.end()
                if self.pool.manager.lives != lives:
                    self.restarted_at = time.monotonic()

    def end_all(self):
        for fault in self.faults:
            if fault.struck_at and not fault.over:
                fault.end()
        self.listing.end()
        for client in self.clients:
            client.end()

    # --- judging ---

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)

    def look_at_sessions(self):
        """No GPU is used by more sessions than fit on it. A second look at those that were seen first: they were there
        together when the others were seen."""
        first = self.pool.sessions()
        if not self.overfull(first):
            return
        second = self.pool.sessions()
        both = {who: locks & second[who] for who, locks in first.items() if who in second}
        self.pool.read_logs()
        for lock, users in self.overfull(both).items():
            self.note(f"TWICE: {lock} is used by workers {users}, whose programs are "
                      f"{[self.pool.clients.get(worker) for worker, _ in users]}")

    def overfull(self, sessions):
        used = {}
        for who, locks in sessions.items():
            for lock in locks:
                used.setdefault(lock, []).append(who)
        return {lock: users for lock, users in used.items() if sum(self.wish_of(worker) for worker, _ in users) > DEVICE_BYTES}

    def wish_of(self, worker):
        """Of a worker whose session the log does not tell yet: 0."""
        client = self.pool.clients.get(worker)
        return self.wishes.get(client, DEVICE_BYTES) if client else 0

    def look_at_devices(self, devices, before):
        """What the manager says of them."""
        names = [device["uuid"] for device in devices if device["freeBytes"] or device["leases"]]
        if len(set(names)) != len(names):
            self.note(f"OFFERED TWICE: {sorted(names)}")
        for device in devices:
            if not 0 <= device["freeBytes"] <= DEVICE_BYTES:
                self.note(f"FREE: {device['freeBytes']} bytes of GPU {device['ordinal']} of {device['server']}")
        now = self.pool.sessions()
        used = {lock for who, locks in before.items() for lock in locks & now.get(who, set())}
        self.judged += len(used)
        for device in devices:
            if device["server"] in self.disturbed or device["freeBytes"] != DEVICE_BYTES or not device["healthy"]:
                continue
            if any(device["uuid"] in lock for lock in used):
                self.note(f"SAID TO BE FREE: GPU {device['ordinal']} of {device['server']}, which a session uses")

    def judge(self, client, status):
        """A program has ended. True: with its right result."""
        wish, started = client.wish, client.started
        output, errors = started.text(started.output), started.text(started.errors)
        with open(os.path.join(self.options.expected, wish.program + ".txt")) as file:
            expected = file.read()
        if status == 0 and output == expected:
            self.counts["right"] += 1
            return True
        self.counts["error"] += 1
        line = f"{wish}: status {status}, output {output[-200:]!r}, errors {errors[-400:]!r}"
        self.errors.append(line)
        if not is_clear_error(status, output, errors, expected):
            self.note("WRONG: " + line)
            return
        servers = self.disturbed & set(NAMES)
        if self.kind in FORGETTING:
            return False
        if wish.server and wish.server not in servers or not servers:
            # Nothing but the manager stood still or died: whoever had a session keeps it.
            if re.search(r"session|lease has ended|GPU server|gpupool-server", errors):
                self.note("LOST: " + line)
        return False

    def look_at_ends(self):
        """A holder lives as long as its program, and was not disturbed: so the lease has not run out before."""
        programs = {client.started.pid for client in self.clients if client.started} - self.pool.reaper.ended.keys()
        for lease, why in self.pool.revoked:
            if self.pool.granted.get(lease) not in programs or not re.search("not renewed|was killed|not know", why):
                continue
            if self.kind in FORGETTING and "not know" in why:
                continue
            if self.late > self.ttl / 4:  # this machine stood still, and perhaps a holder with it
                self.counts["unsure"] += 1
            else:
                self.note(f"ENDED: lease {lease} of process {self.pool.granted[lease]}: {why}")
        self.pool.revoked.clear()

    def use_every_device(self):
        """All of them, at once."""
        began, started = time.monotonic(), []
        for name in NAMES:
            wish = Wish(random.Random(0), self.ttl)
            (wish.program, wish.arguments), wish.gpus, wish.server = ON_TWO, 2, name
            wish.wrapped, wish.bytes, wish.transport = True, DEVICE_BYTES, "shm"
            folder = os.path.join(self.pool.folder, "programs", name)
            os.makedirs(folder, exist_ok=True)
            words = [self.pool.gpupool, "run", "--", *self.options.instrumented.launcher,
                     os.path.join(self.options.programs, wish.program), *wish.arguments]
            started.append((wish, self.pool.reaper.start(words, wish.environment(self.pool), folder)))
        for wish, one in started:
            while not (ended := self.pool.reaper.end_of(one.pid)):
                if pace.seconds(began) > PATIENCE:
                    os.killpg(one.pid, signal.SIGKILL)
                time.sleep(STEP)
            if ended[0] != 0:
                self.note(f"AT THE END: {wish}: status {ended[0]}: {one.text(one.errors)[-400:]}")
