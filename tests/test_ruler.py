"""The ruler on real candidates: right and wrong ones, its statuses, its confinement and its cleaning up."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ruler_problems import LINEAR, MATMUL, RMSNORM, SILU_MUL, SOFTMAX

from kernels.errors import InputError
from kernels.ruler import build, canaries, cgroup, sandbox
from kernels.ruler import judge as judging
from kernels.ruler.floor import Ceilings
from kernels.ruler.spec import Candidate, Problem
from kernels.ruler.suite import judge_suite
from kernels.ruler.verdict import Verdict, visible

SMALL = {
    p.name: dataclasses.replace(p, visible=(s,))
    for p, s in (
        (RMSNORM, {"rows": 16, "cols": 576}), (SOFTMAX, {"rows": 32, "cols": 512}),
        (MATMUL, {"m": 64, "n": 48, "k": 96}), (SILU_MUL, {"rows": 16, "cols": 1536}),
    )
}  # fmt: skip
FAST_SILU = """#include <cmath>
#include <cstdint>
extern "C" void run_silu_mul(const float* x, const float* y, float* o, int64_t n) {
  for (int64_t i = 0; i < n; ++i) o[i] = x[i] / (1.f + std::exp(-x[i])) * y[i];
}
"""
REPEATED_SILU = FAST_SILU.replace(
    "for (int64_t i = 0;", "for (volatile int t = 0; t < 3; t = t + 1) for (int64_t i = 0;"
)
PACKED_LINEAR = """#include <cstdint>
extern "C" int64_t prepare_linear_bytes(int64_t m, int64_t n, int64_t k) { return n * k * 4; }
extern "C" void prepare_linear(const uint16_t* w, void* packed, int64_t m, int64_t n, int64_t k) {
  uint32_t* p = (uint32_t*)packed;
  for (int64_t i = 0; i < n; ++i) for (int64_t j = 0; j < k; ++j) p[j * n + i] = (uint32_t)w[i * k + j] << 16;
}
static inline float wide(uint16_t v) { uint32_t u = (uint32_t)v << 16; float f; __builtin_memcpy(&f, &u, 4); return f; }
extern "C" void run_linear(const uint16_t* x, const void* packed, uint16_t* y, int64_t m, int64_t n, int64_t k) {
  const float* p = (const float*)packed; static float acc[4096];
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t i = 0; i < n; ++i) acc[i] = 0;
    for (int64_t j = 0; j < k; ++j) {
      float a = wide(x[r * k + j]); for (int64_t i = 0; i < n; ++i) acc[i] += a * p[j * n + i];
    }
    for (int64_t i = 0; i < n; ++i) { uint32_t u; __builtin_memcpy(&u, &acc[i], 4);
      y[r * n + i] = (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16); }
  }
}
"""
STALE_LINEAR = PACKED_LINEAR.replace(
    "uint32_t* p = (uint32_t*)packed;\n",
    "uint32_t* p = (uint32_t*)packed; static int seen = 0;\n"
    "  if (seen++) { for (int64_t i = 0; i < n * k; ++i) p[i] = 0; return; }\n",
)


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    return tmp_path_factory.mktemp("builds")


def run(problem: Problem, source: str, builds: Path, *, language: str = "torch", **options) -> Verdict:
    entry = "run" if language != "cpp" else f"run_{problem.operator}"
    candidate = Candidate(language, source, entry, prepares=options.pop("prepares", False))
    defaults = {"mode": "screen", "ceilings": None, "threads": 1, "builds": builds, "budget_s": 0.5}
    return judging.judge(problem, candidate, **(defaults | options))


def settled(make, *, tries=4):
    """A verdict that is not `unresolved`: the machine may be busy, but not for ever."""
    for _ in range(tries):
        verdict = make()
        if verdict.status != "unresolved":
            return verdict
    pytest.skip(f"the machine is too busy to resolve: {verdict.reason}")


def test_a_truly_faster_candidate_is_found_and_the_verdict_is_complete(builds):
    problem = SMALL["silu_mul"]
    slow = Candidate("cpp", REPEATED_SILU, "run_silu_mul")
    verdict = settled(lambda: run(problem, FAST_SILU, builds, language="cpp", baseline=slow, budget_s=2.0))
    assert verdict.status == "valid"
    assert verdict.faster
    assert 1.8 < verdict.speedup.low <= verdict.speedup.estimate <= verdict.speedup.high < 4
    assert verdict.claim <= verdict.speedup.estimate
    assert verdict.provenance["verdict"] == "new kernel"
    assert verdict.per_shape[0].overhead_fraction <= 0.05
    assert verdict.per_shape[0].calls_per_handshake > 1
    assert verdict.cases["hidden"] >= 4
    assert verdict.cases["timed_calls"] > 50
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


def test_the_baseline_against_itself_is_not_faster(builds):
    for name in ("softmax", "matmul"):
        verdict = run(SMALL[name], SMALL[name].reference, builds, budget_s=1.0)
        assert verdict.status in ("valid", "unresolved")
        assert not (verdict.faster and verdict.speedup.estimate > 1.2)
        assert verdict.provenance["verdict"] == "vendor"


def test_confirm_measures_every_visible_shape_with_the_baseline_beside_itself(builds):
    problem = dataclasses.replace(SMALL["rmsnorm"], visible=({"rows": 8, "cols": 576}, {"rows": 64, "cols": 576}))
    verdict = run(problem, problem.reference, builds, mode="confirm", budget_s=3.0)
    assert [dict(row.shape) for row in verdict.per_shape] == [dict(shape) for shape in problem.visible]
    assert {row.baseline for row in verdict.per_shape} <= {"eager", "vendor", "compile"}
    assert "twin" in verdict.raw["rows=8,cols=576"]


def test_a_spent_budget_still_gives_every_shape_an_interval(builds):
    problem = dataclasses.replace(SMALL["softmax"], visible=({"rows": 16, "cols": 256}, {"rows": 256, "cols": 2048}))
    verdict = run(problem, problem.reference, builds, mode="confirm", budget_s=0.01)
    assert [result.speedup.n >= 6 for result in verdict.per_shape] == [True, True]
    assert all(result.speedup.low > 0 for result in verdict.per_shape)


def test_a_quick_screen_checks_less_and_confirming_never_does(builds):
    """What is wrong at the second visible shape only passes where it is merely to be chosen among others."""
    problem = dataclasses.replace(
        SMALL["softmax"],
        visible=({"rows": 16, "cols": 256}, {"rows": 4, "cols": 96}),
        hidden=({"rows": 3, "cols": 64},),
    )
    wrong = problem.reference.replace("return", "return x * 0 if x.shape[-1] == 96 else", 1)
    assert run(problem, wrong, builds, thorough=False).status in ("valid", "unresolved")
    assert run(problem, wrong, builds).status == "incorrect"
    assert run(problem, wrong, builds, mode="confirm", thorough=False).status == "incorrect"


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        ("def run(x):\n    return x +\n", "build_failed", "line 2"),
        ("y = 1\n", "crashed", "no attribute 'run'"),
        ("def run(x):\n    return x, x\n", "incorrect", "2 outputs"),
        ("def run(x):\n    return x.double()\n", "incorrect", "torch.float64"),
        ("def run(x):\n    raise ValueError('my own words')\n", "crashed", "my own words"),
        ("def run(x):\n    import os\n    os._exit(0)\n", "crashed", "ended by itself"),
        ("import torch\ndef run(x):\n    torch.zeros(3 << 28)\n    return x\n", "out_of_memory", "memory"),
        ("def run(x):\n    x.zero_()\n    return x\n", "crashed", "SIGSEGV"),
        ("import os\ndef run(x):\n    for f in range(3, 9):\n        try:\n            os.write(f, b'K')\n"
         "        except OSError:\n            pass\n    return x\n", "void", "protocol"),
    ],
)  # fmt: skip
def test_each_failure_has_its_status_and_says_why(builds, source, status, words):
    verdict = run(SMALL["softmax"], source, builds)
    assert verdict.status == status, verdict.reason
    assert words in verdict.reason
    assert verdict.speedup is None


def test_a_hang_ends_in_timeout(builds, monkeypatch):
    started = time.monotonic()
    verdict = run(SMALL["softmax"], "import time\ndef run(x):\n    time.sleep(300)\n", builds)
    assert verdict.status == "timeout"
    assert time.monotonic() - started < 120


def test_compiler_messages_reach_the_author(builds):
    verdict = run(SMALL["silu_mul"], "int run_silu_mul( {", builds, language="cpp")
    assert verdict.status == "build_failed"
    assert "error" in verdict.reason
    assert str(builds) not in verdict.reason
    verdict = run(SMALL["silu_mul"], "void run_silu_mul() {}", builds, language="cpp")
    assert 'extern "C"' in verdict.reason


def test_the_first_error_of_a_visible_case_is_located(builds):
    source = "import torch\ndef run(x):\n    y = torch.softmax(x, -1)\n    y[3, 7] += 1e-3\n    return y\n"
    verdict = run(SMALL["softmax"], source, builds)
    assert verdict.status == "incorrect"
    assert verdict.first_error["index"] == [3, 7]
    assert verdict.first_error["shape"] == {"rows": 32, "cols": 512}
    assert abs(float(verdict.first_error["got"]) - float(verdict.first_error["expected"])) > 9e-4


def test_hidden_failures_leave_the_ruler_as_counts_only(builds):
    source = "import torch\ndef run(x):\n    y = torch.softmax(x, -1)\n    if x.shape != (32, 512):\n" \
        "        raise ValueError(f'secret {tuple(x.shape)}')\n    return y\n"  # fmt: skip
    verdict = run(SMALL["softmax"], source, builds)
    assert verdict.status == "crashed"
    shown = json.dumps(visible(verdict))
    assert "secret" not in shown
    assert "secret" not in json.dumps(verdict.to_json())
    assert visible(verdict)["cases"]["hidden_failed"] == 1
    assert "hidden case" in verdict.reason


def test_packed_weights_are_prepared_untimed_and_drawn_anew(builds):
    verdict = run(LINEAR, PACKED_LINEAR, builds, language="cpp", prepares=True, budget_s=1.0)
    assert verdict.status in ("valid", "unresolved"), (verdict.reason, verdict.first_error)
    assert verdict.prepare["seconds"] > 0
    stale = run(LINEAR, STALE_LINEAR, builds, language="cpp", prepares=True)
    assert stale.status == "incorrect"


def test_cold_caches_are_a_declared_mode(builds):
    verdict = run(LINEAR, PACKED_LINEAR, builds, language="cpp", prepares=True, budget_s=2.0, cache_state="cold")
    assert verdict.status in ("valid", "unresolved"), verdict.reason
    assert verdict.cache_state == "cold"
    assert verdict.per_shape[0].calls_per_handshake <= 160  # as many as there are weight sets


def test_faster_than_physics_is_void(builds):
    slow_machine = Ceilings(read_gbps=0.01, write_gbps=0.01, gflops={"float32": 1.0})
    verdict = run(SMALL["silu_mul"], SMALL["silu_mul"].reference, builds, ceilings=slow_machine)
    assert (verdict.status, verdict.law) == ("void", "physics")
    untrusted = dataclasses.replace(slow_machine, trusted=False)
    verdict = run(SMALL["silu_mul"], SMALL["silu_mul"].reference, builds, ceilings=untrusted)
    assert verdict.status in ("valid", "unresolved")
    assert verdict.floor_fraction is None


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"reference": "def run(x):\n    import torch\n    return torch.zeros_like(x)\n"}, "reference"),
        ({"reference": " "}, "reference"),
        ({"reference": "def run(x):\n    return 1 / 0\n"}, "reference"),
        ({"visible": ()}, "visible"),
        ({"visible": ({"rows": 1 << 20, "cols": 1 << 16},)}, "visible"),
        ({"regimes": ("sunny",)}, "regimes"),
    ],
)
def test_unfit_problems_are_refused(builds, change, key):
    problem = dataclasses.replace(SMALL["softmax"], **change)
    with pytest.raises(InputError) as caught:
        run(problem, SMALL["softmax"].reference, builds)
    assert caught.value.key == key
    assert caught.value.remedy


def test_levels_of_confinement_are_reached_or_named(builds):
    source = "import os, torch\nok = []\nfor p in ('/root', '/var/tmp', '/etc/passwd'):\n    try:\n" \
        "        ok += [os.listdir(p) if os.path.isdir(p) else open(p).read()]\n    except OSError:\n        pass\n" \
        "def run(x):\n    assert not ok\n    return torch.softmax(x, -1)\n"  # fmt: skip
    best = run(SMALL["softmax"], source, builds)
    assert best.status in ("valid", "unresolved"), best.reason
    assert best.confinement["level"] in sandbox.LEVELS
    assert (best.confinement["level"] == "full") == (not best.confinement["lacking"])
    lower = run(SMALL["softmax"], SMALL["softmax"].reference, builds, confinement="process")
    assert lower.confinement["level"] == "process"
    if best.confinement["level"] in ("sandbox", "full"):
        middle = run(SMALL["softmax"], source, builds, confinement="sandbox")
        assert middle.confinement["level"] == "sandbox"
        assert middle.status in ("valid", "unresolved"), middle.reason


def test_canaries_come_out_as_they_must(builds):
    drawn = canaries.draw(seed=int(time.time()), n=4)
    assert [c.honest for c in drawn].count(True) == 2
    checked = canaries.check(drawn, threads=1, builds=builds)
    assert checked.ok, checked.wrong
    liar = dataclasses.replace(next(c for c in drawn if not c.honest), honest=True)
    assert not canaries.check([liar], threads=1, builds=builds).ok


def test_first_calls_from_several_threads_at_once_find_a_thread_pool(builds):
    """A forked process has to replace torch's pool; that is no matter of a candidate's luck."""
    source = (
        "import threading\nimport torch\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool, together = ThreadPoolExecutor(4), threading.Barrier(4)\n"
        "def part(x):\n    together.wait()\n    return torch.softmax(x, -1)\n"
        "def run(x):\n    if len(x) % 4:\n        return torch.softmax(x, -1)\n"
        "    return torch.cat(list(pool.map(part, x.chunk(4))))\n"
    )
    problem = dataclasses.replace(SMALL["softmax"], regimes=("normal",))
    cores = min(2, os.cpu_count() or 1)
    found = [run(problem, source, builds, threads=cores, thorough=False, budget_s=0.1) for _ in range(6)]
    assert {verdict.status for verdict in found} <= {"valid", "unresolved"}, [v.reason for v in found]


def test_a_suite_goes_on_where_it_was_stopped(builds, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.py").write_text(f"# {name}\ndef run(x):\n    return x\n")
    options = {"mode": "screen", "ceilings": None, "threads": 1, "builds": builds, "budget_s": 0.3}

    def load(path):
        return SMALL["softmax"], Candidate("torch", path.read_text(), "run")

    first = next(judge_suite(tmp_path / "in", load, tmp_path / "out", lambda _: options))
    assert first[1].status == "incorrect"
    rest = list(judge_suite(tmp_path / "in", load, tmp_path / "out", lambda _: options))
    assert [again for _, _, again in rest] == [True, False]
    assert rest[0][1] == first[1]
    other = judge_suite(tmp_path / "in", load, tmp_path / "out", lambda _: options | {"cache_state": "cold"})
    assert not next(other)[2]  # judged under other terms, it is judged anew


# --- cleaning up ---------------------------------------------------------------------------------------------------


def leftovers():
    """Processes, cgroups and shared memory of any ruler."""
    found = [str(p) for root in ("/sys/fs/cgroup",) for p in Path(root).glob(f"**/{cgroup.PREFIX}*")]
    found += [str(p) for p in Path("/dev/shm").glob("*roofloop*")]
    return found


def rulers_children(pid):
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            if int(stat.read_text().rpartition(") ")[2].split()[1]) == pid:
                child = int(stat.parent.name)
                out += [child, *rulers_children(child)]
    return out


def alive(pids):
    def running(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
        return False

    return [pid for pid in pids if running(pid)]


def gone(pids, patience_s=20):
    end = time.monotonic() + patience_s
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pids)


def test_many_verdicts_leave_nothing_behind(builds):
    run(SMALL["softmax"], "def run(x):\n    return x\n", builds)
    ruler = judging._running[0].process.pid

    def state():
        descriptors = len(os.listdir(f"/proc/{ruler}/fd"))
        rss = int(Path(f"/proc/{ruler}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return descriptors, len(alive(rulers_children(ruler))), rss

    for _ in range(3):
        run(SMALL["softmax"], "def run(x):\n    return x\n", builds)
    before = state()
    for _ in range(15):
        run(SMALL["softmax"], "def run(x):\n    return x\n", builds)
        run(SMALL["softmax"], "import os\ndef run(x):\n    os._exit(3)\n", builds)
    after = state()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 30 << 20
    assert not [p for p in leftovers() if f"{cgroup.PREFIX}{ruler}." in p]


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path[:0] = {paths!r}
from pathlib import Path
from kernels.ruler.judge import judge, _running
from kernels.ruler.spec import Candidate
from test_ruler import SMALL
import threading, time
def tell():
    while not _running:
        time.sleep(0.01)
    print(_running[0].process.pid, flush=True)
threading.Thread(target=tell, daemon=True).start()
source = "import time\\ndef run(x):\\n    time.sleep(100)\\n"
judge(SMALL["softmax"], Candidate("torch", source, "run"), mode="screen", ceilings=None, threads=1,
      builds=Path({builds!r}), budget_s=1.0)
"""


@pytest.mark.parametrize("how", ["kill the caller", "kill the ruler", "interrupt"])
def test_whoever_dies_no_worker_is_left(builds, how):
    here = Path(__file__).resolve().parent
    script = SCRIPT.format(paths=[str(here.parent), str(here)], builds=str(builds))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        ruler = int(caller.stdout.readline())
        end = time.monotonic() + 60
        while len(family := rulers_children(ruler)) < 5 and time.monotonic() < end:
            time.sleep(0.05)  # template, two supervisors, two workers
        assert len(family) >= 5
        if how == "kill the caller":
            caller.kill()
        elif how == "kill the ruler":
            os.kill(ruler, signal.SIGKILL)
        else:
            caller.send_signal(signal.SIGINT)
        _, errors = caller.communicate(timeout=60)
    assert gone([ruler, *family])
    if how == "kill the ruler":
        assert "died while it judged" in errors
    if how == "interrupt":
        assert "KeyboardInterrupt" in errors
    end = time.monotonic() + 10
    while (left := [p for p in leftovers() if f"{cgroup.PREFIX}{ruler}." in p]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def test_a_missing_compiler_is_said(builds, monkeypatch):
    problem = SMALL["silu_mul"]
    monkeypatch.setenv("PATH", "/nonexistent")
    judging.close()
    try:
        with pytest.raises(InputError, match="compiler"):
            run(problem, FAST_SILU + "// new\n", builds, language="cpp")
    finally:
        judging.close()


def test_building_is_confined_and_cached(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    stolen = f'__asm__(".incbin \\"{tmp_path}/secret.txt\\"");\n' + FAST_SILU
    with pytest.raises(build.BuildFailed, match="not found"):
        build.build(Candidate("cpp", stolen, "run_silu_mul"), SILU_MUL, tmp_path / "b")
    first = build.build(Candidate("cpp", FAST_SILU, "run_silu_mul"), SILU_MUL, tmp_path / "b")
    again = build.build(Candidate("cpp", FAST_SILU, "run_silu_mul"), SILU_MUL, tmp_path / "b")
    assert again.path == first.path
    assert again.seconds == 0
    assert [p.name for p in (tmp_path / "b").iterdir()] == [first.path.name]
    source = FAST_SILU.replace("  for (", "  #pragma omp parallel for\n  for (")
    parallel = build.build(Candidate("cpp", source, "run_silu_mul"), SILU_MUL, tmp_path / "b")
    needed = subprocess.run(["readelf", "-d", str(parallel.path)], capture_output=True, text=True, check=True).stdout
    assert "libgomp" not in needed


def test_a_device_that_is_not_there_is_said(builds):
    with pytest.raises(InputError, match="no device 'cuda:9'") as failed:
        run(SMALL["softmax"], SMALL["softmax"].reference, builds, device="cuda:9")
    assert failed.value.key == "device"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here: the same protocol runs on the CPU")
def test_the_protocol_on_an_accelerator(builds):
    problem = SMALL["softmax"]
    right = run(problem, problem.reference, builds, device="cuda:0", mode="confirm", budget_s=3.0)
    assert right.status in ("valid", "unresolved")
    assert not (right.faster and right.speedup.estimate > 1.2)
    lazy = "import torch\ndef run(x):\n    return torch.empty_like(x)\n"
    assert run(problem, lazy, builds, device="cuda:0").status == "incorrect"
