"""One run on disk: who it is, what is finished, how much of its budget is spent.

The files are the truth; Prefect's rows are a view of them. A run killed at any point is continued from here, even when
Prefect's database is lost. Everything is JSON, written to a temporary name and renamed.

```
runs/<run_id>/
  run.json           identity and status, see `RunRecord`
  clock.json         {"spent_s": seconds worked on this run so far, over all processes}
  progress.json      {"stage", "title", "best", "best_what", "pid", "pid_started", "updated_at"}: the live view
  events.jsonl       one line per thing that happened: {"at", "spent_s", "event", ...}
  stages/NNN-name.json   one per finished stage, see below
  campaigns/<campaign_id>/
    campaign.json    the `tasks.agents.protocol.CampaignTask`
    attempts/NNNN.json     the `kb.records.Attempt`, written as soon as its verdict is there
    candidates/<candidate id>.json   the `kernels.ruler.spec.Candidate`
    verdicts/<verdict id>.json       the `kernels.ruler.verdict.Verdict`
    canaries.json    what the ruler said of known cheats and honest oddities beside this campaign
    outcome.json     the `kb.records.Outcome`; its presence means that the campaign is concluded
    result.json      {"conclusion", "reason", "promoted": Promoted | null, "claim", ...}: what the end-to-end step needs
  engines/           logs of engine children
  raw/               untouched raw results of rounds and profiles, named in the stages that use them
  report.html, report.json, stack/   by `tasks.report`
```

A stage file is `{"schema_version": 1, "stage", "title", "key", "started_at", "seconds", "result"}`. `key` is the hash
of what the stage depended on (run, machine, workload, earlier results): a file with another key is measured again. The
stages of a run, with what `result` holds (records as JSON):

* `010-target`      {"target": Target}
* `020-bringup`     what `tasks.bringup.bringup` found
* `030-baseline`    stock engine, stock settings: what `tasks.search` measured as trial 0
* `040-settings`    {"settings": Settings, "trials": [Trial], ...}: best settings under the gates
* per round r = 1, 2, …:
  * `r10-profile`   operators, attribution and opportunities
  * `r20-plan`      {"campaigns": [campaign_id], "ideas": [Idea], "stop": why nothing was planned, or null}
  * `r30-campaigns` {"campaigns": [{"campaign_id", "conclusion", "reason"}]}
  * `r40-evaluate-<campaign_id>`  {"end_to_end": EndToEnd, "stack": Stack after the decision, "promoted": bool,
    "campaigns": [campaign_id], ...}; named by a hash of the ids where several were tested together
  * `r50-record`    rescored ideas
* `900-final`       {"end_to_end": EndToEnd of the final stack against stock in fresh engines, "stack": Stack}
* `910-report`      {"html", "json"}
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from kernels.errors import InputError
from kernels.identity import content_hash
from profiles.records import Record
from profiles.workload import Workload

RunStatus = Literal["running", "finished", "failed", "interrupted"]


class RunRecord(Record):
    """`run.json`."""

    schema_version: Literal[1] = 1
    run_id: str
    workload: Workload
    workload_file: str = ""
    """Where the workload was read from; empty when it came by name."""
    workload_hash: str
    """Hash of the workload without its budget, name of peers and description: what makes two runs the same work."""
    seed: int
    """Everything that is drawn in the run derives from it, except the ruler's and the driver's secrets."""
    fingerprint: str
    """Of the machine, see `profiles.ceilings.fingerprint`."""
    agents: str = "offline"
    started_at: str
    status: RunStatus = "running"
    reason: str = ""
    """Why the run stopped, in a sentence."""
    finished_at: str | None = None
    versions: dict[str, str] = {}


def now() -> str:
    """The time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_json(path: Path, value: Any) -> Path:
    """Write JSON so that a reader sees the old file or the whole new one, also after a power cut.

    Raises:
        OSError: the disk is full or not writable; nothing has changed then.
        ValueError: the value holds NaN or an infinity.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_json(path: Path) -> Any | None:
    """What the file holds; None when it is not there or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def workload_hash(workload: Workload) -> str:
    """Hash of what a workload asks to be made fast. The budget, the peers and the words about it are no part of it."""
    return content_hash(workload.model_dump(mode="json", exclude={"budget", "peers", "description"}))


def derive_seed(seed: int, *what: str | int) -> int:
    """A 31-bit seed for one use, from the run's seed and the name of the use."""
    return int(content_hash([seed, *what])[:8], 16) & 0x7FFFFFFF


class Clock:
    """The one clock of a run: seconds worked on it, this process and all before it, from the monotonic clock.

    A pause between a kill and the next start costs nothing, a jump of the wall clock changes nothing.
    """

    def __init__(self, file: Path, budget_s: float) -> None:
        self._file = file
        self._before_s = float((read_json(file) or {}).get("spent_s", 0.0))
        self._start = time.monotonic()
        self.budget_s = budget_s

    def spent_s(self) -> float:
        """Seconds spent so far."""
        return self._before_s + time.monotonic() - self._start

    def left_s(self) -> float:
        """Seconds left of the budget; negative when it is overdrawn."""
        return self.budget_s - self.spent_s()

    def save(self) -> None:
        """Write down what is spent, so that a resumed run goes on from there."""
        write_json(self._file, {"spent_s": round(self.spent_s(), 3), "budget_s": self.budget_s})


@dataclass(frozen=True)
class RunState:
    """One run's folder and its clock."""

    folder: Path
    record: RunRecord
    clock: Clock

    @property
    def run_id(self) -> str:
        """Name of the run's folder."""
        return self.record.run_id

    def seed(self, *what: str | int) -> int:
        """A seed for one use in this run."""
        return derive_seed(self.record.seed, *what)

    def key(self, *content: Any) -> str:
        """Key of a stage: run, machine and the content that it depends on."""
        return content_hash([self.run_id, self.record.fingerprint, self.record.workload_hash, *content])

    def stage_file(self, stage: str) -> Path:
        """File of the finished stage."""
        return self.folder / "stages" / f"{stage}.json"

    def finished(self, stage: str, key: str) -> Any | None:
        """Result of the stage if it was finished with this key, else None."""
        held = read_json(self.stage_file(stage))
        return held["result"] if isinstance(held, dict) and held.get("key") == key and "result" in held else None

    def finish(self, stage: str, key: str, title: str, result: Any, *, started_at: str, seconds: float) -> None:
        """Write down a finished stage."""
        envelope = {"schema_version": 1, "stage": stage, "title": title, "key": key, "started_at": started_at}
        write_json(self.stage_file(stage), envelope | {"seconds": round(seconds, 3), "result": result})
        self.clock.save()

    def stages(self) -> list[dict[str, Any]]:
        """All finished stages in order, without their results."""
        held = [read_json(file) for file in sorted((self.folder / "stages").glob("*.json"))]
        return [{k: v for k, v in stage.items() if k != "result"} for stage in held if isinstance(stage, dict)]

    def event(self, event: str, **fields: Any) -> None:
        """Append one line to `events.jsonl`."""
        line = json.dumps({"at": now(), "spent_s": round(self.clock.spent_s(), 3), "event": event} | fields)
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def progress(self, **fields: Any) -> None:
        """Renew the live view that `roofloop status` shows."""
        me = {"pid": os.getpid(), "pid_started": psutil.Process().create_time(), "updated_at": now()}
        write_json(self.folder / "progress.json", fields | me)

    def with_status(self, status: RunStatus, reason: str = "", **fields: Any) -> RunState:
        """Write a new status into `run.json`."""
        ended = None if status in ("running", "interrupted") else now()
        changes = {"status": status, "reason": reason, "finished_at": ended} | fields
        record = self.record.model_copy(update=changes)
        write_json(self.folder / "run.json", record.model_dump(mode="json"))
        return RunState(self.folder, record, self.clock)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run: one process works on it. The kernel frees it when that process dies.

        Raises:
            InputError: another process holds it.
        """
        with (self.folder / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    "another process is working on this run.",
                    file=self.folder,
                    remedy="Wait for it (see `roofloop status`), or start another run with --new.",
                ) from None
            yield


def create_run(
    runs: Path,
    workload: Workload,
    *,
    seed: int,
    fingerprint: str,
    agents: str = "offline",
    workload_file: str = "",
    versions: dict[str, str] | None = None,
) -> RunState:
    """Make a new run's folder."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    run_id = f"{workload.name}-{stamp}-{secrets.token_hex(2)}"
    record = RunRecord(
        run_id=run_id,
        workload=workload,
        workload_file=workload_file,
        workload_hash=workload_hash(workload),
        seed=seed,
        fingerprint=fingerprint,
        agents=agents,
        started_at=now(),
        versions=versions or {},
    )
    folder = runs / run_id
    folder.mkdir(parents=True)
    write_json(folder / "run.json", record.model_dump(mode="json"))
    return RunState(folder, record, Clock(folder / "clock.json", workload.budget.wall_s))


def open_run(folder: Path) -> RunState:
    """Open a run's folder.

    Raises:
        InputError: there is no readable `run.json` in it.
    """
    held = read_json(folder / "run.json")
    try:
        record = RunRecord.model_validate(held)
    except ValueError:
        raise InputError(
            "this is no run that this version can read.",
            file=folder / "run.json",
            remedy="List the runs with `roofloop status`.",
        ) from None
    return RunState(folder, record, Clock(folder / "clock.json", record.workload.budget.wall_s))


def list_runs(runs: Path, accept: Callable[[RunRecord], bool] = lambda _: True) -> list[RunState]:
    """Readable runs that are accepted, newest first."""
    found = []
    for file in runs.glob("*/run.json"):
        with contextlib.suppress(InputError):
            state = open_run(file.parent)
            if accept(state.record):
                found.append(state)
    return sorted(found, key=lambda state: (state.record.started_at, state.run_id), reverse=True)


def unfinished_run(runs: Path, workload: Workload, fingerprint: str, seed: int | None) -> RunState | None:
    """The newest unfinished run of the same work on the same machine (and seed, if one is asked for)."""
    digest = workload_hash(workload)

    def same(record: RunRecord) -> bool:
        return (
            record.workload_hash == digest
            and record.fingerprint == fingerprint
            and record.status in ("running", "interrupted", "failed")
            and seed in (None, record.seed)
        )

    found = list_runs(runs, same)
    return found[0] if found else None


def with_budget(state: RunState, workload: Workload) -> RunState:
    """The run under the budget that is asked for now; what is spent stays spent."""
    if state.record.workload.budget == workload.budget:
        return state
    record = state.record.model_copy(update={"workload": workload})
    write_json(state.folder / "run.json", record.model_dump(mode="json"))
    return RunState(state.folder, record, Clock(state.folder / "clock.json", workload.budget.wall_s))
