"""What a protected program whose worker died has said: the lines of the client's log (client/failover.cpp), and the one that
ends a program that cannot go on."""
import re

WENT_ON = re.compile(r"goes on at another one as epoch \d+: (\d+) calls? made again, (\d+) of kernels, (\d+) transfers? "
                     r"repeated, (\d+) answers? compared")
LOGGED = re.compile(r"gpupool: device fault: .*\n")  # GPUPOOL_LOG=info, of a program whose stderr is its stdout
DIED_AGAIN = re.compile(r"the worker of epoch \d+ has died, too")
ENDED = re.compile(r"gpupool: the GPU server(?:'s worker has died| is gone).*start the program again")
WHY = re.compile(r"cannot go on from its checkpoint:? ?(.*?)(?: \(the checkpoint|; start the)")

# Of a program's process, so that it says all this. A busy machine's servers are silent, too.
ENVIRONMENT = {"GPUPOOL_PROTECT": "1", "GPUPOOL_LOG": "info", "GPUPOOL_PROTECT_SILENCE": "30s"}


class Deaths:
    """How often the program went on, how often with a real replay (a kernel made again, an answer compared), how often a
    worker died in a replay, and why the program ended, if it did."""

    def __init__(self, text):
        replays = [tuple(int(n) for n in found) for found in WENT_ON.findall(text)]
        self.went_on = len(replays)
        self.real = sum(1 for _, kernels, _, compared in replays if kernels >= 1 and compared >= 1)
        self.again = len(DIED_AGAIN.findall(text))
        self.ended = bool(ENDED.search(text))
        self.why = " ".join(" ".join(found.split()) for found in WHY.findall(text)) if self.ended else ""
