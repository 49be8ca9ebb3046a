#!/usr/bin/env python3
"""Holds what our libnvidia-ml.so.1 exports against what nvml.h declares, and prints how many functions are answered.

  functions.py NVML_H LIBRARY UNSUPPORTED_DEF
"""
import re
import subprocess
import sys

header, library, unsupported = sys.argv[1:]
with open(header) as file:
    # The declarations, also those of early versions.
    declared = set(re.findall(r"DECLDIR\s+(?:char\s*\*\s*)?(nvml\w+)\s*\(", file.read()))
with open(unsupported) as file:
    refused = set(re.findall(r"^UNSUPPORTED\((\w+)\)", file.read(), re.MULTILINE))
symbols = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
exported = {line.split()[2] for line in symbols.splitlines()}

problems = []
if len(declared) < 300:
    problems.append(f"{header} declares {len(declared)} functions: it was not understood")
for name in sorted(declared - exported):
    problems.append(f"{name} is declared and not exported: add it to {unsupported}, or answer it")
for name in sorted(exported - declared):
    problems.append(f"{name} is exported, and nvml.h has no such function")
for name in sorted(refused - exported):
    problems.append(f"{name} is refused and not exported")
print("\n".join(problems))
print(f"nvml.h declares {len(declared)} functions: {len(exported - refused)} are answered, {len(refused)} are not supported")
sys.exit(1 if problems else 0)
