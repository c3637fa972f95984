"""The judge: one candidate against the best baseline, checked at every timed call.

`judge` hands the work to a ruler process (`python -I -B`, own session, not dumpable, on one core with the worker) that
belongs to the calling process and ends with it; there `judge_here` does it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from kernels.errors import InputError
from kernels.ruler import cgroup, sandbox
from kernels.ruler.floor import Ceilings
from kernels.ruler.lease import device_lease
from kernels.ruler.spec import DTYPES, Candidate, Problem
from kernels.ruler.verdict import Mode, Verdict

COMPILE_FROM_S = 8.0
"""Budget from which a confirming verdict tries torch.compile as a baseline (half a minute the first time)."""
THRESHOLD = 1.02
"""What a speed-up's lower bound must exceed where this ruler has made no A/A measurement yet."""


def judge(
    problem: Problem, candidate: Candidate, *, mode: Mode, ceilings: Ceilings | None, threads: int, builds: Path,
    budget_s: float, seed: bytes | None = None, confinement: str = "best", baseline: Candidate | None = None,
    cache_state: str = "warm", alpha: float = 0.05, thorough: bool = True, device: str = "cpu",
) -> Verdict:  # fmt: skip
    """Judge a candidate; calls from several threads take turns.

    Args:
        problem: what is to be computed; see `kernels.ruler.spec`.
        candidate: the source that claims to do so.
        mode: `screen` (the first visible shape, few pairs) or `confirm` (all visible shapes, all regimes, more pairs,
            A/A beside it, torch.compile among the baselines).
        ceilings: of this machine, for the floor; None: no floor is enforced, and `floor_fraction` is None.
        threads: cores that either side may use.
        builds: folder of built artefacts.
        budget_s: seconds after which measuring stops with what there is (building and first calls have own limits).
        seed: secret for the inputs, drawn when None. Give one only to reproduce.
        confinement: `best`, or the level that must be reached: `process`, `sandbox`, `full` (or `none`).
        baseline: what to compare with instead of the best of eager, vendor's fused operator and torch.compile.
        cache_state: `warm` or `cold`, the same for both sides.
        alpha: level of the interval; see `stats.alpha_of_try` for a campaign's confirmations.
        thorough: check every shape and regime. Without, a screen checks the first visible shape and one hidden case:
            enough to choose what is confirmed, and never for anything else. Confirming is always thorough.
        device: where both sides compute: `cpu`, or `cuda:0` and the like for candidates in Python on an accelerator.

    Raises:
        InputError: the problem itself is unfit, or the machine lacks what judging needs.
        RuntimeError: the ruler process could not start or died.
    """
    check_arguments(problem, mode, confinement, cache_state, threads)
    request = {
        "problem": problem, "candidate": candidate, "mode": mode, "ceilings": ceilings, "threads": threads,
        "builds": Path(builds).resolve(), "budget_s": budget_s, "seed": seed, "confinement": confinement,
        "baseline": baseline, "cache_state": cache_state, "alpha": alpha,
        "thorough": thorough or mode == "confirm", "device": device,
    }  # fmt: skip
    return _ruler().ask(request, patience_s=budget_s + 600)


class _Ruler:
    """The ruler process of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        ours, theirs = Pipe()
        self.connection = ours
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-B", __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            start_new_session=True, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath), "OMP_WAIT_POLICY": "PASSIVE", "HOME": "/nonexistent"},
        )  # fmt: skip
        theirs.close()

    def ask(self, request: dict[str, Any], patience_s: float) -> Verdict:
        """Have it judge; on any interruption it is ended, and everything of it."""
        with self.lock:
            try:
                self.connection.send(request)
                if not self.connection.poll(patience_s):
                    raise RuntimeError("the ruler process did not answer in time and was ended")
                answer = self.connection.recv()
            except BaseException as error:
                self.end()
                if isinstance(error, (EOFError, ConnectionError)):
                    raise RuntimeError("the ruler process died while it judged; the verdict is lost") from error
                raise
        if "refused" in answer:
            raise InputError(answer["refused"], **answer["with"])
        if "failed" in answer:
            raise RuntimeError(f"the ruler failed: {answer['failed']}")
        return Verdict.from_json(answer)

    def end(self) -> None:
        """Kill it; supervisors and templates end when its pipes close."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


_running: list[_Ruler] = []
_start = threading.Lock()


def _ruler() -> _Ruler:
    with _start:
        if not _running or _running[0].owner != os.getpid() or _running[0].process.poll() is not None:
            _running[:] = [_Ruler()]
        return _running[0]


def close() -> None:
    """End this process's ruler (it also ends by itself when this process does)."""
    with _start:
        while _running:
            ruler = _running.pop()
            if ruler.owner == os.getpid():
                ruler.end()


def check_arguments(problem: Problem, mode: str, confinement: str, cache_state: str, threads: int) -> None:
    """Refuse what cannot be judged. Raises InputError."""

    def refuse(key: str, text: str, remedy: str) -> None:
        raise InputError(text, remedy=remedy, file=problem.name, key=key)

    from kernels.ruler.inputs import REGIMES

    if mode not in ("screen", "confirm"):
        refuse("mode", f"{mode!r} is not a mode.", "Use screen or confirm.")
    if confinement not in ("best", *sandbox.LEVELS):
        refuse("confinement", f"{confinement!r} is not a level.", f"Use best, {', '.join(sandbox.LEVELS)}.")
    if cache_state not in ("warm", "cold"):
        refuse("cache_state", f"{cache_state!r} is not a cache state.", "Use warm or cold.")
    if not 1 <= threads <= (os.cpu_count() or 1):
        refuse("threads", f"{threads} threads do not fit this machine.", f"Use 1 to {os.cpu_count()}.")
    if not problem.visible or not problem.outputs:
        refuse("visible", "The problem has no shape or no output.", "Give at least one of each.")
    if not problem.reference.strip():
        refuse("reference", "The problem has no reference.", "Give Python source that defines run(*inputs).")
    for tensor in (*problem.inputs, *problem.outputs):
        if tensor.dtype not in DTYPES:
            refuse(tensor.name, f"{tensor.dtype!r} is not a dtype.", f"Use one of {', '.join(DTYPES)}.")
    for regime in problem.regimes:
        if regime not in REGIMES:
            refuse("regimes", f"{regime!r} is not a regime.", f"Use some of {', '.join(REGIMES)}.")


# --- in the ruler process ------------------------------------------------------------------------------------------


class Bench:
    """What the ruler process keeps between verdicts: templates, problems that passed their tests, A/A results."""

    def __init__(self) -> None:
        self.templates: dict[int, Any] = {}
        self.tested: set[str] = set()
        self.same: list[float] = []

    def template(self, threads: int) -> Any:
        """The template process for a thread count."""
        from kernels.ruler import handle

        found = self.templates.get(threads)
        if found is None or found.process.poll() is not None:
            found = self.templates[threads] = handle.Template(threads)
        return found

    @property
    def threshold(self) -> float:
        """1 + the largest distance from 1 among the last A/A estimates, at least 1 %, at most 10 %."""
        if len(self.same) < 3:
            return THRESHOLD
        return 1 + min(max(0.01, *(abs(value - 1) for value in self.same[-60:])), 0.10)


def judge_here(
    bench: Bench, *, problem: Problem, candidate: Candidate, mode: Mode, ceilings: Ceilings | None, threads: int,
    builds: Path, budget_s: float, seed: bytes | None, confinement: str, baseline: Candidate | None, cache_state: str,
    alpha: float, thorough: bool, device: str,
) -> Verdict:  # fmt: skip
    """`judge`, in the ruler's own process."""
    from kernels.ruler import build as building
    from kernels.ruler import handle, pretest
    from kernels.ruler.session import Session
    from kernels.ruler.workers import Terms

    began = time.monotonic()
    frame: dict[str, Any] = {
        "mode": mode, "problem": problem.name, "problem_id": problem.id, "candidate_id": candidate.id,
        "versions": versions(), "cache_state": cache_state,
    }  # fmt: skip
    session: Session | None = None
    _check_device(device, cache_state, candidate, baseline)
    try:
        if problem.id not in bench.tested:
            pretest.check(problem)
            bench.tested.add(problem.id)
        built = building.build(candidate, problem, builds)
        terms = Terms(
            problem, candidate, built, baseline, builds, threads, confinement, seed or secrets.token_bytes(32),
            confirm=mode == "confirm", cold=cache_state == "cold", alpha=alpha, threshold=bench.threshold,
            compiled=mode == "confirm" and baseline is None and budget_s >= COMPILE_FROM_S, thorough=thorough,
            device=device,
        )  # fmt: skip
        template = bench.template(threads)
        with device_lease(Path(tempfile.gettempdir()) / f"roofloop-{os.getuid()}", device):
            session = Session(terms, template)
            frame |= _measure(bench, session, ceilings, time.monotonic() + budget_s)
    except building.BuildFailed as error:
        frame |= {"status": "build_failed", "reason": error.message}
    except building.NoCompiler as error:
        raise InputError("A C++ candidate needs a compiler, and none was found.", remedy=str(error)) from error
    except handle.WorkerFailed as error:
        frame |= {"status": error.status, "reason": error.reason, "law": error.law}
        frame |= session.account() if session is not None else {}
    finally:
        if session is not None:
            session.close()
    return Verdict(**frame, duration_s=round(time.monotonic() - began, 4))


def _check_device(device: str, cache_state: str, candidate: Candidate, baseline: Candidate | None) -> None:
    """Raises InputError where there is no such device, or it cannot be judged there."""
    if device == "cpu":
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device not in {f"cuda:{i}" for i in range(count)}:
        has = f"cuda:0 to cuda:{count - 1}" if count else "no accelerator that torch can use"
        raise InputError(f"There is no device {device!r} here.", remedy=f"This machine has {has}.", key="device")
    if cache_state == "cold":
        raise InputError("Only the CPU's caches can be emptied.", remedy="Use warm caches.", key="cache_state")
    for what in (candidate, baseline):
        if what is not None and what.language == "cpp":
            raise InputError("A C++ candidate computes on the CPU.", remedy="Use device cpu.", key="device")


def _measure(bench: Bench, session: Any, ceilings: Ceilings | None, end: float) -> dict[str, Any]:
    """Check, time, check what is hidden, conclude: a verdict's fields."""
    import numpy as np

    from kernels.ruler import provenance, stats
    from kernels.ruler.session import SESSIONS
    from kernels.ruler.timing import conclude

    terms = session.terms
    session.check_visible()
    shapes = terms.problem.visible[: None if terms.confirm else 1]
    timed = [session.choose(dict(shape)) for shape in shapes]
    left = SESSIONS[session.mode] * len(shapes)
    for _ in range(SESSIONS[session.mode]):
        session.open()  # fresh workers on all sides, which have loaded and run the same
        for run in timed:
            session.time(run, (end + session.compile_s - time.monotonic()) / left)
            left -= 1
    operators = session.trace() if terms.candidate.language != "cpp" else []
    session.check_hidden()
    rows, doubts, raw, same = [], [], {}, []  # a shape in doubt is no win; in doubt at the first one is the verdict
    if terms.confirm:
        for run in timed:
            kept = run.rounds(calm=True)
            if kept:
                same.append(stats.speedup(run.per_call("baseline", kept), run.per_call("twin", kept)).estimate)
    bench.same += same
    spread = stats.spread_of(bench.same[-60:])
    for run in timed:
        row, doubt = conclude(
            run, terms.problem, ceilings, alpha=terms.alpha, threshold=terms.threshold, spread=spread
        )  # fmt: skip
        rows.append(row)
        doubts.append(f"{run.shape}: {doubt}" if doubt else "")
        raw[",".join(f"{k}={v}" for k, v in run.shape.items())] = run.raw
    first = rows[0]
    waits = [w for run in timed for w in run.raw["waited"]]
    noise = {
        "load_1min": os.getloadavg()[0],
        "waited_median": float(np.median(waits)),
        "a_a": same,
        "spread": spread,
        "page_faults_per_call": timed[0].faults,
    }
    return session.account() | {
        "status": "unresolved" if doubts[0] else "valid", "reason": "; ".join(filter(None, doubts)),
        "speedup": first.speedup,
        "claim": first.claim, "threshold": terms.threshold, "faster": None if doubts[0] else first.faster,
        "medians": {"baseline_s": first.baseline_s, "candidate_s": first.candidate_s}, "per_shape": tuple(rows),
        "floor_fraction": first.floor_fraction, "noise": noise, "raw": raw,
        "provenance": provenance.of(terms.candidate, terms.built.path, operators),
    }  # fmt: skip


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions that a verdict depends on; `ruler` is the hash of the ruler's own files."""
    import numpy as np
    import torch

    from kernels.ruler import build as building

    own = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        own.update(path.read_bytes())
    try:
        compiler = building.compiler()[1]
    except building.NoCompiler:
        compiler = "none"
    return {
        "ruler": own.hexdigest()[:16], "torch": torch.__version__, "numpy": np.__version__, "compiler": compiler,
        "python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine(),
    }  # fmt: skip


def _end_with(parent: int) -> None:
    """End this process as soon as `parent` ends: a judgement that nobody waits for would keep the device.

    Not by PDEATHSIG, which fires when the thread that started us ends. Workers end with their template's pipe.
    """
    if not hasattr(os, "pidfd_open"):
        return  # then after the judgement at hand
    try:
        handle = os.pidfd_open(parent)
    except OSError:
        os._exit(1)

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(connection: Connection) -> None:
    """Judge what comes over the connection until it closes."""
    import torch

    torch.set_num_threads(1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody reads or traces this process
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: sleep no longer than asked
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    _end_with(os.getppid())
    cgroup.sweep()
    bench = Bench()
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            break
        try:
            connection.send(judge_here(bench, **request).to_json())
        except InputError as error:
            where = {"remedy": error.remedy, "file": error.file, "key": error.key}
            connection.send({"refused": error.problem, "with": where})
        except Exception:
            connection.send({"failed": traceback.format_exc(limit=-3)})
    for template in bench.templates.values():
        template.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from kernels.ruler.judge import serve as _serve

    _serve(Connection(int(sys.argv[1])))
