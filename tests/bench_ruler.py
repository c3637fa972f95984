"""What the ruler is worth, in figures: `make bench-ruler`, or `python tests/bench_ruler.py [PART …] [--scale 0.1]`.

Parts: same (A/A), faster (a candidate truly 5 % faster), neighbour (A/A beside a busy process), rate, many (500
verdicts in a row), bugs (planted ones, and what the classic check finds of them), cheats (the adversarial set).
"""

import argparse
import ctypes
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
from ruler_problems import candidate  # noqa: E402
from test_ruler import FAST_SILU, SMALL, alive, leftovers, rulers_children  # noqa: E402
from test_ruler_adversarial import EVIDENCE, FOLDER, GAIN, MANIFEST  # noqa: E402
from test_ruler_mutations import BUGS, planted, verdict_of  # noqa: E402

from kernels.ruler import build as building  # noqa: E402
from kernels.ruler import judge as judging  # noqa: E402
from kernels.ruler.spec import Candidate  # noqa: E402

BUILDS = Path(tempfile.mkdtemp(prefix="bench-ruler-"))
DELAY = """#include <cmath>
#include <cstdint>
extern "C" void run_silu_mul(const float* x, const float* y, float* o, int64_t n) {
  for (int64_t i = 0; i < n; ++i) o[i] = x[i] / (1.f + std::exp(-x[i])) * y[i];
  volatile float keep; float v = 1.f;
  for (int i = 0; i < TURNS; ++i) v = v * 0.9999f + 0.5f;
  keep = v; (void)keep;
}
"""


def run(problem, source, *, language="torch", **options):
    entry = "run" if language != "cpp" else f"run_{problem.operator}"
    defaults = {"mode": "screen", "ceilings": None, "threads": 1, "builds": BUILDS, "budget_s": 0.8}
    return judging.judge(problem, Candidate(language, source, entry), **(defaults | options))


def upper95(hits, n):
    """Upper 95 % bound of a proportion (Clopper–Pearson by bisection)."""

    def at_most(p):
        return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(hits + 1))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(middle) > 0.05 else (low, middle)
    return high


def same(n, **options):
    """Candidate identical to the baseline."""
    estimates, called, unresolved = [], 0, 0
    for number in range(n):
        problem = dataclasses.replace(list(SMALL.values())[number % 4], vendor=None)
        verdict = run(problem, problem.reference, **options)
        unresolved += verdict.status == "unresolved"
        called += bool(verdict.faster)
        if verdict.speedup:
            estimates.append(verdict.speedup.estimate)
    return {
        "runs": n, "called_faster": called, "upper_95": round(upper95(called, n), 4), "unresolved": unresolved,
        "estimates_5_50_95": np.quantile(estimates, [0.05, 0.5, 0.95]).round(4).tolist(),
    }  # fmt: skip


def plainly(problem, source):
    """Least seconds of one call, in this process and by its own clock: the truth to compare with."""
    library = ctypes.CDLL(str(building.build(Candidate("cpp", source, "run_silu_mul"), problem, BUILDS).path))
    size = math.prod(problem.visible[0].values())
    x, y, o = (np.random.randn(size).astype(np.float32) for _ in range(3))
    given = [ctypes.c_void_p(v.ctypes.data) for v in (x, y, o)]
    times = []
    for _ in range(300):
        began = time.perf_counter()
        library.run_silu_mul(*given, ctypes.c_int64(size))
        times.append(time.perf_counter() - began)
    return float(np.quantile(times, 0.1))


def faster(n):
    """A baseline with a calibrated delay that makes the candidate truly 5 % faster."""
    problem = SMALL["silu_mul"]
    found, covered, resolved, estimates = 0, 0, 0, []
    turns = 1_000_000
    slow = Candidate("cpp", DELAY.replace("TURNS", str(int(turns * 1.05))), "run_silu_mul")
    truth = plainly(problem, slow.source) / plainly(problem, DELAY.replace("TURNS", str(turns)))
    for _ in range(n):
        verdict = run(
            problem, DELAY.replace("TURNS", str(turns)), language="cpp", baseline=slow, mode="confirm", budget_s=3.0
        )
        if verdict.status == "unresolved":
            continue
        resolved += 1
        found += bool(verdict.faster)
        covered += verdict.speedup.low <= truth <= verdict.speedup.high
        estimates.append(verdict.speedup.estimate)
    return {
        "runs": n, "truth": round(truth, 4), "resolved": resolved, "called_faster": found, "interval_covers": covered,
        "estimates_5_50_95": np.quantile(estimates or [0], [0.05, 0.5, 0.95]).round(4).tolist(),
    }  # fmt: skip


def neighbour(n):
    """A/A while another process keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            return same(n)
        finally:
            busy.kill()


def rate(n):
    """Verdicts a minute, build included: every candidate is new."""
    figures = {}
    for mode, count in (("screen", n), ("confirm", max(n // 4, 2))):
        began = time.monotonic()
        for number in range(count):
            run(SMALL["silu_mul"], FAST_SILU + f"// {mode} {number}\n", language="cpp", mode=mode, budget_s=0.8)
        figures[f"{mode}_per_minute"] = round(60 * count / (time.monotonic() - began), 1)
    return figures


def many(n):
    """Candidates in a row: what is left of them."""

    def state():
        ruler = judging._running[0].process.pid
        rss = int(Path(f"/proc/{ruler}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(os.listdir(f"/proc/{ruler}/fd")), len(alive(rulers_children(ruler))), rss >> 20

    sources = ["def run(x):\n    return x\n", "import os\ndef run(x):\n    os._exit(1)\n", SMALL["softmax"].reference]
    for number in range(min(n, 20)):
        run(SMALL["softmax"], sources[number % 3], budget_s=0.1)
    before, began = state(), time.monotonic()
    for number in range(n):
        run(SMALL["softmax"], sources[number % 3], budget_s=0.1)
    return {
        "verdicts": n, "seconds": round(time.monotonic() - began), "before_fds_processes_mib": before,
        "after_fds_processes_mib": state(), "cgroups_and_shm": len(leftovers()),
        "temporary_files": len([p for p in BUILDS.iterdir() if p.is_dir()]),
    }  # fmt: skip


def bugs(_):
    """Planted bugs found by the ruler, and by one shape with uniform inputs and allclose at 1e-2."""
    ruler = classic = 0
    for bug in BUGS:
        operator, what = planted(bug)
        ruler += verdict_of(operator, what, BUILDS).status in ("incorrect", "void", "crashed")
        # In a process of its own: some of these write where they should not.
        code = (
            f"import sys; sys.path[:0]={sys.path[:2]!r}\nfrom pathlib import Path\n"
            f"from test_ruler_mutations import *\nbug = next(b for b in BUGS if b[:2] == {bug[:2]!r})\n"
            f"sys.exit(not classic_finds(*planted(bug), Path({str(BUILDS)!r})))"
        )
        classic += subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode != 1
    return {"planted": len(BUGS), "found": ruler, "classic_check_finds": classic}


def cheats(_):
    """The adversarial set."""
    counts = {"judged": 0, "got_through": [], "escaped": [], "honest_refused": [], "largest_gain": 0.0}
    shutil.rmtree(EVIDENCE, ignore_errors=True)
    EVIDENCE.mkdir(parents=True)
    for entry in MANIFEST:
        if entry["requires"] == "cuda":
            continue
        problem, what = candidate(FOLDER / entry["file"])
        verdict = judging.judge(problem, what, mode="screen", ceilings=None, threads=1, builds=BUILDS, budget_s=1.0)
        counts["judged"] += 1
        passed, expect = verdict.status in ("valid", "unresolved"), entry["strict_expect"] or entry["expect"]
        gain = verdict.speedup.low if verdict.status == "valid" else 0.0
        if expect == "accept":
            counts["honest_refused"] += [] if passed else [entry["name"]]
            continue
        counts["largest_gain"] = round(max(counts["largest_gain"], gain), 3)
        counts["got_through"] += [entry["name"]] if gain > GAIN or (expect == "reject" and passed) else []
        counts["escaped"] += [entry["name"]] if list(EVIDENCE.iterdir()) else []
        for marker in EVIDENCE.iterdir():
            marker.unlink()
    shutil.rmtree(EVIDENCE.parent, ignore_errors=True)
    return counts


PARTS = {
    "same": (same, 300), "faster": (faster, 40), "neighbour": (neighbour, 40), "rate": (rate, 20), "many": (many, 500),
    "bugs": (bugs, 1), "cheats": (cheats, 1),
}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of runs")
    given = parser.parse_args()
    try:
        for part in given.parts or PARTS:
            measure, full = PARTS[part]
            print(json.dumps({part: measure(max(int(full * given.scale), 4))}), flush=True)
    finally:
        judging.close()
        shutil.rmtree(BUILDS, ignore_errors=True)
