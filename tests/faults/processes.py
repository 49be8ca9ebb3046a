"""Processes as /proc shows them, and children that are waited for by hand: those of a killed parent come to us."""
import ctypes
import os
import signal
import time

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans():
    """What a killed process leaves becomes our child: it can be seen, and is reaped here as init would."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def stat(pid):
    """[state, parent, ...] from field 3 on, or None."""
    text = read(f"/proc/{pid}/stat")
    end = text.rfind(b")")
    return text[end + 2:].decode().split() if end > 0 else None


def state(pid):
    """One letter; '' if there is no such process."""
    fields = stat(pid)
    return fields[0] if fields else ""


def started_at(pid):
    """In ticks since the machine booted, 0 if there is no such process: with it, a number that came back is known."""
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def running(pid):
    return state(pid) not in ("", "Z", "X")


def stopped(pid):
    return state(pid) == "T"


def children(pid):
    """Of all its threads."""
    found = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        found += [int(word) for word in read(f"/proc/{pid}/task/{thread}/children").split()]
    return found


def descendants(pid):
    found, todo = [], [pid]
    while todo:
        below = children(todo.pop())
        found += below
        todo += below
    return found


def short_name(pid):
    """The first 15 characters of its executable's name: known of a zombie too."""
    text = read(f"/proc/{pid}/stat").decode(errors="replace")
    return text[text.find("(") + 1:text.rfind(")")]


def executable(pid):
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
    except OSError:
        return ""


def command_line(pid):
    return read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def marked(mark):
    """Every process, zombies left out, whose environment holds `mark`: {pid: command line}."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and mark in read(f"/proc/{name}/environ"):
            found[int(name)] = command_line(int(name))
    return found


def descriptors(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return -1


def resident_kib(pid):
    for line in read(f"/proc/{pid}/status").decode().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


class Stops:
    """Of a run that stops processes, and has all of them go on again."""

    def __init__(self):
        self.stopped = []

    def stop(self, *pids):
        for pid in pids:
            send(pid, signal.SIGSTOP)
            self.stopped.append(pid)

    def go_on(self, but=0):
        for pid in self.stopped:
            if pid != but:
                send(pid, signal.SIGCONT)
        self.stopped = [but] if but else []


def send(pid, number):
    """False: it is gone. 0, of one that was not found, would be this process and all of its group."""
    try:
        if pid > 0:
            os.kill(pid, number)
        return pid > 0
    except ProcessLookupError:
        return False


class Started:
    """A program that we started, its output in files."""

    def __init__(self, words, environment, folder):
        self.output, self.errors = os.path.join(folder, "out"), os.path.join(folder, "err")
        nothing = os.open("/dev/null", os.O_RDONLY)
        out = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        err = os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self.began = time.monotonic()
        actions = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, err, 2)]
        self.pid = os.posix_spawn(words[0], words, environment, file_actions=actions, setsid=True)
        for descriptor in (nothing, out, err):
            os.close(descriptor)

    def text(self, path):
        return read(path).decode(errors="replace")


class Reaper:
    """How our children ended, by pid. `sweep` waits for whatever has ended."""

    def __init__(self):
        self.ended = {}  # pid: (status as subprocess has it, when)
        self.names = {}  # pid: short name, of those in `ended`

    def sweep(self):
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            self.names[found.si_pid] = short_name(found.si_pid)
            _, status = os.waitpid(found.si_pid, 0)
            self.ended[found.si_pid] = (os.waitstatus_to_exitcode(status), time.monotonic())

    def end_of(self, pid):
        self.sweep()
        return self.ended.get(pid)

    def start(self, words, environment, folder):
        """What ended before under the same number is forgotten: numbers come back."""
        started = Started(words, environment, folder)
        self.ended.pop(started.pid, None)
        return started

    def run(self, words, environment, folder, bound):
        """To its end: (status, output, errors); status None if it had to be killed."""
        started = self.start(words, environment, folder)
        deadline = time.monotonic() + bound
        while not self.end_of(started.pid):
            if time.monotonic() > deadline:
                os.killpg(started.pid, signal.SIGKILL)
                while not self.end_of(started.pid):
                    time.sleep(0.005)
                return None, started.text(started.output), started.text(started.errors)
            time.sleep(0.002)
        return self.ended.pop(started.pid)[0], started.text(started.output), started.text(started.errors)
