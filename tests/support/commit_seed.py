"""Seeds of random tests. In the suite they are drawn from the commit: each commit tries others, and a failure is repeated
with the commit or the number that the test prints."""
import os
import subprocess


def seed(text):
    """A number, or `commit`: the checked-out commit's. For argparse."""
    if text != "commit":
        return int(text)
    here = os.path.dirname(os.path.realpath(__file__))
    found = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True)
    return int(found.stdout[:7], 16) if found.returncode == 0 else 1  # a packed tree has no commit
