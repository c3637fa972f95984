"""The command line as a person uses it: a process of its own, its exit code, what stands where."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli_common import print_json

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
    "a campaign that is not there": ("rerun", ["abc"], ["abc", "campaigns"]),
    "a thing that a rerun cannot change": ("rerun", ["abc", "--with", "seed=1"], ["--with", "budget"]),
    "SQL that is wrong": ("kb", ["sql", "SELEC 1"], ["SELEC"]),
    "nothing to judge": ("judge", [], ["PROBLEM", "--suite"]),
    "a suite that is not there": ("judge", ["--suite", "nowhere"], ["nowhere", "--suite"]),
    "a suite without candidates": ("judge", ["--suite", "."], ["--suite", "PROBLEM"]),
    "a suite and a candidate": ("judge", ["softmax", "x.py", "--suite", "."], ["--suite"]),
    "a device that is not there": ("judge", ["softmax", __file__, "--device", "cuda:9"], ["cuda:9", "device"]),
    "more threads than there are": ("judge", ["silu_mul", __file__, "--threads", "9999"], ["threads"]),
    "a candidate of no known kind": ("judge", ["silu_mul", str(ROOT / "LICENSE")], ["LICENSE", ".cpp"]),
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
        ("[traffic]", "[gates]\npeak_memory_gib = 0.000001\n[traffic]", "gates.peak_memory_gib"),
        ("[traffic]", "[engine.knobs]\nthread = 1\n[traffic]", "engine.knobs.thread"),
        ("requests = 2", "requests = 1", "traffic.requests"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(old: str, new: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(WORKLOAD.replace(old, new))
    done = call("optimize", str(file), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "mine.toml" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "runs").glob("*")) == []  # neither a run nor a server came of it
    assert not (tmp_path / ".roofloop" / "prefect" / "server.starting").exists()


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


def test_a_full_disk_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        f'mount -t tmpfs -o size=8m none {small} && "$@"',
        "sh",
    ]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace of one's own here")
    done = subprocess.run(
        [*mount, *ROOFLOOP, "--workspace", str(small), "optimize", "tiny-cpu"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"{small}: only 8 MiB are free here. Free 1 GiB" in done.stderr


def test_judging_c_needs_a_compiler(tmp_path: Path) -> None:
    (tmp_path / "right.cpp").write_text(GOOD)
    done = call("judge", "silu_mul", "right.cpp", cwd=tmp_path, env={"PATH": str(tmp_path)})
    assert done.returncode == 2, done.stderr
    assert "compiler" in done.stderr
    assert done.stderr.count("\n") == 1


def test_claude_with_a_key_is_not_there_yet(tmp_path: Path) -> None:
    done = call("optimize", "tiny-cpu", "--agents", "claude", cwd=tmp_path, env={"ANTHROPIC_API_KEY": "x"})
    assert done.returncode == 2
    assert "offline" in done.stderr


def test_a_server_that_does_not_answer_is_bad_input(tmp_path: Path) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}/api"
        done = call("serve", cwd=tmp_path, env={"PREFECT_API_URL": url})
    assert done.returncode == 2, done.stderr
    assert "PREFECT_API_URL" in done.stderr
    assert url in done.stderr


def test_the_workspace_is_named_before_or_after_the_command(tmp_path: Path) -> None:
    for number, words in enumerate((["--workspace", "{}", "status"], ["status", "--workspace", "{}"])):
        place = tmp_path / str(number)
        assert call(*(word.format(place) for word in words), cwd=tmp_path).returncode == 0
        assert (place / "runs").is_dir()
    assert not (tmp_path / "runs").exists()


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


def test_status_knows_the_living_from_the_dead(tmp_path: Path) -> None:
    import psutil

    from profiles.load import load_workload
    from tasks.run_state import create_run, now, write_json

    run = create_run(tmp_path / "runs", load_workload("tiny-cpu"), seed=1, fingerprint="here")
    run.finish("010-target", "key", "Ceilings", {}, started_at=now(), seconds=2.5)
    run.progress(stage="020-bringup", title="Bring-up", best="")
    shown = call("status", run.run_id, cwd=tmp_path).stdout
    assert f"{run.run_id}: running" in shown
    assert "Ceilings (2.5 s)" in shown
    assert "▸ Bring-up" in shown
    row = json.loads(call("status", "--json", cwd=tmp_path).stdout)[0]
    assert (row["status"], row["stage"], row["budget_s"]) == ("running", "Bring-up", 55.0)
    # the same pid, but of a process that started at another time
    live = json.loads((run.folder / "progress.json").read_text())
    write_json(run.folder / "progress.json", live | {"pid_started": psutil.Process().create_time() - 100})
    assert "killed" in call("status", run.run_id, cwd=tmp_path).stdout


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
        (GOOD.replace("float* o,", "float* o"), ("build_failed",)),
    ],
    ids=["right", "syntax error"],
)
def test_judge_prints_one_document_whatever_the_verdict(source: str, status: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "candidate.cpp"
    file.write_text(source)
    done = call("judge", "silu_mul", str(file), "--mode", "screen", "--budget", "1s", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["status"] in status
    assert done.stderr == ""
    assert "hidden" not in json.dumps(verdict.get("first_error") or {})


def test_a_verdict_for_people_says_what_is_wrong_and_where(tmp_path: Path) -> None:
    file = tmp_path / "candidate.cpp"
    file.write_text(GOOD.replace("* y[i]", "+ y[i]"))
    done = call("judge", "silu_mul", str(file), "--mode", "screen", "--budget", "2s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["verdict"] == "incorrect"
    assert rows["first"].startswith("error  o[")
    assert "confinement" in rows


def test_a_suite_judges_a_folder_and_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.cpp").write_text(GOOD.replace("* y[i]", "+ y[i]"))  # names its problem by its function
    (folder / "deep" / "b.py").write_text("# op: softmax\ndef run(x):\n    return x\n")
    (folder / "c.py").write_text("# no word of what it solves\n")
    words = ("judge", "--suite", str(folder), "--mode", "screen", "--budget", "0.3s", "--json")
    first = call(*words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    rows = {row["file"]: (row["problem"], row["status"], row["kept"]) for row in found["candidates"]}
    assert rows == {"a.cpp": ("silu_mul", "incorrect", False), "deep/b.py": ("softmax", "incorrect", False)}
    assert (found["counts"], found["left_out"]) == ({"incorrect": 2}, ["c.py"])
    assert first.stderr.splitlines() == ["1: a.cpp: incorrect", "2: deep/b.py: incorrect"]
    again = json.loads(call(*words, cwd=tmp_path).stdout)
    assert [row["kept"] for row in again["candidates"]] == [True, True]
    assert [row["verdict_id"] for row in again["candidates"]] == [row["verdict_id"] for row in found["candidates"]]
    table = call(*words[:-1], cwd=tmp_path).stdout
    assert "2 judged: 2 incorrect. 1 left out." in table


def test_numbers_that_json_lacks_are_null() -> None:
    out = io.StringIO()
    print_json({"a": float("nan"), "b": (1.5, float("inf")), "c": Path("x")}, out)
    assert json.loads(out.getvalue()) == {"a": None, "b": [1.5, None], "c": "x"}


def test_a_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*ROOFLOOP, "target", "show", "h200"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 1


def test_an_unexpected_fault_is_one_line_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs" / "broken").mkdir(parents=True)
    (tmp_path / "runs" / "broken" / "run.json").mkdir()  # nobody expects a folder of that name
    done = call("status", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    log = Path(done.stderr.strip().rsplit(" ", 1)[-1])
    assert log.parent == tmp_path / ".roofloop" / "logs"
    assert "IsADirectoryError" in done.stderr
    assert "Traceback" in log.read_text()
