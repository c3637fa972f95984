"""The report and the stack as files."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from finished_run import SECRET, FinishedRun, product_of, profile
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
from tasks.report import _operators, build_report, figures_of, render, write_report
from tasks.report_layers import product
from tasks.report_markdown import campaign_markdown, run_markdown
from tasks.report_schema import Interval, Report
from tasks.report_words import number
from tasks.run_state import RunState, create_run, read_json, write_json
from tasks.stack_files import read_stack, write_stack


def stack() -> Stack:
    problem = build("linear", n=192, k=192, visible=[{"m": 4}])
    problem = replace(problem, hidden=(SECRET,))
    family = families("linear")[0]
    candidate = family.render(family.default, problem)
    return Stack(
        Settings(engine="transformers", knobs={"cache": "static"}), (Promoted(problem, candidate, "v1", ({"m": 4},)),)
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A finished run with its report written; read only."""
    made = FinishedRun(tmp_path_factory.mktemp("finished"))
    write_report(made.folder, made.store)
    return made


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


def test_a_finished_run_says_how_much_how_sure_and_by_which_layer(finished: FinishedRun) -> None:
    report = build_report(finished.folder, finished.store)
    assert report.status == "finished"
    assert report.confirmed
    assert report.speedup is not None
    assert report.speedup.estimate == pytest.approx(1.78)
    layers = {gain.layer: gain for gain in report.by_layer}
    assert layers["settings"].ratio is not None
    assert layers["settings"].ratio.estimate == 1.35
    assert layers["kernel"].ratio is not None
    assert layers["kernel"].ratio.estimate == pytest.approx(1.31)  # the rejected one does not count
    assert layers["framework"].ratio is None
    assert not any("does not bear out" in gain.how for gain in report.by_layer)
    assert report.accuracy["status"] == "pass"
    assert [check["name"] for check in report.accuracy["checks"]][1:] == ["top1_share_drop", "kl_increase_nats"]
    assert report.baseline is not None
    assert report.best is not None
    assert (report.baseline.value, report.best.value) == (85.0, pytest.approx(151.3))
    assert report.stack is not None
    assert report.stack.standing == "confirmed"
    assert [kernel.taken for kernel in report.stack.kernels] == [7620]
    assert {row.campaign_id: row.decision for row in report.campaigns} == {
        "ccc": "promoted",
        "aaa": "rejected",
        "bbb": "",
    }
    assert report.budget.by_stage_s["Evaluate"] == pytest.approx(83.0)  # two stages of one title


def test_everything_that_was_refused_is_told_with_its_reason(finished: FinishedRun) -> None:
    refused = build_report(finished.folder, finished.store).refused
    told = {(row.stage, row.reason.split(":")[0].split(",")[0]) for row in refused}
    assert told == {
        ("settings", "gate failed"),
        ("settings", "out of memory"),
        ("ruler", "did not win"),
        ("end_to_end", "Not decided after 6 pairs"),
        ("plan", "passed over in round 1"),
        ("plan", "abandoned"),
    }


def test_a_headline_that_the_layers_do_not_explain_is_pointed_out(tmp_path: Path) -> None:
    made = FinishedRun(tmp_path, final_ratio=1.2, ideas=False)
    said = " ".join(gain.how for gain in build_report(made.folder, made.store).by_layer)
    assert "does not bear out" in said
    assert "1.77×" in said


def test_a_gain_belongs_to_the_layer_of_its_idea(tmp_path: Path) -> None:
    made = FinishedRun(tmp_path, layer="framework", ideas=False)
    layers = {gain.layer: gain.ratio for gain in build_report(made.folder, made.store).by_layer}
    assert layers["kernel"] is None
    assert layers["framework"] is not None


def test_intervals_of_a_product_are_combined_on_the_log_scale() -> None:
    one, two = Interval(estimate=1.3, low=1.2, high=1.4), Interval(estimate=1.1, low=1.05, high=1.2)
    found = product([one, two])
    assert found is not None
    expected = product_of([(1.3, 1.2, 1.4), (1.1, 1.05, 1.2)])
    assert (found.estimate, found.low, found.high) == pytest.approx(expected)
    assert product([]) is None


STAGES = ["010-target", "030-baseline", "040-settings", "110-profile", "130-campaigns", "140-evaluate-ccc",
          "140-evaluate-aaa", "900-final"]  # fmt: skip


@pytest.mark.parametrize("until", STAGES)
def test_a_run_that_stopped_at_any_stage_has_a_report(tmp_path: Path, until: str) -> None:
    made = FinishedRun(tmp_path, until, ideas=False)
    report = build_report(made.folder, made.store)
    page = render(report, {})
    at = STAGES.index(until)
    assert report.status == "unfinished"
    assert (report.speedup is None) == (until != "900-final")
    assert (report.baseline is None) == (at < STAGES.index("030-baseline"))
    assert (report.best is None) == (until != "900-final")
    assert bool(report.trials) == (at >= STAGES.index("040-settings"))
    assert (report.stack is None) == (at < STAGES.index("040-settings"))
    assert all(row.after_ms is None for row in report.operators)
    assert report.stack is None or report.stack.standing == ("confirmed" if report.confirmed else "provisional")
    assert not re.search(r"\bNone\b(?! ran yet)", page)
    if until == "130-campaigns":  # the winners wait for their test: nobody has refused them
        assert not any(row.stage == "end_to_end" for row in report.refused)


@pytest.mark.parametrize("order", [("ccc", "aaa"), ("aaa", "ccc")])
def test_the_stack_is_the_one_in_force_whatever_campaigns_are_called(tmp_path: Path, order: tuple[str, str]) -> None:
    made = FinishedRun(tmp_path, f"140-evaluate-{order[0]}", order=order, ideas=False)
    assert len(build_report(made.folder, made.store).stack.kernels) == 1  # type: ignore[union-attr]
    later = FinishedRun(tmp_path / "later", f"140-evaluate-{order[1]}", order=order, ideas=False)
    held = read_json(later.run.stage_file(f"140-evaluate-{order[1]}"))
    held["result"]["stack"]["kernels"] = []  # the later decision is what counts
    write_json(later.run.stage_file(f"140-evaluate-{order[1]}"), held)
    assert build_report(later.folder, later.store).stack.kernels == ()  # type: ignore[union-attr]


def test_a_stack_that_failed_its_confirmation_is_not_offered(tmp_path: Path) -> None:
    made = FinishedRun(tmp_path, final="rejected", ideas=False)
    page = write_report(made.folder, made.store).read_text()
    report = Report.model_validate_json((made.folder / "report.json").read_text())
    assert not report.confirmed
    assert "Accuracy fails" in report.decision
    assert "Accuracy fails" in page
    assert report.stack is not None
    assert report.stack.standing == "rejected"
    assert "Do not deploy" in page
    assert "apply.py" not in page
    assert "do not deploy" in (made.folder / "stack" / "README.md").read_text().lower()


def test_what_is_hidden_stays_hidden(finished: FinishedRun) -> None:
    texts = [(finished.folder / name).read_text() for name in ("report.html", "report.json")]
    texts += [file.read_text() for file in (finished.folder / "stack").rglob("*") if file.is_file()]
    texts += [
        campaign_markdown(finished.folder, "ccc"),
        run_markdown(build_report(finished.folder, finished.store), {}),
    ]
    for text in texts:
        plain = re.sub(r"data:image[^\"]*", "", text)
        assert str(SECRET["m"]) not in plain
        assert "/somewhere/else" not in plain


def test_no_python_is_printed_and_no_interval_is_endless(finished: FinishedRun) -> None:
    page = re.sub(r"data:image[^\"]*", "", (finished.folder / "report.html").read_text())
    assert "{&#39;" not in page  # a mapping as Python prints it
    assert "1000000000" not in page
    assert "cache = static" in page
    assert "GiB" in page
    assert "1000000000" not in campaign_markdown(finished.folder, "ccc")


def test_dollars_in_an_idea_are_no_formula(tmp_path: Path) -> None:
    made = FinishedRun(tmp_path, "130-campaigns", text="$^_$")
    report = build_report(made.folder, made.store)
    assert figures_of(report, made.folder, made.store)["ideas"][:4] == b"\x89PNG"


def test_pages_of_campaigns_have_a_picture_and_no_remote_one(tmp_path: Path) -> None:
    made = FinishedRun(tmp_path, text="![x](http://elsewhere/x.png)")
    page = campaign_markdown(made.folder, "ccc")
    assert page.splitlines()[0].startswith("**won**")
    assert "](data:image/png;base64," in page
    assert "![x]" not in page
    assert "roofloop rerun ccc" in page
    assert campaign_markdown(made.folder, "nothing").startswith("**unfinished**")
    assert "![x]" not in run_markdown(build_report(made.folder, made.store), {})


def test_an_edited_stack_is_refused(tmp_path: Path) -> None:
    file = write_stack(stack(), tmp_path / "stack") / "stack.json"
    file.write_text(file.read_text().replace('"m": 4', '"m": 5'))  # a shape that nobody judged
    with pytest.raises(InputError, match="was changed"):
        read_stack(file.parent)


def test_the_written_script_puts_the_kernels_in(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_stack(stack(), tmp_path / "stack")
    load = runpy.run_path(str(folder / "apply.py"))["load"]
    assert load(str(tiny_model), 1) is not None
    assert "sites" in capsys.readouterr().out


def test_a_fused_kernel_is_compared_with_all_that_it_took_over():
    """What stood at the kernel's sites before counts under its problem's name, before and after."""

    def at(times: dict[tuple[str, str, str], tuple[float, float | None]], sites: dict[str, str], kernel: str = ""):
        made = profile(times, 1000.0)
        rows = [
            row.model_copy(update={"sites": (sites[row.operator],), "kernel": kernel if row.operator in kernel else ""})
            for row in made.rows
        ]
        return made.model_copy(update={"rows": tuple(rows)})

    layer = "model.layers.*"
    before = at(
        {("rmsnorm", "n", "decode"): (40.0, 4.0), ("linear", "q", "decode"): (200.0, 100.0),
         ("silu_mul", "mlp", "decode"): (60.0, 6.0), ("rotary", "qk", "decode"): (30.0, 3.0)},
        {"rmsnorm": f"{layer}.norm", "linear": f"{layer}.mlp.gate_proj", "silu_mul": f"{layer}.mlp.act_fn",
         "rotary": "rotary"},
    )  # fmt: skip
    after = at(
        {("rmsnorm", "n", "decode"): (41.0, 4.0), ("mlp", "mlp", "decode"): (90.0, 100.0),
         ("rotary", "qk", "decode"): (31.0, 3.0)},
        {"rmsnorm": f"{layer}.norm", "mlp": f"{layer}.mlp", "rotary": "rotary"},
        kernel="mlp_hidden8",
    )  # fmt: skip
    rows = _operators({"110-profile": {"profile": to_json(before)}, "905-profile-after": {"profile": to_json(after)}})
    times = {row.operator: (row.before_ms, row.after_ms) for row in rows}
    assert times == {"mlp_hidden8": (260.0, 90.0), "rmsnorm": (40.0, 41.0), "rotary": (30.0, 31.0)}
