"""Source → shared library, inside the sandbox, with flags that the ruler fixes. The only compile path there is."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernels.ruler import sandbox
from kernels.ruler.spec import Candidate, Problem

FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-lto", "-Wno-unknown-pragmas")
# Linked in a second step without -fopenmp, which would add libgomp. The process that loads the library already has one
# (torch's, loaded globally), which then serves GOMP_*: two thread pools in one process slow each other to a crawl.
LINK_FLAGS = ("-shared", "-Wl,--build-id=none", "-Wl,-s")
RUN_COMMAND = 3  # `worker.RUN`
COMPILE_S, COMPILE_BYTES, LIBRARY_BYTES = 60.0, 3 << 30, 64 << 20


class BuildFailed(Exception):
    """The compiler refused the source, took too long, or the library lacks the entry point.

    `message` is the compiler's own output, cut: it speaks of the candidate's source only, so an agent may see it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NoCompiler(Exception):
    """There is no C++ compiler on this machine."""


@dataclass(frozen=True)
class Built:
    """A built candidate. `path` is the shared library, or for Python languages the source file."""

    path: Path
    seconds: float
    """Wall seconds of this build; 0.0 when it was there already."""
    compiler: str
    flags: tuple[str, ...]


@lru_cache(maxsize=1)
def compiler() -> tuple[str, str]:
    """(path, version line) of the C++ compiler.

    Raises:
        NoCompiler: neither g++ nor clang++ is on the system path.
    """
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            line = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            return path, line.splitlines()[0] if line else name
    raise NoCompiler("no C++ compiler (g++ or clang++) was found; install one, on Debian: apt install g++")


def build(candidate: Candidate, problem: Problem, builds: Path) -> Built:
    """Build a candidate for `problem` into the folder `builds`, or return what was built before.

    Python languages are only checked for syntax. The artefact's name is the hash of source, flags, compiler and CPU.

    Raises:
        BuildFailed: the candidate's fault.
        NoCompiler: the machine's fault.
    """
    if candidate.language in ("torch", "triton"):
        return _python(candidate, builds)
    if candidate.language != "cpp":
        raise BuildFailed(f"unknown language {candidate.language!r}: cpp, torch or triton")
    entries = [candidate.entry]
    if candidate.prepares:
        entries += [f"prepare_{problem.operator}", f"prepare_{problem.operator}_bytes"]
    return compile_library(candidate.source, entries, builds)


def compile_library(source: str, entries: list[str], builds: Path, *, trusted: bool = False) -> Built:
    """Compile C++ into a shared library that exports `entries`; `trusted` source (the ruler's own) needs no sandbox.

    Raises:
        BuildFailed, NoCompiler: as `build`.
    """
    program, version = compiler()
    key = hashlib.sha256(json.dumps([source, FLAGS, LINK_FLAGS, version, _cpu()]).encode()).hexdigest()
    builds.mkdir(parents=True, exist_ok=True)
    target = builds / f"{key}.so"
    if target.exists():
        _check_symbols(target, entries)
        return Built(target, 0.0, version, FLAGS)
    began = time.monotonic()
    work = builds / f"{key}.{os.getpid()}.{time.monotonic_ns()}"
    work.mkdir(mode=0o700)
    try:
        # The folder locks itself against a sweep of what killed builds left (see `sweep`).
        lock = os.open(work, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)
        (work / "candidate.cpp").write_text(source)
        out = work / "out"
        out.mkdir()
        object_file, shared = str(out / "candidate.o"), str(out / "candidate.so")
        steps = (
            [*FLAGS, "-c", str(work / "candidate.cpp"), "-o", object_file],
            [*LINK_FLAGS, object_file, "-o", shared],
        )
        argv = ["/bin/sh", "-c", " && ".join(shlex.join([program, *step]) for step in steps)]
        policy = sandbox.Policy(
            read=(str(work / "candidate.cpp"),), write=(str(out),), memory_bytes=COMPILE_BYTES, tmp_bytes=256 << 20,
            pids=64, cpu_s=int(COMPILE_S), level="none" if trusted else "full",
        )  # fmt: skip
        done = sandbox.run(argv, policy, timeout_s=COMPILE_S)
        message = done.output.replace(str(work) + "/", "").replace(str(out) + "/", "")[:4000]
        if done.timed_out:
            raise BuildFailed(f"the compiler ran for more than {COMPILE_S:.0f} s and was stopped")
        library = out / "candidate.so"
        if done.code != 0 or library.is_symlink() or not library.is_file():
            raise BuildFailed(message or f"the compiler ended with code {done.code} and no message")
        if library.stat().st_size > LIBRARY_BYTES:
            raise BuildFailed(f"the library is larger than {LIBRARY_BYTES >> 20} MiB")
        _check_symbols(library, entries)
        library.chmod(0o444)
        library.replace(target)
        os.close(lock)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Built(target, time.monotonic() - began, version, FLAGS)


def loop_source(problem: Problem, prepares: bool) -> str:
    """C++ that answers a worker's RUN commands for a native function without a return to Python.

    The interpreter costs more than a short kernel, above all when the ruler has just had the caches. `noop` has the
    candidate's signature: its runs measure what the ruler itself costs.
    """
    types, calls, pointers, numbers = [], [], 0, 0
    packed = not prepares
    for tensor in problem.inputs:
        if tensor.shape is None:
            types.append("int64_t" if "int" in tensor.dtype else "float")
            calls.append(f"({types[-1]})s[{numbers}]")
            numbers += 1
        elif not (tensor.constant and prepares and packed):
            packed |= tensor.constant
            types.append("const void*")
            calls.append(f"p[{pointers}]")
            pointers += 1
    for _ in problem.outputs:
        types.append("void*")
        calls.append(f"p[{pointers}]")
        pointers += 1
    for position in range(len(problem.c_axes or problem.axes)):
        types.append("int64_t")
        calls.append(f"a[{position}]")
    signature = ", ".join(types)
    return f"""#include <cerrno>
#include <cstdint>
#include <cstring>
#include <unistd.h>
extern "C" void noop({signature}) {{}}
extern "C" void serve(int go, int reply, unsigned char* head, void (*f)({signature}), void** table, const double* s,
                      const int64_t* a) {{
  for (;;) {{
    for (int64_t have = 0; have < 8;) {{
      ssize_t got = read(go, head + have, 8 - have);
      if (got == 0 || (got < 0 && errno != EINTR)) _exit(0);
      have += got > 0 ? got : 0;
    }}
    uint16_t first;
    uint32_t count;
    memcpy(&first, head + 2, 2);
    memcpy(&count, head + 4, 4);
    if (head[0] != {RUN_COMMAND} || head[1] != 0) return;
    void** p = table + first * int64_t({pointers});
    for (uint32_t i = 0; i < count; ++i, p += {pointers}) f({", ".join(calls)});
    if (write(reply, "K", 1) != 1) _exit(0);
  }}
}}
"""


def undefined_symbols(library: Path) -> set[str]:
    """Names that a library takes from elsewhere (evidence of provenance, no proof)."""
    return _symbols(library, undefined=True)


def sweep(builds: Path) -> int:
    """Remove the folders of builds that were killed half-way; returns how many."""
    removed = 0
    for folder in builds.glob("*.*.*") if builds.exists() else ():
        if folder.is_dir():
            try:
                fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)
            removed += 1
    return removed


def _python(candidate: Candidate, builds: Path) -> Built:
    try:
        compile(candidate.source, "candidate.py", "exec")
    except (SyntaxError, ValueError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        raise BuildFailed(f"the source is not valid Python{where}: {error}") from error
    key = hashlib.sha256(candidate.source.encode(errors="surrogatepass")).hexdigest()
    builds.mkdir(parents=True, exist_ok=True)
    path = builds / f"{key}.py"
    if not path.exists():
        draft = builds / f"{key}.py.{os.getpid()}.{time.monotonic_ns()}"
        draft.write_text(candidate.source)
        draft.replace(path)
    return Built(path, 0.0, f"Python {platform.python_version()}", ())


def _check_symbols(library: Path, entries: list[str]) -> None:
    missing = [name for name in entries if name not in _symbols(library, undefined=False)]
    if missing:
        raise BuildFailed(
            f'the library does not export {", ".join(missing)}: declare it extern "C" and give it that exact name'
        )


def _symbols(library: Path, *, undefined: bool) -> set[str]:
    """Names in the dynamic symbol table, read without running or loading anything of the library."""
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return _nm(library, undefined)
    sections = int.from_bytes(data[0x28:0x30], "little")
    size, count = int.from_bytes(data[0x3A:0x3C], "little"), int.from_bytes(data[0x3C:0x3E], "little")

    def field(at: int, length: int) -> int:
        return int.from_bytes(data[at : at + length], "little")

    names: set[str] = set()
    for section in range(sections, sections + size * count, size):
        if field(section + 4, 4) != 11:  # SHT_DYNSYM
            continue
        strings = field(sections + size * field(section + 0x28, 4) + 0x18, 8)
        start, length = field(section + 0x18, 8), field(section + 0x20, 8)
        for symbol in range(start, min(start + length, len(data) - 23), 24):
            if (field(symbol + 6, 2) == 0) == undefined:
                at = strings + field(symbol, 4)
                names.add(data[at : data.find(b"\0", at)].decode(errors="replace"))
    return names - {""}


def _nm(library: Path, undefined: bool) -> set[str]:
    flag = "-u" if undefined else "-U"
    text = subprocess.run(["nm", "-g", flag, str(library)], capture_output=True, text=True, check=False).stdout
    return {re.sub(r"^_", "", line.split()[-1]) for line in text.splitlines() if line.split()}


@lru_cache(maxsize=1)
def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "|".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )
