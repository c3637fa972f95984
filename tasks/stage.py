"""One stage of a run as one Prefect task: done once, its result in its stage file, visible in the UI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext

from profiles.engines.base import EngineFailure
from tasks.codec import to_json
from tasks.run_state import RunState, now


def _cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    return f"{parameters['stage']}-{parameters['key']}"


async def _engine_failed(_task: Any, _run: TaskRun, state: State) -> bool:
    """A retry helps where an engine process did not come up or fell over, and nowhere else."""
    result = await state.aresult(raise_on_failure=False)
    return isinstance(result, EngineFailure)


@task(
    name="stage",
    task_run_name="{title}",
    cache_policy=CacheKeyFnPolicy(cache_key_fn=_cache_key),
    persist_result=True,
    result_serializer="json",
)
def _stage(title: str, stage: str, key: str, run: RunState, work: Callable[[], Any]) -> dict[str, str]:
    if run.finished(stage, key) is None:
        started_at, start = now(), time.monotonic()
        result = to_json(work())
        run.finish(stage, key, title, result, started_at=started_at, seconds=time.monotonic() - start)
    return {"stage": stage, "file": str(run.stage_file(stage))}


def run_stage(
    run: RunState,
    stage: str,
    key: str,
    title: str,
    work: Callable[[], Any],
    *,
    retries: int = 0,
    tags: Sequence[str] = (),
) -> Any:
    """Do a stage unless it is finished, and return its result as JSON.

    Args:
        run: the run it belongs to.
        stage: name of its file, see `tasks.run_state`.
        key: hash of what it depends on; a finished stage with another key is done again.
        title: how the UI names it.
        work: does it; what it returns must have a JSON form that is not None.
        retries: how often to try again when an engine process failed.
        tags: for the UI, beside the run's.
    """
    lost = run.finished(stage, key) is None  # what Prefect remembers of it is then worth nothing
    configured = _stage.with_options(
        name=stage.split("-")[1],
        tags=[*tags, "stage", stage],
        retries=retries,
        retry_condition_fn=_engine_failed if retries else None,
        refresh_cache=lost,
    )
    configured(title, stage, key, run, work)
    return run.finished(stage, key)
