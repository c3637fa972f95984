"""One campaign from its folder: load what is finished, let the executor work, write down what it came to.

A campaign *concludes* (won, did not win, refused) once; its `outcome.json` then stands. A campaign that *failed* (the
tools, the ruler or the budget, not the idea) is run again when it is asked for again, with its settled attempts kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kb.records import Attempt, Campaign, Conclusion, Outcome, Provenance, VerdictFile
from kb.store import Store
from kernels.identity import content_hash
from kernels.ruler.build import NoCompiler
from kernels.ruler.spec import Candidate
from kernels.ruler.verdict import Verdict
from profiles.engines.base import Promoted
from tasks.agents.protocol import CampaignResult, CampaignTask, Executor
from tasks.codec import from_json, to_json
from tasks.judge import SETTLED, Bench, Notebook, Step
from tasks.run_state import now, read_json, write_json

Canaries = Callable[[Bench], "Mapping[str, Any]"]
"""Judges known cheats and honest oddities; {"sound": bool, "wrong": [what came out wrong], ...}."""


@dataclass(frozen=True)
class Concluded:
    """What a campaign came to, for the end-to-end step."""

    outcome: Outcome
    promoted: Promoted | None
    """The winner as it would be put into a stack; None unless it won."""
    claim: float | None = None
    """The ruler's conservative speed-up."""
    reused: bool = False
    """True when it had been concluded before."""


def campaign_id(run_id: str, idea_id: str, problem_id: str, fingerprint: str, threads: int) -> str:
    """The content key of a campaign. The budget is no part of it."""
    return content_hash([run_id, idea_id, problem_id, fingerprint, threads])[:16]


def write_campaign(folder: Path, task: CampaignTask, *, run_id: str, round_number: int, provenance: Provenance) -> None:
    """Write `campaign.json`: all that is needed to run the campaign by its id."""
    head = {"run_id": run_id, "round": round_number, "provenance": to_json(provenance)}
    write_json(folder / "campaign.json", head | {"task": to_json(replace(task, finished=()))})


def read_campaign(folder: Path) -> tuple[CampaignTask, dict[str, Any]]:
    """The task of `campaign.json`, and its `run_id`, `round` and `provenance`.

    Raises:
        FileNotFoundError: there is none.
    """
    held = read_json(folder / "campaign.json")
    if not isinstance(held, dict):
        raise FileNotFoundError(folder / "campaign.json")
    return from_json(CampaignTask, held.pop("task")), held


def ended(folder: Path) -> Concluded | None:
    """What the campaign came to when it was last run, failures included; None where it has not come to an end."""
    held = read_json(folder / "result.json")
    outcome = read_json(folder / "outcome.json")
    if not held or not outcome:
        return None
    promoted = from_json(Promoted, held["promoted"]) if held["promoted"] else None
    return Concluded(Outcome.model_validate(outcome), promoted, held["claim"], reused=True)


def concluded(folder: Path) -> Concluded | None:
    """What the campaign came to, if it has concluded: a failed one has not, and is run again when it is asked for."""
    found = ended(folder)
    return None if found is None or found.outcome.conclusion == "failed" else found


def finished_attempts(folder: Path) -> tuple[Attempt, ...]:
    """Attempts that are written down and whose verdict would not change; by number."""
    held = (read_json(file) for file in sorted((folder / "attempts").glob("*.json")))
    attempts = [Attempt.model_validate(value) for value in held if value]
    return tuple(attempt for attempt in attempts if attempt.status in SETTLED and attempt.verdict_id)


def run_campaign(
    folder: Path,
    store: Store,
    executor: Executor,
    bench: Bench,
    *,
    canaries: Canaries,
    budget_s: float | None = None,
    progress: Callable[[Attempt], None] = lambda _: None,
    step: Step = lambda _, work: work(),
) -> Concluded:
    """Run the campaign whose `campaign.json` lies in `folder`, or return what it came to before.

    Args:
        folder: the campaign's folder in its run.
        store: the knowledge base, where attempts, verdicts and the outcome go at once.
        executor: who works on it.
        bench: the ruler behind the device's lease.
        canaries: what tests the ruler beside this campaign; when one comes out wrong, the campaign is void.
        budget_s: seconds to spend now, in the place of the planned ones.
        progress: hears of each attempt.
        step: runs each judgement under a name.
    """
    before = concluded(folder)
    if before is not None:
        store.write(before.outcome)  # it may have been killed between the two
        return before
    start = time.monotonic()
    task, head = read_campaign(folder)
    task = replace(task, finished=finished_attempts(folder), budget_s=budget_s or task.budget_s)
    provenance = Provenance.model_validate(head["provenance"])
    store.write_many(_opening(task, head))
    notebook = Notebook(folder)

    def report(attempt: Attempt) -> None:
        write_json(folder / "attempts" / f"{attempt.number:04d}.json", to_json(attempt))
        store.write(attempt)
        progress(attempt)

    def kept(verdict: Verdict) -> None:
        store.write(_verdict_file(verdict, task, head["run_id"]))

    bench = bench.for_campaign(task.budget_s, task.cache_state)
    try:
        result = executor.run(task, notebook.judge_with(bench, task.problem, kept, step), report)
    except NoCompiler as error:
        result = _failed(task, str(error))
    if result.conclusion == "won":
        tested = dict(canaries(bench))
        write_json(folder / "canaries.json", to_json(tested))
        if not tested["sound"]:
            wrong = ", ".join(tested["wrong"])
            result = replace(result, conclusion="failed", reason=f"void: the ruler was wrong about {wrong}")
    return _conclude(folder, store, task, head["run_id"], result, provenance, time.monotonic() - start)


def _opening(task: CampaignTask, head: Mapping[str, Any]) -> list[Campaign]:
    return [
        Campaign(
            id=task.campaign_id,
            run_id=head["run_id"],
            round=head["round"],
            idea_id=task.idea.id,
            operator=task.idea.operator,
            lever=task.idea.lever,
            problem_name=task.problem.name,
            families=task.families,
            languages=task.languages,
            budget_s=task.budget_s,
            seed=task.seed,
            threads=task.threads,
            scope_id=task.scope_id,
            warm_starts=tuple(to_json(start) for start in task.warm_starts),
            crash_sets=tuple(held.id for held in task.crash_sets),
            at=now(),
        )
    ]


def _verdict_file(verdict: Verdict, task: CampaignTask, run_id: str) -> VerdictFile:
    return VerdictFile(
        id=verdict.id,
        run_id=run_id,
        campaign_id=task.campaign_id,
        candidate_id=verdict.candidate_id,
        problem_name=task.problem.name,
        mode=verdict.mode,
        verdict=verdict.to_json(),
        at=now(),
    )


def _failed(task: CampaignTask, reason: str) -> CampaignResult:
    return CampaignResult(task.campaign_id, "failed", reason, task.finished)


def _conclude(  # noqa: PLR0917
    folder: Path,
    store: Store,
    task: CampaignTask,
    run_id: str,
    result: CampaignResult,
    provenance: Provenance,
    seconds: float,
) -> Concluded:
    verdict, candidate = result.verdict, result.candidate
    conclusion: Conclusion = result.conclusion
    reason = result.reason
    if conclusion == "won" and not _stands(verdict, candidate):
        conclusion, reason = "failed", "the executor reports a win without a confirming verdict of the ruler"
    speedup = verdict.speedup if verdict is not None else None
    promoted = None
    if conclusion == "won" and candidate is not None and verdict is not None:
        promoted = Promoted(task.problem, candidate, verdict.id, tuple(dict(shape) for shape in result.shapes))
    outcome = Outcome(
        campaign_id=task.campaign_id,
        run_id=run_id,
        idea_id=task.idea.id,
        operator=task.idea.operator,
        lever=task.idea.lever,
        problem_name=task.problem.name,
        conclusion=conclusion,
        reason=reason,
        candidate_id=candidate.id if candidate else None,
        verdict_id=verdict.id if verdict else None,
        speedup=speedup.estimate if speedup else None,
        low=speedup.low if speedup else None,
        high=speedup.high if speedup else None,
        attempts=len(result.attempts),
        seconds=seconds,
        parameters=to_json(result.parameters),
        shapes=tuple(dict(shape) for shape in result.shapes),
        axes=dict(task.idea.axes) or task.problem.axis_values(task.problem.visible[0]),
        dtype=task.problem.inputs[0].dtype,
        constraints={"threads": task.threads, "budget_s": task.budget_s} | to_json(result.constraints),
        claims=to_json(result.claims),
        provenance=provenance,
        at=now(),
    )
    claim = verdict.claim if verdict else None
    write_json(folder / "result.json", {"promoted": to_json(promoted), "claim": claim})
    write_json(folder / "outcome.json", to_json(outcome))
    store.write(outcome)
    return Concluded(outcome, promoted, claim)


def _stands(verdict: Verdict | None, candidate: Candidate | None) -> bool:
    return (
        verdict is not None
        and candidate is not None
        and verdict.status == "valid"
        and verdict.mode == "confirm"
        and verdict.candidate_id == candidate.id
        and bool(verdict.faster)
    )
