"""The stages of a run before and after the rounds of campaigns, each a thin stage around a plain function."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flows.terminal import current
from kb import crashes
from kb.records import EndToEnd, Trial
from kb.store import Store
from kernels.identity import content_hash
from profiles import ceilings, models
from profiles.engines import knob_specs
from profiles.engines.base import Settings, Stack
from profiles.load import check_context, check_knobs, load_target
from profiles.operators import Profile
from profiles.reference import Reference
from profiles.target import Target
from profiles.workload import higher_is_better
from tasks import bringup, search
from tasks.codec import from_json, to_json
from tasks.evaluate import compare
from tasks.lab import Lab, PointFigures, gates_of, measured, stock
from tasks.promote import confirm_final, decide, end_to_end
from tasks.record import record, record_end_to_end, record_trials
from tasks.run_state import RunState, now, read_json, write_json
from tasks.search import Confirmation, Measured, SearchResult
from tasks.stage import run_stage
from tasks.workspace import Workspace

SETTINGS_SHARE = 0.4
"""Most of the time left after the baseline that the settings search may take, its confirmation included."""
HOPELESS = 0.85
"""Share of the best trial's value that a trial's first round must reach to be measured further: less than that is more
than rounds differ by chance on a noisy machine (up to 9 %)."""


def step(  # noqa: PLR0917
    run: RunState, name: str, key: str, title: str, work: Any, said: Any = None, **options: Any
) -> Any:
    """A stage that the terminal shows."""
    display = current()
    reused = run.finished(name, key) is not None
    display.begin(title)
    run.progress(stage=name, title=title, best=display.best_text)
    began = time.monotonic()
    result = run_stage(run, name, key, title, work, **options)
    text = said(result) if said else ""
    display.end(title, f"{text} (kept from before)" if reused else text, None if reused else time.monotonic() - began)
    return result


def model(workspace: Workspace, run: RunState) -> Path:
    """The model's folder; made once per machine."""
    workload = run.record.workload
    folder = models.materialise(workload.model, workspace.models, current().detail)
    file = run.record.workload_file or None
    check_context(workload, folder, file)
    if workload.target == "auto":
        check_knobs(workload, knob_specs(workload, folder), file)
    return folder


def target(workspace: Workspace, run: RunState) -> Target:
    """The machine's ceilings, measured or from a datasheet."""
    workload = run.record.workload

    def work() -> dict[str, Any]:
        if workload.target != "auto":
            return {"target": load_target(workload.target)}
        cap_s = min(20.0, 0.08 * workload.budget.wall_s)
        return {"target": ceilings.measure_target(workspace.targets, progress=current().detail, cap_s=cap_s)}

    def said(result: dict[str, Any]) -> str:
        return ceilings.summary(from_json(Target, result["target"]))

    held = step(run, "010-target", run.key("target"), "Ceilings of this machine", work, said)
    return from_json(Target, held["target"])


def bring_up(lab: Lab, reference: Reference) -> None:
    """The model runs and matches its reference.

    Raises:
        InputError: it does not; the message names where it diverges.
    """

    def work() -> Any:
        log = lab.run.folder / "engines" / "bringup.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        report = bringup.bringup(
            lab.workload,
            lab.model_dir,
            children=lab.workspace.children,
            builds=lab.workspace.builds,
            log=log,
            reference=reference,
            progress=current().detail,
        )
        bringup.require(report)
        return report

    step(lab.run, "020-bringup", lab.run.key("bringup"), "Bring-up", work, lambda found: found["reason"], retries=1)


def baseline(lab: Lab, reference: Reference) -> PointFigures:
    """Stock engine, stock settings: what everything is compared with."""

    def work() -> dict[str, Any]:
        figures = lab.measure(stock(lab.workload), "baseline", reference, lab.run.seed("settings"))
        trial = _default_trial(lab, figures)
        return {
            "figures": figures,
            "resolved": figures.resolved,
            "row": figures.row,
            "value": figures.measurement.value,
            "rounds": figures.rounds,
            "trial": trial,
        }

    def said(found: dict[str, Any]) -> str:
        return f"{found['value']:.4g} {lab.workload.objective}"

    held = step(lab.run, "030-baseline", lab.run.key("baseline"), "Stock engine", work, said, retries=1)
    current().best(f"stock, {held['value']:.4g} {lab.workload.objective}")
    return from_json(PointFigures, held["figures"])


def _default_trial(lab: Lab, figures: PointFigures) -> Trial:
    gates = gates_of(lab.workload, figures, figures.distance)
    missed = [f"{name}: {gate.reason}" for name, gate in gates.items() if gate.ok is not True]
    return Trial(
        run_id=lab.run.run_id,
        number=0,
        role="default",
        knobs={},
        resolved_hash=figures.resolved.hash,
        resolved=dict(figures.resolved.config),
        status="gate_failed" if missed else "complete",
        metric=lab.workload.objective,
        value=figures.measurement.value,
        gates=to_json(gates),
        reason="; ".join(missed),
        seconds=figures.start_s + 3 * figures.round_s + figures.accuracy_s,
        provenance=lab.provenance(figures.resolved.version),
        at=now(),
    )


def settings(lab: Lab, store: Store, reference: Reference, base: PointFigures) -> SearchResult:
    """Step 0: the best settings under the gates, confirmed against the defaults."""
    run, workload = lab.run, lab.workload
    version = base.resolved.version
    provenance = lab.provenance(version)
    trials_file = run.folder / "raw" / "trials"

    def finished() -> list[Trial]:
        held = [read_json(file) for file in sorted(trials_file.glob("*.json"))]
        return [_default_trial(lab, base), *(Trial.model_validate(value) for value in held if value)]

    def keep(trial: Trial) -> None:
        write_json(trials_file / f"{trial.number:04d}.json", trial.model_dump(mode="json"))
        store.write(trial)
        value = "–" if trial.value is None else f"{trial.value:.4g}"
        current().detail(f"trial {trial.number}: {trial.status}, {value} {workload.objective}")

    def measure(asked: Settings, best: float | None) -> Measured:
        sign = 1 if higher_is_better(workload.objective) else -1
        figures = lab.measure(
            Stack(asked),
            "trial",
            reference,
            run.seed("settings"),
            hopeless=None if best is None else lambda value: (value / best) ** sign < HOPELESS,
            distance=None if asked.knobs else base.distance,
        )
        return measured(workload, figures, base.distance)

    def confirm(winner: Settings, default: Settings) -> Confirmation:
        found = lab.alone(compare)(
            lambda: lab.open(Stack(default), "confirm-a"),
            lambda: lab.open(Stack(winner), "confirm-b"),
            workload,
            lab.source,
            reference,
            max_pairs=base.most_pairs,
            deadline=time.monotonic() + lab.run.clock.left_s() / 3,
            seed=run.seed("confirm-settings"),
            stock=base.distance,
            raw=run.folder / "raw" / f"settings-{content_hash(winner.knobs)[:8]}.json",
            about={"purpose": "settings"},
            progress=lambda text, _: current().detail(text),
        )
        said = decide(found)
        a, b = Stack(default), Stack(winner)
        row = end_to_end(
            found, said, run_id=run.run_id, purpose="settings", stack_id=b.id, against_stack_id=a.id,
            provenance=provenance,
        )  # fmt: skip
        store.write(row)
        interval = found.interval
        return Confirmation(
            better=said.decision == "promoted",
            ratio=interval.estimate if interval else 1.0,
            low=interval.low if interval else 0.0,
            high=interval.high if interval else 0.0,
            reason=said.reason,
        )

    def work() -> SearchResult:
        scope = {"engine": version, "target": run.record.fingerprint, "workload": run.record.workload_hash}
        known = crashes.active(store, scope=scope, versions={"engine": version}, at=now())
        found = search.search(
            workload,
            knob_specs(workload, lab.model_dir),
            measure,
            finished(),
            keep,
            run_id=run.run_id,
            provenance=provenance,
            seed=run.seed("search"),
            deadline=time.monotonic() + SETTINGS_SHARE * max(0.0, run.clock.left_s()),
            crash_sets=known,
            confirm=confirm,
        )
        record_trials(store, found.trials)
        record(store, found.crash_sets)
        return found

    def said(found: dict[str, Any]) -> str:
        knobs = ", ".join(f"{k}={v}" for k, v in found["best"]["knobs"].items()) or "the defaults"
        return f"{knobs}: {found['reason']}"

    held = step(run, "040-settings", run.key("settings"), "Settings search", work, said, retries=1)
    return from_json(SearchResult, held)


def final(  # noqa: PLR0917
    lab: Lab, store: Store, reference: Reference, base: PointFigures, stack: Stack, stop_reason: str
) -> dict[str, Any]:  # fmt: skip
    """The final stack against stock in fresh engines: the headline."""
    run, workload, origin = lab.run, lab.workload, stock(lab.workload)

    def work() -> dict[str, Any]:
        if stack.id == origin.id:
            return {
                "end_to_end": None,
                "comparison": None,
                "decision": None,
                "stack": stack,
                "stop_reason": stop_reason,
            }
        found, decision = lab.alone(confirm_final)(
            lambda: lab.open(origin, "final-stock"),
            lambda: lab.open(stack, "final-stack"),
            workload,
            lab.source,
            reference,
            required=tuple(kernel.candidate.id for kernel in stack.kernels),
            max_pairs=base.most_pairs,
            seed=run.seed("final"),
            deadline=time.monotonic() + max(10 * base.round_s, run.clock.left_s() - base.accuracy_s),
            score_requests=16,
            raw=run.folder / "raw" / "final.json",
            progress=lambda text, _: current().detail(text),
        )
        row = end_to_end(
            found,
            decision,
            run_id=run.run_id,
            purpose="final",
            stack_id=stack.id,
            against_stack_id=origin.id,
            provenance=lab.provenance(base.resolved.version),
            raw_file="raw/final.json",
        )
        record_end_to_end(store, row)
        return {
            "end_to_end": row, "comparison": found, "decision": decision, "stack": stack, "stop_reason": stop_reason,
        }  # fmt: skip

    def said(result: dict[str, Any]) -> str:
        row = result["end_to_end"]
        if row is None:
            return "nothing was promoted: stock stays"
        parsed = EndToEnd.model_validate(row)
        if parsed.ratio is None:
            return parsed.reason
        return f"{parsed.ratio:.2f}× [{parsed.low:.2f}, {parsed.high:.2f}] over stock, {parsed.decision}"

    key = run.key("final", stack.id)  # the stop reason may tell seconds: those of the first time stand
    held = step(run, "900-final", key, "Confirmation in fresh engines", work, said, retries=1)
    return dict(held)


def profile_after(lab: Lab, stack: Stack, known: tuple[Profile, int] | None, *, reserve_s: float) -> None:
    """The final stack's profile, for the picture of before and after; left out when the budget is gone."""
    if not stack.kernels or (known is None and lab.run.clock.left_s() < reserve_s):
        return

    def work() -> dict[str, Any]:
        profile, threads = known or lab.profile(stack, "profile-after")
        return {"profile": profile, "threads": threads}

    step(lab.run, "905-profile-after", lab.run.key("after", stack.id), "Profile of the final stack", work)
