"""The command line as a person uses it: a process of its own, its exit code, what stands where."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOFLOOP = [sys.executable, "-m", "flows"]
ROOT = Path(__file__).resolve().parent.parent

WORKLOAD = """
schema_version = 1
name = "mine"
[model]
source = "random-llama"
[traffic]
concurrency = 2
input_tokens = 8
output_tokens = 4
requests = 2
"""


def call(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(
        [*ROOFLOOP, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_help_names_every_command(tmp_path: Path) -> None:
    done = call("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("optimize", "judge", "status", "report", "rerun", "ideas", "kb", "target", "doctor", "serve"):
        assert name in done.stdout
    assert list(tmp_path.iterdir()) == []  # help makes nothing


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, flows.__main__; print([m for m in ('torch', 'prefect', 'duckdb', 'optuna') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


BAD = {
    "a workload that is not there": ("optimize", ["smolm2-cpu"], ["smollm2-cpu"]),
    "a word that is no option": ("optimize", ["tiny-cpu", "--bugdet", "10m"], ["--bugdet"]),
    "a budget that is no duration": ("optimize", ["tiny-cpu", "--budget", "soon"], ["--budget"]),
    "agents that do not exist": ("optimize", ["tiny-cpu", "--agents", "oracle"], ["--agents", "offline"]),
    "claude without a key": ("optimize", ["tiny-cpu", "--agents", "claude"], ["ANTHROPIC_API_KEY", "offline"]),
    "a run that is not there": ("report", ["nothing"], ["nothing", "status"]),
    "a problem that is not there": ("judge", ["rmsnrom", "x.cpp"], ["rmsnorm"]),
    "a candidate that is not there": ("judge", ["rmsnorm", "x.cpp"], ["x.cpp"]),
    "a target that is not there": ("target", ["show", "h20"], ["h200"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_and_exits_with_2(what: str, tmp_path: Path) -> None:
    command, words, said = BAD[what]
    done = call(command, *words, cwd=tmp_path, env={"ANTHROPIC_API_KEY": ""})
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    for text in said:
        assert text in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("concurrency = 2", "concurency = 2", "traffic.concurency"),
        ("concurrency = 2", 'concurrency = "two"', "traffic.concurrency"),
        ('source = "random-llama"', 'source = "no/such/folder"', "model.source"),
        ('name = "mine"', 'name = "mine"\ntarget = "h2000"', "target"),
        ("[traffic]", '[engine]\nname = "vllm"\n[traffic]', "engine.name"),
        ("input_tokens = 8", "input_tokens = 800000", "input_tokens"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(old: str, new: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(WORKLOAD.replace(old, new))
    done = call("optimize", str(file), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said.rpartition(".")[2] in done.stderr
    assert "mine.toml" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_compiler_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in ("git", "env"):
        found = shutil.which(tool)
        if found:
            (bare / tool).symlink_to(found)
    done = call("optimize", "tiny-cpu", cwd=tmp_path, env={"PATH": str(bare)})
    assert done.returncode == 2
    assert "g++" in done.stderr
    assert list((tmp_path / "runs").glob("*")) == []


def test_doctor_fails_where_something_needed_is_missing(tmp_path: Path) -> None:
    done = call("doctor", "--json", cwd=tmp_path, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert any(not row["ok"] and row["needed"] and row["remedy"] for row in json.loads(done.stdout))


def test_status_and_kb_of_an_empty_workspace(tmp_path: Path) -> None:
    done = call("status", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    done = call("kb", "outcomes", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    done = call("kb", "verify", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True)


GOOD = """#include <cmath>
#include <cstdint>
extern "C" void run_silu_mul(const float* x, const float* y, float* o, int64_t n) {
  for (int64_t i = 0; i < n; ++i) o[i] = x[i] / (1.0f + std::exp(-x[i])) * y[i];
}
"""


@pytest.mark.parametrize(
    ("source", "status"),
    [
        (GOOD, ("valid", "unresolved")),
        (GOOD.replace("* y[i]", "+ y[i]"), ("incorrect",)),
        (GOOD.replace("float* o,", "float* o"), ("build_failed",)),
    ],
    ids=["right", "wrong", "syntax error"],
)
def test_judge_prints_one_document_whatever_the_verdict(source: str, status: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "candidate.cpp"
    file.write_text(source)
    done = call("judge", "silu_mul", str(file), "--mode", "screen", "--budget", "3s", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["status"] in status
    assert "hidden" not in json.dumps(verdict.get("first_error") or {})


def test_an_unexpected_fault_is_one_line_and_a_file(tmp_path: Path) -> None:
    code = (
        "import flows.__main__ as cli, sys\n"
        "def broken(*a, **k):\n    raise ZeroDivisionError('planted')\n"
        "cli._workspace = broken\n"
        "sys.argv = ['roofloop', 'status']\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    log = Path(done.stderr.strip().rsplit(" ", 1)[-1])
    assert "ZeroDivisionError: planted" in log.read_text()
