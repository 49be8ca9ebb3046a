#!/usr/bin/env python3
"""Writes client/proc_address.def, or with --check compares it, from the toolkit's headers.

cudaTypedefs.h and cudaProfilerTypedefs.h declare PFN_<name>_v<version>[_ptds|_ptsz] for every variant of every
function cuGetProcAddress knows. A name's variants in ascending version are the symbols <name>, <name>_v2, <name>_v3 ...,
and its per-thread variants in ascending version the symbols among those that carry _ptds or _ptsz. Symbols come from
schema/names.def, the list of the driver's exports.

usage: proc_address.py [--check] INCLUDE_FOLDER
"""
import collections
import pathlib
import re
import sys

HEADERS = ("cudaTypedefs.h", "cudaProfilerTypedefs.h")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "client" / "proc_address.def"
INTRODUCTION = """\
// What cuGetProcAddress knows: base name, the CUDA version that introduced the variant, 1 for variants with the
// per-thread default stream, symbol. Sorted by name, then per-thread, then version.
// Made from cudaTypedefs.h by schema/tools/proc_address.py; --check compares.
"""


def suffix_number(symbol, name):
    match = re.fullmatch(re.escape(name) + r"(?:_v(\d+))?(?:_ptds|_ptsz)?", symbol)
    return None if match is None else int(match[1] or 1)


def main():
    arguments = [a for a in sys.argv[1:] if a != "--check"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    include = pathlib.Path(arguments[0])
    versions = collections.defaultdict(lambda: (set(), set()))
    for header in HEADERS:
        text = (include / header).read_text()
        for name, version, thread in re.findall(r"PFN_(cu\w+?)_v(\d+)(_ptds|_ptsz)?\)", text):
            versions[name][bool(thread)].add(int(version))
    symbols = re.findall(r"^NAME\((\w+)\)", (ROOT / "schema" / "names.def").read_text(), re.M)
    lines = []
    for name in sorted(versions):
        for per_thread in (False, True):
            known = sorted(versions[name][per_thread])
            candidates = [s for s in symbols if suffix_number(s, name) is not None
                          and bool(re.search("_pt[ds][sz]$", s)) == per_thread]
            candidates.sort(key=lambda s: suffix_number(s, name))
            if len(known) != len(candidates):
                sys.exit(f"{name}: versions {known} but symbols {candidates}")
            for version, symbol in zip(known, candidates):
                lines.append(f"PROC({name}, {version}, {int(per_thread)}, {symbol})\n")
    table = INTRODUCTION + "".join(lines)
    if "--check" in sys.argv:
        if TABLE.read_text() != table:
            sys.exit(f"{TABLE.name} differs from the headers in {include}")
    else:
        TABLE.write_text(table)


main()
