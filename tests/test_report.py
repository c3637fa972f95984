"""The report and the stack as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kb.store import Store
from kernels.errors import InputError
from kernels.overlay import install
from kernels.problems import build
from kernels.ruler.spec import Candidate
from kernels.templates import families
from profiles.engines.base import Promoted, Settings, Stack
from profiles.load import load_workload
from tasks.codec import to_json
from tasks.report import build_report, number, render, write_report
from tasks.report_markdown import campaign_markdown, run_markdown
from tasks.report_schema import Interval, Report
from tasks.run_state import RunState, create_run, write_json
from tasks.stack_files import read_stack, write_stack

SECRET = {"m": 7919}


def stack() -> Stack:
    problem = build("linear", n=192, k=192, visible=[{"m": 4}])
    problem = replace(problem, hidden=(SECRET,))
    family = families("linear")[0]
    candidate = family.render(family.default, problem)
    return Stack(
        Settings(engine="transformers", knobs={"cache": "static"}), (Promoted(problem, candidate, "v1", ({"m": 4},)),)
    )


def a_run(folder: Path) -> RunState:
    return create_run(folder, load_workload("tiny-cpu"), seed=3, fingerprint="f", versions={"roofloop": "0"})


def test_a_stack_is_read_back_as_it_was_and_installs(tmp_path: Path, tiny_model: Path) -> None:
    written = stack()
    folder = write_stack(written, tmp_path / "stack")
    held = read_stack(folder)
    assert held.settings == written.settings
    assert [kernel.candidate for kernel in held.kernels] == [kernel.candidate for kernel in written.kernels]
    assert held.kernels[0].judged == ({"m": 4},)
    assert "7919" not in (folder / "stack.json").read_text()  # hidden shapes stay with the ruler
    compile((folder / "apply.py").read_text(), "apply.py", "exec")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        handle = install(model, held.kernels, tmp_path / "builds", 1)
        model(torch.arange(4)[:, None])
    assert sum(count["taken"] for count in handle.counts()) > 0
    assert write_stack(written, folder) == folder  # a second time, over the first


def test_an_edited_kernel_is_refused(tmp_path: Path) -> None:
    folder = write_stack(stack(), tmp_path / "stack")
    source = next(folder.glob("kernels/*"))
    source.write_text(source.read_text() + "\n// faster\n")
    with pytest.raises(InputError, match="not the one that was judged"):
        read_stack(folder)
    source.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_stack(folder)
    with pytest.raises(InputError, match="no stack"):
        read_stack(tmp_path)


def test_a_run_that_has_just_begun_has_a_report_without_figures(tmp_path: Path) -> None:
    run, store = a_run(tmp_path / "runs"), Store(tmp_path / "kb")
    page = write_report(run.folder, store)
    report = Report.model_validate_json((run.folder / "report.json").read_text())
    assert report.status == "unfinished"
    assert report.speedup is None
    assert not report.confirmed
    assert all(layer.ratio is None for layer in report.by_layer)
    assert report.accuracy["status"] == "not evaluated"
    assert "No confirmed speed-up" in page.read_text()


def test_what_came_from_elsewhere_is_escaped(tmp_path: Path) -> None:
    run, store = a_run(tmp_path / "runs"), Store(tmp_path / "kb")
    hostile = "<script>alert(1)</script>|x"
    idea = {"id": "i", "hypothesis": hostile, "operator": "linear", "lever": "l"}
    task = {"idea": idea, "problem": {"name": "p", "hidden": [SECRET]}, "scope": hostile}
    home = run.folder / "campaigns" / "c1"
    write_json(home / "campaign.json", {"task": task})
    attempt = {
        "number": 1, "mode": "screen", "status": "incorrect", "speedup": None, "low": None, "high": None, "claim": None,
        "parameters": {"a": hostile}, "seconds": 1.0, "note": hostile,
    }  # fmt: skip
    write_json(home / "attempts" / "0001.json", attempt)
    write_json(home / "outcome.json", {"conclusion": "refused", "reason": hostile, "seconds": 1.0})
    page = write_report(run.folder, store).read_text()
    assert hostile not in page
    assert "&lt;script&gt;" in page
    everything = page + (run.folder / "report.json").read_text()
    assert "7919" not in everything
    text = campaign_markdown(run.folder, "c1")
    assert text.splitlines()[0].startswith("**refused**")
    assert "<script>" not in text.split("What the executor was shown")[0]
    report = build_report(run.folder, store)
    assert [row.stage for row in report.refused] == ["ruler"]
    assert "<script>" not in run_markdown(report, {})


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    run, store = a_run(tmp_path / "runs"), Store(tmp_path / "kb")
    report = build_report(run.folder, store).model_copy(
        update={"speedup": Interval(estimate=1.5, low=1.4, high=1.6, n=8), "confirmed": True}
    )
    page = render(report, {"by_layer": b"png"})
    assert "1.50×" in page
    assert "http" not in page
    assert "data:image/png;base64," in page


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("nan"), "–"), (0, "0"), (1234, "1,234"), (1234.5, "1,234"),
     (1.2345, "1.23"), (0.00123, "0.00123"),
     (1.5e-9, "1.50e-09"), (True, "True"), ("x", "x")],
)  # fmt: skip
def test_figures_have_three_digits(value: object, text: str) -> None:
    assert number(value) == text


def test_json_of_a_stack_names_the_candidate(tmp_path: Path) -> None:
    written = stack()
    write_stack(written, tmp_path / "s")
    held = json.loads((tmp_path / "s" / "stack.json").read_text())
    assert held["kernels"][0]["candidate_id"] == written.kernels[0].candidate.id
    assert to_json(Candidate("cpp", "x", "run"))["language"] == "cpp"
