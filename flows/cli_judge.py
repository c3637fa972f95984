"""`roofloop judge`: the ruler on one candidate that a person brings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flows.cli_common import UNBOUNDED, UNSET, JsonOption, WorkspaceOption, open_workspace, print_json, quiet, words
from kernels.errors import InputError

if TYPE_CHECKING:
    from kernels.ruler.floor import Ceilings
    from kernels.ruler.spec import Candidate, Problem
    from tasks.workspace import Workspace


def judge(  # noqa: PLR0917
    problem: Annotated[
        str | None,
        typer.Argument(help="rmsnorm, softmax, matmul, silu_mul, a KernelBench .py or a FlashInfer-Trace .json."),
    ] = None,
    candidate: Annotated[
        Path | None, typer.Argument(help="A .cpp, a .py, or a FlashInfer-Trace Solution .json.")
    ] = None,
    suite: Annotated[
        Path | None, typer.Option(help="Judge every .py and .cpp below this folder; stop it and it goes on later.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare with this candidate instead of eager, vendor and torch.compile.")
    ] = None,
    mode: Annotated[
        Literal["screen", "confirm"], typer.Option(help="One shape and eager only, or all shapes and all baselines.")
    ] = "confirm",
    budget: Annotated[str, typer.Option(help="Time for measuring.")] = "30s",
    threads: Annotated[int, typer.Option(min=1, help="Cores that either side may use.")] = 1,
    cache: Annotated[
        Literal["warm", "cold"], typer.Option(help="Whether weights lie in the caches when a call begins.")
    ] = "warm",
    device: Annotated[str, typer.Option(help="cpu, or cuda:0 and the like for a candidate in Python.")] = "cpu",
    as_json: JsonOption = False,
    workspace: WorkspaceOption = UNSET,
) -> None:
    """Judge one candidate: whether it is right, and how much faster it is.

    Exit code 0 whatever the verdict. The floor of physics is enforced where this machine's ceilings have been measured
    (roofloop target measure, or any run).
    """
    from kernels import problems
    from kernels.ruler.judge import close
    from kernels.ruler.judge import judge as rule
    from profiles.load import parse_duration

    budget_s = parse_duration(budget, key="--budget")
    if suite is not None:
        how = {"mode": mode, "budget_s": budget_s, "threads": threads, "device": device, "cache_state": cache}
        _judge_suite(suite, problem, candidate, against, open_workspace(workspace), as_json, how)
        return
    if problem is None or candidate is None:
        raise InputError("A problem and a candidate are needed.", key="PROBLEM CANDIDATE",
                         remedy="roofloop judge softmax my_kernel.cpp, or roofloop judge --suite FOLDER")  # fmt: skip
    one = problems.load(problem)
    subject = read_candidate(candidate, one)
    rival = read_candidate(against, one) if against else None
    place = open_workspace(workspace)
    with quiet(place, "judge") as streams:
        try:
            verdict = rule(
                one, subject, mode=mode, ceilings=_ceilings(place, one, threads, device), threads=threads,
                builds=place.builds, budget_s=budget_s, baseline=rival, device=device, cache_state=cache,
            )  # fmt: skip
        finally:
            close()
        document = verdict.to_json()
        if as_json:
            print_json(document, streams.out)
        else:
            streams.out.write("\n".join(verdict_lines(document)) + "\n")


def _judge_suite(  # noqa: PLR0917
    folder: Path,
    problem: str | None,
    candidate: Path | None,
    against: Path | None,
    place: Workspace,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    from flows.cli_suite import judge_folder, show_folder
    from kernels.ruler.judge import close

    if candidate is not None or against is not None:
        raise InputError("--suite judges a folder: it takes no candidate and no --against.", key="--suite",
                         remedy="Leave them out.")  # fmt: skip
    with quiet(place, "judge") as streams:
        try:
            found = judge_folder(
                folder,
                problem,
                place,
                lambda one: options | {
                    "ceilings": _ceilings(place, one, options["threads"], options["device"]), "builds": place.builds},
                streams,
            )  # fmt: skip
        finally:
            close()
    if as_json:
        print_json(found)
    else:
        show_folder(found)


def read_candidate(file: Path, problem: Problem) -> Candidate:
    """The candidate in a file, by its suffix.

    Raises:
        InputError: it cannot be read, or is of another kind.
    """
    from kernels.ruler.spec import Candidate

    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(
            f"this candidate cannot be read: {why}.", file=file, remedy="Name a readable .cpp, .py or .json file."
        ) from error
    if file.suffix == ".json":
        from kernels.problems.flashinfer import load_solution

        return load_solution(file)
    if file.suffix in (".cpp", ".cc", ".cxx"):
        prepares = f"prepare_{problem.operator}" in source
        return Candidate("cpp", source, f"run_{problem.operator}", prepares=prepares, origin=f"file:{file.name}")
    if file.suffix != ".py":
        raise InputError(
            f"a {file.suffix or 'nameless'} file is no candidate.", file=file, remedy="Use .cpp, .py or .json."
        )
    if "class ModelNew" in source:
        from kernels.problems.kernelbench import load_candidate

        return load_candidate(file)
    language = "triton" if "triton.jit" in source else "torch"
    return Candidate(language, source, "run", prepares="def prepare(" in source, origin=f"file:{file.name}")


def _ceilings(place: Workspace, problem: Problem, threads: int, device: str) -> Ceilings | None:
    """Of the smallest visible shape, whose bytes may all lie in a cache: a larger one is never allowed less time."""
    from kernels.ruler.floor import cost
    from profiles import ceilings, roofline

    if device != "cpu" or not any(place.targets.glob(f"{ceilings.fingerprint()}-*.json")):
        return None
    sizes = [sum(cost(problem, shape)[1:]) for shape in problem.visible]
    return roofline.ceilings(ceilings.measure_target(place.targets), threads, min(sizes))


def verdict_lines(verdict: Mapping[str, Any]) -> list[str]:
    """A verdict for people: what it is, by how much, where it went wrong, how it was measured."""
    rows: list[tuple[str, str]] = [("verdict", _outcome(verdict))]
    if verdict["reason"]:
        rows.append(("reason", verdict["reason"].rstrip()))
    if verdict["law"]:
        rows.append(("law", verdict["law"]))
    for shape in verdict["per_shape"]:
        times = f"{shape['baseline_s'] * 1e6:.1f} → {shape['candidate_s'] * 1e6:.1f} µs"
        against = f"against {shape['baseline']}"
        floor = "" if shape["floor_fraction"] is None else f", {shape['floor_fraction']:.0%} of the floor's speed"
        rows.append(
            (f"at {words(shape['shape']) or 'its shape'}", f"{_interval(shape['speedup'])}, {times} {against}{floor}")
        )
    if verdict["claim"] is not None:
        rows.append(("claim", f"{verdict['claim']:.3f}× (the least of several estimators; what promotion counts with)"))
    if verdict["threshold"] is not None:
        rows.append(("to be faster", f"the interval must lie above {verdict['threshold']:.3f}×"))
    error = verdict["first_error"]
    if error:
        wrong = f"; {error['wrong']} of {error['of']} elements are wrong" if error.get("wrong") else ""
        rows.append((
            "first error", f"{error.get('output')}{error.get('index')} at {words(error.get('shape'))}: got "
            f"{error.get('got')}, expected {error.get('expected')} ± {error.get('allowed')}{wrong}",
        ))  # fmt: skip
    cases = verdict["cases"]
    if cases:
        counts = ", ".join(
            f"{cases.get(kind, 0)} {kind} cases ({cases.get(f'{kind}_failed', 0)} failed)"
            for kind in ("visible", "hidden")
        )
        rows.append(("checked", f"{counts}, {cases.get('timed_calls', 0)} timed calls"))
    if verdict["provenance"]:
        evidence = verdict["provenance"].get("evidence")
        rows.append(("provenance", verdict["provenance"]["verdict"] + (f" ({words(evidence)})" if evidence else "")))
    if verdict["confinement"]:
        lacking = verdict["confinement"].get("lacking")
        rows.append(
            ("confinement", verdict["confinement"]["level"] + (f", lacking {words(lacking)}" if lacking else ""))
        )
    rows += [("noise", text)] if (text := _noise(verdict["noise"])) else []
    rows.append(("took", f"{verdict['duration_s']:.1f} s, {verdict['mode']}, {verdict['cache_state']} caches"))
    width = max(len(name) for name, _ in rows)
    indent = "\n" + " " * (width + 2)
    return [f"{name:<{width}}  {text.replace(chr(10), indent)}" for name, text in rows]


def _outcome(verdict: Mapping[str, Any]) -> str:
    if verdict["status"] != "valid":
        return verdict["status"].replace("_", " ")
    speed = verdict["speedup"]
    said = "faster" if verdict["faster"] else "slower" if speed and speed["high"] < 1 else "not faster"
    return f"valid, {said}"


def _interval(speed: Mapping[str, Any]) -> str:
    if speed["high"] > UNBOUNDED:
        return f"{speed['estimate']:.3f}× (no interval, n = {speed['n']})"
    return f"{speed['estimate']:.3f}× [{speed['low']:.3f}, {speed['high']:.3f}], n = {speed['n']}"


def _noise(noise: Mapping[str, Any]) -> str:
    said = []
    if "load_1min" in noise:
        said.append(f"load {noise['load_1min']:.2f}")
    if noise.get("a_a"):
        said.append("the baseline against itself " + ", ".join(f"{value:.3f}×" for value in noise["a_a"]))
    return ", ".join(said)
