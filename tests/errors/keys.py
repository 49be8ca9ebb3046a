"""Whether the keys of the leases in a manager's store are in none of these files, command lines and environments:

    keys.py STORE FILE...
"""
import glob, sqlite3, sys
# A key, by which sessions are opened: 32 random bytes in the record of its lease.
rows = sqlite3.connect(sys.argv[1]).execute("select k, v from kv").fetchall()
records = [bytes(value) for key, value in rows if bytes(key).startswith(b"lease/")]
windows = [one[i : i + 32] for one in records for i in range(0, len(one) - 31, 8)]
keys = [one for one in windows if len(set(one)) > 20 and not all(32 <= byte < 127 for byte in one)]
told = b""
for name in sys.argv[2:] + glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    try:
        told += open(name, "rb").read()
    except OSError:
        pass
print(len(keys) > 0 and not any(key in told or key.hex().encode() in told.lower() for key in keys))
