"""What a run is: a program, and who dies or stops when. Everything random comes from a seed."""
import random
import re
import signal

# Programs, how often each is chosen, arguments, and whether it waits to be killed once it holds memory.
PROGRAMS = {
    "vector_add": (2, [], False),
    "stress_allocations": (2, [], False),
    "stress_threads": (2, [], False),
    "host_callbacks": (3, [], False),
    "managed_memory": (1, [], False),
    "mapped_memory": (1, [], False),
    "async_copies": (3, [], False),
    "graph_capture": (2, [], False),
    "memory_pools": (1, [], False),
    "device_printf": (1, [], False),
    "hold_memory": (2, ["--mib", "64"], False),
}
TURNING_PROGRAMS = {"steady_work": (14, ["--mib", "1", "--rounds", "250", "--pause", "8"], False)}  # several turns long
ENDLESS = ("hold_memory", ["--hold", "--mib", "64"])

# kind: (signal, who). "run" is `gpupool run`, or the program itself where it started without.
KINDS = {
    "kill-client": (signal.SIGKILL, ("client",)),
    "kill-worker": (signal.SIGKILL, ("worker",)),
    "kill-server": (signal.SIGKILL, ("server",)),
    "kill-manager": (signal.SIGKILL, ("manager",)),
    "kill-holder": (signal.SIGKILL, ("holder",)),
    "kill-run": (signal.SIGKILL, ("run",)),
    "kill-client-and-holder": (signal.SIGKILL, ("client", "holder")),
    "kill-run-and-holder": (signal.SIGKILL, ("run", "holder")),
    "kill-manager-client-holder": (signal.SIGKILL, ("manager", "client", "holder")),
    "pause-client": (signal.SIGSTOP, ("client",)),
    "pause-worker": (signal.SIGSTOP, ("worker",)),
    "pause-server": (signal.SIGSTOP, ("server",)),
    "pause-manager": (signal.SIGSTOP, ("manager",)),
}
# Only in a pool whose sessions are suspended, or whose leases take turns.
SUSPENDED_KINDS = {
    "kill-copier": (signal.SIGKILL, ("copier",)),
    "pause-copier": (signal.SIGSTOP, ("copier",)),
}
# Only in a pool whose sessions are moved: "next" is the worker that a session moves to, "worker" the one that it leaves.
MOVED_KINDS = {
    "kill-next": (signal.SIGKILL, ("next",)),
    "pause-next": (signal.SIGSTOP, ("next",)),
    "kill-worker-and-next": (signal.SIGKILL, ("worker", "next")),
}
# Suspends and resumes all sessions of the server until it is killed, so that it is killed in the middle of that too.
ORDERS = """while :; do
  sleep "$2"
  "$1" suspend --server node
  sleep "$3"
  until "$1" resume --server node; do sleep 0.05; done
done"""
# Moves the sessions of every lease until it is killed. Its pause lets the program get on.
MOVES = """while :; do
  sleep "$2"
  for lease in $("$1" leases --json | grep -o '"id": *"[0-9a-f]*"' | grep -o '[0-9a-f]\\{8,\\}'); do
    "$1" migrate --drain 5s "$lease"
  done
done"""
# What a session's end looks like to the program, as CUDA's runtime names it.
LOST = ("cudaErrorDevicesUnavailable", "cudaErrorNoDevice", "cudaErrorInitializationError", "cudaErrorUnknown")
BOUND = 2.0  # from the death to the program's end, and from there to the last trace; seconds as pace.py counts them
HANG = 30.0  # later than its usual life


def is_clear_error(status, output, errors, expected):
    """A program's end that tells its user that the pool failed it."""
    if status is None or status <= 0:
        return False
    if re.search(r"::\w+\(|EOF", errors):  # a library's words for its authors
        return False
    if status == 125:  # gpupool run's own
        return output == "" and errors.startswith("gpupool: ")
    head, fail, why = output.partition("FAIL: ")
    lost = re.search(r"gave (\w+)", why)
    return bool(fail and lost and lost.group(1) in LOST and expected.startswith(head) and
                re.search(r"^gpupool( \w+)?: \S", errors, re.MULTILINE))


class Plan:
    """What the seed says."""

    def __init__(self, kind, seed, options):
        dice = random.Random(f"{kind} {seed}")
        self.kind, self.seed = kind, seed
        self.signal, self.victims = {**KINDS, **SUSPENDED_KINDS, **MOVED_KINDS}[kind]
        self.program = dice.choices(list(PROGRAMS), [weight for weight, _, _ in PROGRAMS.values()])[0]
        self.arguments, self.endless = PROGRAMS[self.program][1], False
        self.transport = dice.choice(options.transports)
        self.wrapped = dice.random() < 0.6 or "run" in self.victims
        self.at = dice.random()  # of the program's life
        # Connecting takes a small part of a life: a third of the runs are struck there.
        self.early = dice.choice(("holder", "client", "worker")) if dice.random() < 0.35 else ""
        self.early_delay = dice.random() ** 2 * 0.06
        if "client" in self.victims and self.signal == signal.SIGKILL and dice.random() < 0.15 and not options.moving():
            (self.program, self.arguments), self.endless, self.early = ENDLESS, True, ""
        long = dice.random() < 0.2
        self.pause = options.stall + 0.3 + dice.random() * 1.2 if long else 0.02 + dice.random() * 0.6
        if options.pause is not None:
            self.pause = options.pause
        self.bystander = not {"server"} & set(self.victims) and dice.random() < 0.2
        # Seconds until it is suspended and until it is resumed, again and again; sessions are disturbed besides.
        self.orders = None
        if options.suspend and dice.random() < 0.4:
            self.orders = [f"{dice.random() ** 2 * 0.4:.3f}", f"{dice.random() ** 2 * 0.4:.3f}"]
        self.partner = dice.choice(options.transports) if options.turns else None  # its transport
        self.move = 1  # which of the program's moves it is that `early` may mean
        if options.moves:
            self.plan_moves(dice)

    def plan_moves(self, dice):
        """Most are struck in the middle of a move, soon after the next worker has come."""
        if "next" in self.victims or dice.random() < 0.7:
            self.early, self.move = "next", dice.choice((1, 1, 2, 3))
            self.early_delay = dice.random() ** 2 * 0.12
        self.orders = [f"{dice.random() * 0.2:.3f}"] if dice.random() < 0.6 else None

    def __str__(self):
        moment = f"{self.early_delay * 1000:.0f} ms after its {self.early} appeared" if self.early != "next" else \
            f"{self.early_delay * 1000:.0f} ms after its move {self.move} began"
        moment = moment if self.early else f"at {self.at:.2f} of its life"
        return (f"{self.kind} of {self.program}{' ' + ' '.join(self.arguments) if self.arguments else ''} over {self.transport}, "
                f"{'with' if self.wrapped else 'without'} gpupool run, {moment}"
                + (f", paused for {self.pause:.2f} s" if self.signal == signal.SIGSTOP else "")
                + (f", suspended after {self.orders[0]} s for {self.orders[1]} s" if len(self.orders or []) == 2 else "")
                + (f", moved by an order every {self.orders[0]} s" if len(self.orders or []) == 1 else "")
                + (f", its partner over {self.partner}" if self.partner else ""))


class Outcome:
    def __init__(self, plan):
        self.plan, self.hit, self.verdict, self.notes, self.left = plan, False, "", [], []
        self.end_ms = self.clean_ms = 0.0
        self.status, self.error = None, ""
        self.turns, self.partner = 0, ""  # moves count as turns; what the partner came to: right or error
