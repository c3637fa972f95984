"""Is this machine fit for a run? Each check really does the thing, and says what to do when it fails."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

from profiles.machine import compiler_version, cpus_spread, idle_share

NEEDED_DISK_GIB = 3.0
"""Models, builds, results."""
NEEDED_MEMORY_GIB = 4.0
NOISE_LIMIT = 0.10


@dataclass(frozen=True)
class Check:
    """One check and what it found."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    """What to do; empty when all is well."""
    needed: bool = True
    """False: a run works without it, with less."""


def checks(state: Path, models: Path, *, server_url: str | None = None) -> list[Check]:
    """All checks, in the order in which a run would stumble over them. Never raises for a failed one.

    Args:
        state: the folder that Roofloop keeps its state in (need not exist).
        models: the model cache (need not exist).
        server_url: the Prefect server's API URL, `http://127.0.0.1:4200/api`; None when none is meant to run.
    """
    return [
        python_version(),
        compiler(),
        disk(state, "disk for results"),
        disk(models, "disk for models"),
        memory(),
        noise(),
        model_cache(models),
        server(server_url),
        confinement(),
    ]


def python_version() -> Check:
    """Python 3.11 or newer."""
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check(
        "python", ok, f"Python {version}", "" if ok else "Install Python 3.11 or newer and run `make setup` again."
    )


def compiler(name: str = "g++") -> Check:
    """A C++ compiler that builds a shared library with OpenMP which loads and computes."""
    remedy = "Install one: `apt-get install g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora)."
    if shutil.which(name) is None:
        return Check("compiler", False, f"{name} is not on the PATH.", remedy)
    source = 'extern "C" int roofloop_seven(int n) {\n int s = 0;\n#pragma omp parallel for reduction(+ : s)\n'
    source += " for (int i = 0; i < n; ++i) s += 1;\n return s; }\n"
    try:
        with tempfile.TemporaryDirectory() as folder:
            file, library = Path(folder) / "seven.cpp", Path(folder) / "seven.so"
            file.write_text(source)
            flags = ["-O3", "-std=c++17", "-march=native", "-fopenmp", "-shared", "-fPIC"]
            argv = [name, *flags, "-o", str(library), str(file)]
            start = time.perf_counter()
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                first = next((x for x in done.stderr.splitlines() if "error" in x), f"exit code {done.returncode}")
                return Check("compiler", False, f"{name} does not compile: {first.strip()[:200]}", remedy)
            seconds = time.perf_counter() - start
            seven = ctypes.CDLL(str(library)).roofloop_seven(7)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("compiler", False, f"{name} does not work: {error}", remedy)
    if seven != 7:
        return Check("compiler", False, f"{name} compiles wrong code.", remedy)
    return Check("compiler", True, f"{compiler_version(name)}, a kernel in {seconds:.1f} s")


def disk(folder: Path, name: str = "disk", needed_gib: float = NEEDED_DISK_GIB) -> Check:
    """Free space where `folder` is or would be, and that it can be written."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    remedy = f"Free space on that disk, or work in another folder than {place}."
    if not place.is_dir():
        return Check(name, False, f"{place} is a file.", "Move it away, or work in another folder.")
    free = shutil.disk_usage(place).free / 2**30
    if free < needed_gib:
        return Check(name, False, f"{free:.1f} GiB free at {place}, {needed_gib:g} needed", remedy)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Check(
            name, False, f"{place} cannot be written: {error.strerror}", "Check its permissions, or work elsewhere."
        )
    return Check(name, True, f"{free:.0f} GiB free at {place}")


def memory(needed_gib: float = NEEDED_MEMORY_GIB) -> Check:
    """Memory that is available now."""
    state = psutil.virtual_memory()
    detail = f"{state.available / 2**30:.1f} of {state.total / 2**30:.1f} GiB available"
    if state.available < needed_gib * 2**30:
        return Check(
            "memory", False, f"{detail}, {needed_gib:g} needed", "Close other programs, or take a smaller model."
        )
    return Check("memory", True, detail)


def noise(seconds: float = 1.0) -> Check:
    """How busy the machine is, and whether the same work takes the same time twice."""
    cpus = cpus_spread()
    busy = 1 - idle_share(cpus, seconds / 2)

    def work() -> float:
        start = time.perf_counter()
        sum(range(100_000))
        return time.perf_counter() - start

    a: list[float] = []
    b: list[float] = []
    end = time.perf_counter() + seconds / 2
    while time.perf_counter() < end or len(a) < 5:
        a.append(work())
        b.append(work())
    spread = abs(statistics.median(a) / statistics.median(b) - 1)
    quarters = statistics.quantiles(a + b, n=4)
    unsteady = (quarters[2] - quarters[0]) / quarters[1]
    load = psutil.getloadavg()[0]
    detail = f"CPUs {busy:.0%} busy, load {load:.1f}, the same work differs by {max(spread, unsteady):.1%}"
    ok = busy <= NOISE_LIMIT and spread <= NOISE_LIMIT and unsteady <= 2 * NOISE_LIMIT
    remedy = "Stop other programs: on a busy machine nothing can be proved, and gains stay unconfirmed."
    return Check("noise", ok, detail, "" if ok else remedy, needed=False)


def server(url: str | None) -> Check:
    """The Prefect server answers."""
    if url is None:
        return Check("server", True, "none is running; a run starts its own", needed=False)
    remedy = "Start it with `make serve`, or unset PREFECT_API_URL and a run starts its own."
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/health", timeout=5) as answer:
            healthy = answer.status == 200 and json.loads(answer.read()) is True
    except (OSError, ValueError, urllib.error.URLError) as error:
        return Check("server", False, f"{url} does not answer: {error}", remedy)
    if not healthy:
        return Check("server", False, f"{url} answers, but it is not a healthy Prefect server.", remedy)
    return Check("server", True, f"Prefect answers at {url}")


def model_cache(models: Path) -> Check:
    """Which models are there already; none is fine, it only takes a download."""
    found = sorted({p.parent.name for p in models.glob("*/config.json")}) if models.is_dir() else []
    broken = [name for name in found if not any((models / name).glob("*.safetensors"))]
    if broken:
        return Check(
            "models", False, f"no weights in {', '.join(broken)}", f"Delete {models / broken[0]}; a run makes it anew."
        )
    detail = f"{len(found)} in {models}" if found else f"none yet in {models}; a run downloads 93 MB and takes a minute"
    return Check("models", True, detail)


PROBE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from kernels.ruler import sandbox
policy = sandbox.Policy()
failed = sandbox.split(policy)
child = os.fork()
if child == 0:
    sandbox.die_with_parent()
    lacking = failed + sandbox.enter(policy, not failed)
    os.write(1, json.dumps([sandbox.level_reached(policy, lacking), lacking]).encode())
    os._exit(0)
os.waitpid(child, 0)
"""


def confinement() -> Check:
    """How well a candidate kernel can be confined here: the ruler's own sandbox, entered by a child."""
    root = str(Path(__file__).resolve().parents[1])
    argv = [sys.executable, "-I", "-B", "-c", PROBE, root]
    level, lacking = "unknown", ["the probe gave no answer"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        lacking = done.stderr.strip().splitlines()[-1:] or lacking
        level, lacking = json.loads(done.stdout)
    detail = f"level '{level}'" + (f"; lacking: {', '.join(lacking)}" if lacking else "")
    if level == "full":
        return Check("confinement", True, detail, needed=False)
    remedy = (
        "Use a newer kernel with Landlock and user namespaces, or a container with CAP_SYS_ADMIN; until then keep "
        f'confinement = "{level if level in ("process", "sandbox") else "process"}" in the workload.'
    )
    return Check("confinement", False, detail, remedy, needed=False)
