#!/usr/bin/env python3
"""The seeds of a fuzzer: one archive each, seeds/TARGET.tar.xz, which `tests/fuzz/run` unpacks.

    tests/fuzz/seeds/archive.py add TARGET FILE...      adds seeds, or replaces those of the same names
    tests/fuzz/seeds/archive.py remove TARGET NAME...
    tests/fuzz/seeds/archive.py replace TARGET FOLDER   the files of the folder, and nothing else
    tests/fuzz/seeds/archive.py unpack TARGET FOLDER
    tests/fuzz/seeds/archive.py list [TARGET]

The same seeds give the same bytes: names in order, no times, no owners.
"""
import hashlib
import io
import lzma
import pathlib
import shutil
import sys
import tarfile

HERE = pathlib.Path(__file__).resolve().parent


def path_of(target):
    return HERE / f"{target}.tar.xz"


def targets():
    return sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))


def read(target):
    """The seeds of a fuzzer by name."""
    if not path_of(target).exists():
        return {}
    with tarfile.open(path_of(target)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}


def write(target, seeds):
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(seeds):
            if "/" in name or name.startswith("."):
                sys.exit(f"{name}: not a name for a seed")
            member = tarfile.TarInfo(name)
            member.size = len(seeds[name])
            tar.addfile(member, io.BytesIO(seeds[name]))
    path_of(target).write_bytes(lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def unpack(target, folder):
    """Into `folder`, which holds these seeds alone afterwards; nothing to do if it does already."""
    folder = pathlib.Path(folder)
    stamp = folder.with_name(folder.name + ".digest")
    digest = hashlib.sha256(path_of(target).read_bytes()).hexdigest()
    if folder.is_dir() and stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in read(target).items():
        (folder / name).write_bytes(data)
    stamp.write_text(digest)


def main(words):
    match words:
        case ["add", target, *files] if files:
            write(target, {**read(target), **{pathlib.Path(f).name: pathlib.Path(f).read_bytes() for f in files}})
        case ["remove", target, *names] if names:
            write(target, {name: data for name, data in read(target).items() if name not in names})
        case ["replace", target, folder]:
            write(target, {p.name: p.read_bytes() for p in pathlib.Path(folder).iterdir() if p.is_file()})
        case ["unpack", target, folder]:
            unpack(target, folder)
        case ["list"]:
            for target in targets():
                seeds = read(target)
                print(f"{target:16} {len(seeds):5} seeds {sum(map(len, seeds.values())):8} bytes")
        case ["list", target]:
            for name, data in sorted(read(target).items()):
                print(f"{len(data):6} {name}")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
