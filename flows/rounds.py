"""One round of the loop: profile, plan, campaigns in parallel, end to end for the winners, promote or reject."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prefect import task
from prefect.futures import PrefectFuture, wait
from prefect.task_runners import ThreadPoolTaskRunner

from flows import artifacts
from flows.campaign import bench_of, canaries_of, judged
from flows.steps import step
from flows.terminal import current
from kb.records import Attempt, EndToEnd, Idea, Profile, ProfileRow
from kb.store import Store
from kernels.identity import content_hash
from profiles.engines.base import Promoted, Stack
from profiles.operators import Profile as OperatorProfile
from profiles.reference import Reference
from profiles.roofline import amdahl_limit
from profiles.stats import keep_level
from profiles.workload import higher_is_better
from tasks import profile as profiling
from tasks.agents.offline import OfflineExecutor
from tasks.agents.planner import OfflinePlanner
from tasks.agents.protocol import CampaignTask, Left, Opportunity, PlanContext, SettingsResult
from tasks.codec import from_json
from tasks.evaluate import Comparison, compare
from tasks.execute import Concluded, campaign_id, ended, run_campaign, write_campaign
from tasks.lab import Lab, PointFigures, stock
from tasks.plan import context_of, plan_round, task_for
from tasks.promote import Decision, decide, end_to_end, resource_check
from tasks.record import record, record_end_to_end, record_outcome, start
from tasks.run_state import now, read_json
from tasks.search import SearchResult

LEAST_CAMPAIGN_S = 20.0
"""A campaign in less time than this comes to nothing; where more is planned and not left, it gets what is left."""
NEIGHBOUR_NOISE = 0.25
"""Growth of one operator's time that one profile against another shows on a machine that is not quite quiet."""
NEIGHBOUR_LEAST = 0.02
"""Growth below this share of the wall time is never a reason to reject."""


@dataclass(frozen=True)
class Costs:
    """What things take on this machine with this workload, from the baseline; for keeping time in reserve."""

    compare_s: float
    profile_s: float


def costs(base: PointFigures) -> Costs:
    """Estimate from the baseline: two engines up, warm-up, four pairs of rounds, accuracy of both."""
    compare_s = 2 * base.start_s + 10 * base.round_s + 2 * base.accuracy_s
    return Costs(compare_s=compare_s, profile_s=base.start_s + 4 * base.round_s)


@dataclass
class Course:
    """Where the loop stands: the stack in force grows from round to round."""

    lab: Lab
    store: Store
    reference: Reference
    base: PointFigures
    stack: Stack
    costs: Costs
    campaigns: int = 0
    """Campaigns begun so far."""
    tests: int = 0
    """End-to-end tests made so far: the i-th has its share of the 5 % for one false keep in the run."""
    profiles: dict[str, tuple[OperatorProfile, int]] = field(default_factory=dict)
    """Profile and threads by stack id, of the stacks that were profiled when they were tested."""


@dataclass(frozen=True)
class _Winner:
    task: CampaignTask
    promoted: Promoted
    idea: Idea


def run_round(course: Course, number: int) -> str:
    """Run round `number` (from 1); returns why the loop ends, or an empty text."""
    run = course.lab.run
    profiles = 1 if course.stack.id in course.profiles else 2  # of the stack in force, and of what may take its place
    spare_s = run.clock.left_s() - course.costs.compare_s - profiles * course.costs.profile_s
    planned = run.finished(f"{number}20-plan", _plan_key(course, number)) is not None
    if course.campaigns >= course.lab.workload.budget.campaigns and not planned:
        return "budget: no campaigns are left"
    if spare_s < course.costs.compare_s and not planned:
        return f"budget: {max(0.0, run.clock.left_s()):.0f} s are left, kept for the confirmation of the stack"
    profile, threads = _profile(course, number)
    found = profiling.opportunities(profile)
    context = _context(course, number, found.opportunities, spare_s - course.costs.compare_s)
    plan = _plan(course, number, context, found, threads)
    if plan["stop"]:
        return str(plan["stop"])
    done = _campaigns(course, number, context, plan["campaigns"])
    winners = _record_campaigns(course, context, done, found.opportunities)
    _promote(course, number, winners, profile, found.opportunities)
    return ""


def _plan_key(course: Course, number: int) -> str:
    return course.lab.run.key("plan", number, course.stack.id)


def _profile(course: Course, number: int) -> tuple[OperatorProfile, int]:
    lab, stack = course.lab, course.stack

    def work() -> dict[str, Any]:
        profile, threads = course.profiles.get(stack.id) or lab.profile(stack, f"profile-{number}")
        _remember_profile(course, number, profile)
        return {"profile": profile, "threads": threads}

    def said(held: dict[str, Any]) -> str:
        profile = from_json(OperatorProfile, held["profile"])
        top = max(profile.singles(), key=lambda row: row.time_share)
        return f"{profile.attributed_share:.0%} attributed; {top.operator} takes {top.time_share:.0%}"

    held = step(
        lab.run,
        f"{number}10-profile",
        lab.run.key("profile", stack.id),
        f"Profile, round {number}",
        work,
        said,
        retries=1,
    )
    return from_json(OperatorProfile, held["profile"]), int(held["threads"])


def _remember_profile(course: Course, number: int, profile: OperatorProfile) -> None:
    rows = tuple(
        ProfileRow(
            operator=row.operator,
            shape=" ".join(f"{axis}={value}" for axis, value in row.axes.items()),
            dtype=row.dtype,
            calls=row.calls,
            time_us=row.time_ms * 1e3,
            time_share=row.time_share,
            flops=(row.flops or 0.0) / max(1, row.calls),
            bytes=((row.bytes_read or 0.0) + (row.bytes_written or 0.0)) / max(1, row.calls),
            roofline_us=None if row.roofline_ms is None else row.roofline_ms * 1e3 / max(1, row.calls),
            bound=row.bound,
            headroom=row.gap,
        )
        for row in profile.rows
    )
    run_id = course.lab.run.run_id
    record(
        course.store,
        [
            Profile(
                id=content_hash([run_id, number, course.stack.id])[:16],
                run_id=run_id,
                round=number,
                stack_id=course.stack.id,
                wall_us=profile.wall_ms * 1e3,
                attributed_share=profile.attributed_share,
                rows=rows,
                provenance=course.lab.provenance(course.base.resolved.version),
                at=now(),
            )
        ],
    )


def _context(course: Course, number: int, opportunities: tuple[Opportunity, ...], left_s: float) -> PlanContext:
    lab, run, budget = course.lab, course.lab.run, course.lab.workload.budget
    held = run.stage_file("040-settings")
    search = from_json(SearchResult, (read_json(held) or {})["result"])
    peers = [peer for peer in lab.workload.peers if peer.metric == lab.workload.objective]
    ratio = max(
        (peer.value / (search.default_first or peer.value) for peer in peers if higher_is_better(peer.metric)),
        default=None,
    )
    best = next((t.value for t in search.trials if t.number == search.best_trial), search.default_first)
    return context_of(
        course.store,
        run_id=run.run_id,
        round_number=number,
        target=run.record.fingerprint,
        target_family=lab.target.kind,
        engine=course.base.resolved.version,
        dtype=lab.workload.model.dtype,
        opportunities=opportunities,
        settings=SettingsResult(lab.workload.objective, search.default_first, best, search.best.knobs, search.trials),
        left=Left(left_s, budget.campaigns - course.campaigns, budget.tokens, budget.dollars),
        campaign_s=min(budget.campaign_s, max(LEAST_CAMPAIGN_S, left_s)),
        peer_ratio=ratio,
        seed=run.record.seed,
    )


def _plan(course: Course, number: int, context: PlanContext, found: profiling.Found, threads: int) -> dict[str, Any]:
    lab, run, budget = course.lab, course.lab.run, course.lab.workload.budget

    def work() -> dict[str, Any]:
        count = min(budget.parallel, budget.campaigns - course.campaigns)
        plan = plan_round(course.store, OfflinePlanner(), context, count=max(1, count), layers=("framework", "kernel"))
        ids = []
        for idea in plan.ideas:
            key = campaign_id(run.run_id, idea.id, idea.problem_id or "", run.record.fingerprint, threads)
            work_s = context.campaign_s
            opportunity = next(o for o in context.opportunities if o.problem.name == idea.problem_name)
            one = task_for(
                course.store, context, idea, campaign_id=key, budget_s=work_s, threads=threads,
                builds=lab.workspace.builds, cache_state=lab.cache_state(opportunity.problem),
            )  # fmt: skip
            provenance = lab.provenance(course.base.resolved.version)
            write_campaign(
                run.folder / "campaigns" / key, one, run_id=run.run_id, round_number=number, provenance=provenance
            )
            ids.append(key)
        return {
            "campaigns": ids, "ideas": plan.ideas, "stop": plan.stop, "no_executor": found.no_executor,
            "passed_over": plan.passed_over,
        }  # fmt: skip

    def said(held: dict[str, Any]) -> str:
        return held["stop"] or "; ".join(f"{idea['lever']} ({idea['problem_name']})" for idea in held["ideas"])

    held = step(run, f"{number}20-plan", _plan_key(course, number), f"Plan, round {number}", work, said)
    course.campaigns += len(held["campaigns"])
    return dict(held)


@task(name="campaign", task_run_name="campaign {title}", persist_result=False)
def _campaign(title: str, course: Course, key: str, context: PlanContext) -> str:
    run = course.lab.run
    folder = run.folder / "campaigns" / key
    held = read_json(folder / "campaign.json") or {}
    one = from_json(CampaignTask, held["task"])
    start(course.store, one, run.run_id)
    display = current()

    def progress(attempt: Attempt) -> None:
        speed = "" if attempt.speedup is None else f" {attempt.speedup:.2f}×"
        display.detail(f"{one.problem.name}: attempt {attempt.number} {attempt.status}{speed}")

    done = run_campaign(
        folder,
        course.store,
        OfflineExecutor(),
        bench_of(course.lab, one.threads),
        canaries=canaries_of(run.seed("canaries", key)),
        progress=progress,
        step=judged,
    )
    said = done.outcome.reason
    display.say(f"  {title}: {done.outcome.conclusion.replace('_', ' ')}. {said}")
    artifacts.campaign_page(run, key, course.store)
    return f"{done.outcome.conclusion}: {said}"


def _campaigns(course: Course, number: int, context: PlanContext, keys: list[str]) -> list[tuple[str, Concluded]]:
    run, folder = course.lab.run, course.lab.run.folder / "campaigns"

    def work() -> dict[str, Any]:
        workers: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(
            max_workers=max(1, course.lab.workload.budget.parallel)
        )
        with workers as runner:
            futures: list[PrefectFuture[str]] = []
            for key in keys:
                held = read_json(folder / key / "campaign.json") or {}
                one = from_json(CampaignTask, held["task"])
                title = f"{one.problem.operator} · {', '.join(one.families) or 'free'} · round {number}"
                futures.append(
                    runner.submit(_campaign, {"title": title, "course": course, "key": key, "context": context})
                )
            wait(futures)
        rows = []
        for key, future in zip(keys, futures, strict=True):
            outcome = read_json(folder / key / "outcome.json")
            if outcome is None:
                future.result(raise_on_failure=True)
                raise RuntimeError(f"campaign {key} ended without an outcome")
            rows.append({"campaign_id": key, "conclusion": outcome["conclusion"], "reason": outcome["reason"]})
        return {"campaigns": rows}

    def said(held: dict[str, Any]) -> str:
        return ", ".join(row["conclusion"].replace("_", " ") for row in held["campaigns"])

    step(run, f"{number}30-campaigns", run.key("campaigns", *keys), f"Campaigns, round {number}", work, said)
    found = ((key, ended(folder / key)) for key in keys)
    return [(key, done) for key, done in found if done is not None]


def _record_campaigns(
    course: Course, context: PlanContext, done: list[tuple[str, Concluded]], opportunities: tuple[Opportunity, ...]
) -> list[_Winner]:
    winners = []
    for key, result in done:
        held = read_json(course.lab.run.folder / "campaigns" / key / "campaign.json") or {}
        one = from_json(CampaignTask, held["task"])
        record_outcome(
            course.store, result.outcome, task=one, opportunities=opportunities, peer_ratio=context.peer_ratio
        )
        if result.promoted is not None:
            winners.append(_Winner(one, result.promoted, one.idea))
    return winners


def _promote(
    course: Course,
    number: int,
    winners: list[_Winner],
    before: OperatorProfile,
    opportunities: tuple[Opportunity, ...],
) -> None:
    """All winners in one test, which is the cheapest; where that fails, one by one as far as the time goes."""
    run, costs = course.lab.run, course.costs
    if not winners or _evaluate(course, number, winners, before, opportunities) or len(winners) == 1:
        return
    for winner in winners:
        test = _test(course, number, [winner])
        fits = run.clock.left_s() >= 2 * costs.compare_s + costs.profile_s  # the confirmation of the stack is to come
        if fits or run.finished(test.stage, test.key) is not None:
            _evaluate(course, number, [winner], before, opportunities)


@dataclass(frozen=True)
class _Test:
    """One end-to-end test: the stack with a group's kernels against the stack in force."""

    fresh: Stack
    name: str
    """Of its files: tells the groups of a round apart."""
    stage: str
    key: str


def _test(course: Course, number: int, group: list[_Winner]) -> _Test:
    stack = course.stack
    fresh = Stack(stack.settings, (*_kept(stack, group), *(winner.promoted for winner in group)))
    ids = [winner.task.campaign_id for winner in group]
    name = ids[0] if len(ids) == 1 else content_hash(ids)[:16]
    return _Test(fresh, name, f"{number}40-evaluate-{name}", course.lab.run.key("evaluate", fresh.id, stack.id))


def _evaluate(
    course: Course,
    number: int,
    group: list[_Winner],
    before: OperatorProfile,
    opportunities: tuple[Opportunity, ...],
) -> bool:
    """Measure the stack with the group's kernels against the stack in force; True when they are promoted."""
    lab, run, stack = course.lab, course.lab.run, course.stack
    test = _test(course, number, group)
    fresh = test.fresh
    names = " + ".join(winner.task.problem.name for winner in group)
    course.tests += 1
    place = course.tests

    def work() -> dict[str, Any]:
        raw = f"raw/promotion-{test.name}.json"
        left_s = run.clock.left_s() - course.costs.compare_s - course.costs.profile_s
        found = lab.alone(compare)(
            lambda: lab.open(stack, "promotion-a"),
            lambda: lab.open(fresh, "promotion-b"),
            lab.workload,
            lab.source,
            course.reference,
            max_pairs=course.base.most_pairs,
            level=keep_level(place),
            seed=run.seed("promotion", place),
            deadline=time.monotonic() + max(5 * course.base.round_s, left_s),
            stock=None if stack.id == stock(lab.workload).id else course.base.distance,
            required=tuple(winner.promoted.candidate.id for winner in group),
            amdahl_limit=_amdahl(group, opportunities),
            raw=run.folder / raw,
            progress=lambda text, _: current().detail(f"{names}: {text}"),
        )
        profiled: tuple[OperatorProfile, int] | None = None
        further: tuple[str, ...] = ()
        if found.verdict == "above":  # only where there is a gain to lose
            name = f"profile-with-{test.name}"
            profiled = lab.profile(fresh, name)
            further = _neighbours(group, [before], [profiled[0]], found)
            if further:  # one profile against another, minutes apart, may be the machine: both once more
                current().detail(f"{names}: {further[0]} Looking again.")
                again = lab.profile(stack, f"{name}-before")[0], lab.profile(fresh, f"{name}-again")[0]
                further = _neighbours(group, [before, again[0]], [profiled[0], again[1]], found)
        decision = decide(found, further=further)
        rows = _rows(course, group, found, decision, fresh, raw)
        for row in rows:
            record_end_to_end(course.store, row, opportunities=opportunities)
        promoted = decision.decision == "promoted"
        return {
            "end_to_end": rows[0], "decision": decision, "stack": fresh if promoted else stack, "promoted": promoted,
            "comparison": found, "campaigns": [winner.task.campaign_id for winner in group],
            "profile": profiled and profiled[0], "threads": profiled and profiled[1],
        }  # fmt: skip

    def said(held: dict[str, Any]) -> str:
        row = held["end_to_end"]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}× [{row['low']:.2f}, {row['high']:.2f}], "
        return f"{ratio}{held['decision']['decision']}. {held['decision']['reason']}"

    held = step(run, test.stage, test.key, f"End to end: {names}", work, said, retries=1)
    course.stack = from_json(Stack, held["stack"])
    value = held["comparison"]["b_value"]
    if held["promoted"] and value is not None:
        current().best(f"with {names}, {value:.4g} {lab.workload.objective}")
    if held.get("profile"):
        course.profiles[fresh.id] = from_json(OperatorProfile, held["profile"]), int(held["threads"])
    return bool(held["promoted"])


def _kept(stack: Stack, group: list[_Winner]) -> list[Promoted]:
    """Kernels of the stack that the group does not stand in for."""
    problems = {winner.promoted.problem.id for winner in group}
    return [kernel for kernel in stack.kernels if kernel.problem.id not in problems]


def _amdahl(group: list[_Winner], opportunities: tuple[Opportunity, ...]) -> float | None:
    shares = {one.problem.name: one.time_share for one in opportunities}
    known = [shares.get(winner.task.problem.name) for winner in group]
    if any(share is None for share in known):
        return None
    return amdahl_limit(min(0.99, sum(share for share in known if share is not None)))


def _neighbours(
    group: list[_Winner], before: list[OperatorProfile], after: list[OperatorProfile], found: Comparison
) -> tuple[str, ...]:
    """Whether the operators that were not touched became slower: the fastest time after beyond the slowest before."""
    touched = {winner.task.problem.operator for winner in group}
    for winner in group:
        touched |= {one for row in before[0].rows if row.operator == winner.task.problem.operator for one in row.covers}
        touched |= {row.operator for row in before[0].singles() if set(row.sites) & set(winner.idea.sites)}
    return resource_check(
        _by_operator(before, max),
        _by_operator(after, min),
        replaced=tuple(touched),
        noise_floor=NEIGHBOUR_NOISE,
        least_ms=NEIGHBOUR_LEAST * before[0].wall_ms,
        before_memory_bytes=found.a_peak_memory_bytes,
        after_memory_bytes=found.b_peak_memory_bytes,
        allowed_memory_bytes=1 << 30,
    )


def _by_operator(profiles: list[OperatorProfile], choose: Callable[[list[float]], float]) -> dict[str, float]:
    """Milliseconds of each operator, one figure chosen from those of several profiles."""
    times: dict[str, list[float]] = {}
    for place, profile in enumerate(profiles):
        for row in profile.singles():
            if row.kind == "single":
                mine = times.setdefault(row.operator, [0.0] * len(profiles))
                mine[place] += row.time_ms
    return {operator: choose(several) for operator, several in times.items()}


def _rows(  # noqa: PLR0917
    course: Course, group: list[_Winner], found: Comparison, decision: Decision, fresh: Stack, raw: str
) -> list[EndToEnd]:
    """One row for each idea of the group: where several were tested as one, all have its figures."""
    rows = []
    for winner in group:
        row = end_to_end(
            found, decision, run_id=course.lab.run.run_id, purpose="promotion", stack_id=fresh.id,
            against_stack_id=course.stack.id, provenance=course.lab.provenance(course.base.resolved.version),
            idea_id=winner.idea.id, raw_file=raw,
        )  # fmt: skip
        if len(group) > 1:
            others = ", ".join(other.task.problem.name for other in group if other is not winner)
            row = row.model_copy(
                update={
                    "id": content_hash([row.id, winner.idea.id])[:16],
                    "reason": f"Tested together with {others}. {row.reason}",
                }
            )
        rows.append(row)
    return rows
