"""The ceilings of this machine: measured once per hardware fingerprint, kept, and not believed when it was noisy.

A ceiling is what physics allows, so it must be the best that anything reaches: a plain copy in torch shows a fifth less
bandwidth than a good kernel reads with, and would call that kernel impossible. Many kernels therefore compete in
`profiles.probe`, and the upper decile of the best one counts.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kernels.errors import InputError
from profiles.machine import compiler_version, cpu_name
from profiles.machine import fingerprint as _machine_fingerprint
from profiles.target import Bandwidth, Flops, Target

SOURCE = Path(__file__).with_name("ceilings.cpp")
CAP_S = 20.0
"""Seconds for all attempts together, without compiling and starting the child."""


def fingerprint() -> str:
    """Which machine these ceilings belong to: 16 hex digits, see `profiles.machine.fingerprint`."""
    return _machine_fingerprint()


def measure_target(
    cache: Path, *, force: bool = False, progress: Callable[[str], None] | None = None, cap_s: float = CAP_S
) -> Target:
    """Give this machine as a Target, from `cache` when it was measured there before.

    Args:
        cache: folder for the results, one JSON file per fingerprint, and for the compiled kernels.
        force: measure even if there is a result.
        progress: called with a short line of text at each step, at last with the ceilings.
        cap_s: seconds for measuring, without compiling and starting the child; less means fewer repeats.

    Returns:
        A target with origin `measured`. With `noisy` set it was measured on a busy machine, `noise` says why, it is not
        kept, and no floor may be computed from it.

    Raises:
        InputError: no working C++ compiler, or no space in `cache`.
    """
    say = progress or (lambda text: None)
    file = cache / f"{fingerprint()}-{_source_hash()}.json"
    known = _cached(file)
    if known is not None and not force:
        return known
    say("compiling the measuring kernels")
    library = _compile(cache)
    target = _target(_run_probe(library, say, cap_s))
    if known is not None:
        # Ceilings never fall: what this machine reached once, it can reach again.
        target = _higher(target, known)
    if not target.noisy:
        _write(file, target.model_dump_json(indent=1))
    say(summary(target))
    return target


def summary(target: Target) -> str:
    """The ceilings at the highest thread count in one line, for people."""
    threads = max(f.threads for f in target.flops)
    levels = [f"{b.level} {b.read_gbps:,.0f}" for b in target.bandwidths if b.threads == threads]
    rates = [f"{f.dtype} {f.gflops:,.0f}" for f in target.flops if f.threads == threads]
    text = f"{target.device}, {threads} threads: reads {', '.join(levels)} GB/s; {', '.join(rates)} GFLOP/s"
    return f"{text} (not trusted: {target.noise})" if target.noisy else text


def _target(result: dict[str, Any]) -> Target:
    """The record made of what the probe found."""
    return Target(
        name="auto",
        kind="cpu",
        device=cpu_name(),
        origin="measured",
        fingerprint=fingerprint(),
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        bandwidths=tuple(Bandwidth(**row) for row in result["bandwidths"]),
        flops=tuple(Flops(**row) for row in result["flops"]),
        call_overhead_us=result["call_overhead_us"],
        sources={
            "bandwidths": f"measured: best of the kernels in {SOURCE.name} and of torch, upper decile",
            "flops": "measured: best of torch.matmul and a register-blocked loop, upper decile",
            "compiler": compiler_version(),
        },
        noisy=bool(result["noise"]),
        noise=result["noise"],
    )


def _higher(new: Target, old: Target) -> Target:
    """`new` with each ceiling at least as high as in `old`."""
    before = {(b.level, b.threads): b for b in old.bandwidths}
    before_flops = {(f.dtype, f.threads): f for f in old.flops}

    def best(a: Any, b: Any | None, keys: tuple[str, ...]) -> Any:
        if b is None:
            return a
        return a.model_copy(update={key: max(getattr(a, key) or 0, getattr(b, key) or 0) or None for key in keys})

    ways = ("read_gbps", "write_gbps", "copy_gbps")
    return new.model_copy(
        update={
            "bandwidths": tuple(best(b, before.get((b.level, b.threads)), ways) for b in new.bandwidths),
            "flops": tuple(best(f, before_flops.get((f.dtype, f.threads)), ("gflops",)) for f in new.flops),
        }
    )


def _cached(file: Path) -> Target | None:
    """The trusted target in `file`; None when there is none, it cannot be read, or it is of another format."""
    try:
        target = Target.model_validate_json(file.read_text())
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    return None if target.noisy else target


def _source_hash() -> str:
    """Ceilings of other measuring code are not reused."""
    return hashlib.sha256(SOURCE.read_bytes() + SOURCE.with_name("probe.py").read_bytes()).hexdigest()[:8]


def _compile(cache: Path) -> Path:
    """The compiled kernels in `cache`, built on first use.

    The name carries the fingerprint: -march=native code of one machine may not run on another that shares the folder.
    """
    library = cache / f"ceilings-{fingerprint()}-{_source_hash()}.so"
    if library.is_file():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        raise InputError(
            "there is no C++ compiler (g++).", remedy="Install one, for example `apt-get install g++`.", key="g++"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / "ceilings.so"
            flags = ["-O3", "-std=c++17", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread"]
            done = subprocess.run(
                [compiler, *flags, "-o", str(built), str(SOURCE)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise InputError(
                    f"the C++ compiler failed: {first.strip()}",
                    remedy="Check that g++ 9 or newer with its headers is installed.",
                    key="g++",
                )
            os.replace(built, library)
    except OSError as error:
        raise InputError(
            f"cannot write there: {error.strerror}.", remedy="Free some space or check the permissions.", file=cache
        ) from None
    return library


def _run_probe(library: Path, say: Callable[[str], None], cap_s: float) -> dict[str, Any]:
    """Start the measuring child and wait for its result.

    Raises:
        RuntimeError: it crashed, or took much longer than it may.
    """
    root = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"):  # thread counts are the probe's own business
        env.pop(name, None)
    config = json.dumps({"library": str(library.resolve()), "cap_s": cap_s})
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "profiles.probe", config], stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        )
        watchdog = threading.Timer(cap_s * 2 + 20, child.kill)
        watchdog.start()
        result = None
        try:
            assert child.stdout is not None
            for line in child.stdout:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if "progress" in message:
                        say(message["progress"])
                    result = message.get("result", result)
            child.wait()
        finally:
            watchdog.cancel()
            if child.poll() is None:
                child.kill()
                child.wait()
        if result is None:
            errors.seek(0)
            tail = errors.read().strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
            raise RuntimeError(f"measuring this machine failed: {tail[0]}")
    return result


def _write(file: Path, text: str) -> None:
    """Write by way of a rename, so that a reader never sees half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(text)
        os.replace(partial, file)
    except OSError as error:
        raise InputError(
            f"cannot write there: {error.strerror}.",
            remedy="Free some space or check the permissions.",
            file=file.parent,
        ) from None
