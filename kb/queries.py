"""Rows for `roofloop kb ...` and for the report. Each function returns plain dicts."""

from __future__ import annotations

from typing import Any

import duckdb

from kb import clock, ideas, ledger
from kb.store import IngestReport, Store
from kernels.errors import InputError

Row = dict[str, Any]


def runs(store: Store) -> list[Row]:
    """Runs that have ideas, newest first, with their numbers of ideas and outcomes."""
    return store.query(
        """SELECT s.run_id, min(s.at_utc) AS began, (SELECT count(*) FROM ideas i WHERE i.run_id = s.run_id) AS ideas,
             (SELECT count(*) FROM outcomes o WHERE o.run_id = s.run_id) AS outcomes
           FROM scopes s GROUP BY s.run_id ORDER BY began DESC, s.run_id"""
    )


def outcomes(store: Store, *, run_id: str | None = None, limit: int = 50) -> list[Row]:
    """Outcomes, newest first, with the end-to-end decision where there was one."""
    return store.query(
        """SELECT o.campaign_id, o.run_id, o.idea_id, o.operator, o.lever, o.problem_name, o.conclusion, o.speedup,
             o.low, o.high, o.attempts, o.seconds, o.reason, o.at_utc, e.decision, e.ratio AS end_to_end_ratio
           FROM outcomes o
           LEFT JOIN (SELECT * FROM end_to_end WHERE purpose = 'promotion'
               QUALIFY row_number() OVER (PARTITION BY run_id, idea_id ORDER BY at_utc DESC) = 1) e
             ON e.run_id = o.run_id AND e.idea_id = o.idea_id
           WHERE $run IS NULL OR o.run_id = $run ORDER BY o.at_utc DESC, o.id LIMIT $limit""",
        {"run": run_id, "limit": limit},
    )


def lessons(store: Store, *, operator: str | None = None, every: bool = False) -> list[Row]:
    """Lessons with their record; `every` also shows those that expired or were retired."""
    return store.query(
        """SELECT id, operator, axes, dtype, target, engine, lever, statement, parameters, speedup, wins, losses,
             last_confirmed, expires, retired, source FROM lessons_now
           WHERE ($operator IS NULL OR operator = $operator)
             AND ($every OR (retired IS NULL AND (expires IS NULL OR expires > $now)))
           ORDER BY operator, wins - losses DESC, id""",
        {"operator": operator, "every": every, "now": clock.now()},
    )


def tree(store: Store, run_id: str) -> list[Row]:
    """The tree of a run, depth first: `depth`, the idea, its status and reason, and the parts of its latest score.

    Raises:
        InputError: the run has no ideas.
    """
    rows = []
    for depth, node in ideas.depth_first(ideas.load(store, run_id, clock.now)):
        idea, last = node.idea, node.idea.scores[-1] if node.idea.scores else None
        row = idea.model_dump(mode="json", exclude={"scores"})
        parts = last.model_dump(mode="json") if last else {}
        rows.append({**row, **parts, "depth": depth, "excluded": node.excluded, "scored": len(idea.scores)})
    if not rows:
        known = ", ".join(row["run_id"] for row in runs(store)[:5]) or "none yet"
        raise InputError(f"run {run_id!r} has no ideas.", remedy=f"Runs with ideas: {known}.", key=run_id)
    return rows


def actions(store: Store, run_id: str) -> list[Row]:
    """What happened to the ideas of a run, in the order of time."""
    return store.query(
        """SELECT e.at_utc, e.idea_id, i.lever, i.problem_name, e.status, e.reason, e.cause
           FROM idea_events e JOIN ideas i ON i.id = e.idea_id
           WHERE e.run_id = ? AND e.event = 'status' ORDER BY e.at_utc, e.id""",
        [run_id],
    )


def rules(store: Store) -> list[Row]:
    """Rules in force with their record."""
    return store.query("SELECT * FROM rules_now WHERE retired IS NULL ORDER BY wins - losses DESC, id")


def sql(store: Store, text: str) -> list[Row]:
    """Rows of a query on the snapshot; it can neither write nor reach other files.

    Raises:
        InputError: the SQL is wrong or does what it may not.
    """
    try:
        return store.query(text)
    except duckdb.Error as error:
        tables = ", ".join(
            row["table_name"] for row in store.query("SELECT table_name FROM duckdb_tables() ORDER BY 1")
        )
        raise InputError(
            str(error).splitlines()[0] + ".", remedy=f"Tables: {tables}; DESCRIBE one.", key="sql"
        ) from error


def rebuild(store: Store) -> IngestReport:
    """Build the database anew from the record files."""
    return store.rebuild()


def verify(store: Store, *, head: str | None = None) -> ledger.Verification:
    """Check the ledger, the files of verdicts and end-to-end results, and their rows (see `kb.ledger.verify`)."""
    return ledger.verify(store, head=head)
