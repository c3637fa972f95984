"""The memory: nothing is lost, nothing counts twice, whatever is killed, cut off, full or edited."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import duckdb
import pytest

from kb import crashes, files, ledger, lessons, queries, rules
from kb import records as r
from kb.kinds import SCHEMA_VERSION
from kb.store import Store
from kernels.errors import InputError

PROVENANCE = r.Provenance(roofloop="1", ruler="r1", engine="e", target="t", workload="w", target_family="cpu")
AT = "2026-01-01T00:00:00.000000+00:00"


def outcome(number: int | str, **changes: object) -> r.Outcome:
    base = {
        "campaign_id": f"c{number}", "run_id": "run", "idea_id": f"i{number}", "operator": "linear",
        "lever": "linear × template:a", "problem_name": "linear_k576", "conclusion": "won", "reason": "faster",
        "speedup": 1.5, "parameters": {"block": 32}, "axes": {"m": 8, "n": 576, "k": 576}, "dtype": "bfloat16",
        "provenance": PROVENANCE, "at": AT,
    }  # fmt: skip
    return r.Outcome.model_validate({**base, **changes})


def verdict(number: int) -> r.VerdictFile:
    body = {"id": f"v{number}", "status": "valid", "speedup": {"estimate": 1.2, "low": 1.1, "high": 1.3, "n": 9}}
    return r.VerdictFile(id=f"v{number}", run_id="run", verdict=body, at=f"2026-01-01T00:{number % 60:02d}:00+00:00")


def count(store: Store, table: str) -> int:
    return store.query(f"SELECT count(*) AS n FROM {table}")[0]["n"]


def everything(store: Store) -> dict[str, list[dict]]:
    tables = [row["table_name"] for row in store.query("SELECT table_name FROM duckdb_tables() ORDER BY 1")]
    return {t: store.query(f"SELECT * FROM {t} ORDER BY ALL") for t in tables}


def test_each_table_and_column_is_documented(tmp_path: Path) -> None:
    store = Store(tmp_path)
    bare = store.query(
        """SELECT table_name, column_name FROM duckdb_columns() WHERE comment IS NULL AND NOT internal
           AND table_name IN (SELECT table_name FROM duckdb_tables())"""
    )
    assert bare == []
    assert store.query("SELECT * FROM duckdb_tables() WHERE comment IS NULL") == []
    assert {"profiles", "trials", "verdicts", "ideas", "idea_events", "campaigns", "attempts", "outcomes", "end_to_end",
            "lessons", "rules", "crash_sets", "scopes", "claims"} <= set(everything(store))  # fmt: skip


def test_written_twice_counts_once_and_a_rebuild_gives_the_same(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for n in (5, 3, 9, 1):
        store.write(outcome(n))
        store.write(verdict(n))
    store.ingest()
    store.write(outcome(5, seconds=99.0))  # the same campaign again, after a kill: the first one stands
    store.write(verdict(2))
    report = store.ingest()
    assert (report.added, count(store, "outcomes")) == (1, 4)
    assert store.query("SELECT seconds FROM outcomes WHERE id = 'c5'") == [{"seconds": 0.0}]
    before, head = everything(store), report.head
    assert store.rebuild().head == head
    assert everything(store) == before
    assert [row["id"] for row in before["ledger"]] != sorted(row["id"] for row in before["ledger"])


def test_an_ingest_reads_only_what_is_new(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = [store.write(outcome(n)) for n in range(30)]
    store.ingest()
    for path in old:
        path.write_text("unreadable")  # an ingest that read it again would set it aside
    store.write(outcome(99))
    report = store.ingest()
    assert (report.added, report.known, report.set_aside) == (1, 0, ())
    assert not any((tmp_path / "inbox").iterdir())


def test_corrupt_files_are_set_aside_and_the_rest_is_ingested(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cut, edited, odd = store.write(outcome(1)), store.write(outcome(2)), store.write(outcome(3))
    pack = store.write_many([outcome(4), outcome(5)])
    store.write(outcome(6))
    cut.write_bytes(cut.read_bytes()[:100])
    edited.write_bytes(edited.read_bytes().replace(b'"speedup":1.5', b'"speedup":9.5'))
    odd.write_bytes(odd.read_bytes().replace(b'"kind":"outcomes"', b'"kind":"nonsense"'))
    assert pack is not None
    pack.write_bytes(pack.read_bytes().replace(b'"c4"', b'"c7"'))
    report = store.ingest()
    assert {row["id"] for row in store.query("SELECT id FROM outcomes")} == {"c5", "c6"}
    assert len(report.set_aside) == 4
    assert any("hash" in why for _, why in report.set_aside)
    assert all((tmp_path / "aside" / f"{name}.why").exists() for name, _ in report.set_aside)
    assert store.ingest().set_aside == ()
    store.rebuild()
    assert count(store, "outcomes") == 2


def test_newer_schema_is_refused_and_older_one_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    path = store.write(outcome(1))
    store.ingest()
    monkeypatch.setattr("kb.store.SCHEMA_VERSION", SCHEMA_VERSION + 1)
    monkeypatch.setattr("kb.files.SCHEMA_VERSION", SCHEMA_VERSION + 1)
    monkeypatch.setitem(files.MIGRATIONS, SCHEMA_VERSION, lambda kind, record: {**record, "reason": "migrated"})
    with pytest.raises(InputError, match="kb rebuild"):
        store.query("SELECT 1")
    store.ingest()
    assert store.query("SELECT reason FROM outcomes") == [{"reason": "migrated"}]
    monkeypatch.undo()
    with pytest.raises(InputError, match="Upgrade"):
        store.query("SELECT 1")
    with pytest.raises(InputError, match="Upgrade"):
        store.ingest()
    record = json.loads(path.read_bytes())
    record["schema_version"] = SCHEMA_VERSION + 1
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match="schema version"):
        store.rebuild()
    assert path.exists()


WRITER = """
    import sys
    from pathlib import Path
    sys.path[:0] = {paths!r}
    from test_kb import outcome, verdict
    from kb.store import Store
    store, who = Store(Path({root!r}), threads=1), {who}
    print("go", flush=True)
    for n in range({count}):
        store.write(outcome(who * 1000 + n))
        store.write(verdict(who * 1000 + n))
        print(who * 1000 + n, flush=True)
        if n % {every} == 0:
            store.ingest()
"""


def writer(root: Path, who: int, number: int = 24, every: int = 10) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    code = WRITER.format(paths=[str(here), str(here.parent)], root=str(root), who=who, count=number, every=every)
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)


def test_two_processes_that_write_and_ingest_at_once_lose_nothing(tmp_path: Path) -> None:
    both = [writer(tmp_path, 1), writer(tmp_path, 2)]
    assert [p.communicate() and p.returncode for p in both] == [0, 0]
    store = Store(tmp_path)
    store.ingest()
    assert (count(store, "outcomes"), count(store, "verdicts"), count(store, "ledger")) == (48, 48, 48)
    assert ledger.verify(store).ok


def test_sigkill_while_writing_and_ingesting_loses_nothing(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    acknowledged: set[str] = set()
    store = Store(tmp_path, threads=1)
    for who in range(1, 6):
        child = writer(tmp_path, who, number=500, every=2)
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
        time.sleep(draw.uniform(0.0, 0.25))
        os.kill(child.pid, signal.SIGKILL)
        acknowledged |= {f"c{line.strip()}" for line in child.communicate()[0].splitlines(True) if line.endswith("\n")}
    store.ingest()
    rows = [row["id"] for row in store.query("SELECT id FROM outcomes")]
    assert acknowledged <= set(rows)
    assert len(rows) == len(set(rows)) <= len(acknowledged) + 5
    assert ledger.verify(store).ok
    before, head = everything(store), ledger.head(tmp_path)
    assert store.rebuild().head == head
    assert everything(store) == before
    assert not list(tmp_path.glob("building-*"))


def test_killed_between_ledger_and_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write(verdict(1))
    store.ingest()
    store.write(verdict(2))
    kept = list((tmp_path / "inbox").iterdir())
    monkeypatch.setattr("kb.store._insert", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.ingest()
    monkeypatch.undo()
    assert list((tmp_path / "inbox").iterdir()) == kept
    assert count(store, "verdicts") == 1
    store.ingest()
    assert (count(store, "verdicts"), count(store, "ledger")) == (2, 2)
    assert ledger.verify(store).ok


def test_full_disk_and_unwritable_folder_are_told_and_lose_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        Store(blocked).write(outcome(1))
    with pytest.raises(InputError, match="cannot be written"):
        Store(blocked).ingest()
    here = Path(__file__).parent
    code = f"""
        import resource, sys
        from pathlib import Path
        sys.path[:0] = {[str(here), str(here.parent)]!r}
        from test_kb import outcome
        from kb.store import Store
        from kernels.errors import InputError
        store = Store(Path({str(tmp_path / "kb")!r}))
        store.write(outcome(1)); store.ingest(); store.write(outcome(2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for act in (lambda: store.write(outcome(3, reason="x" * 9000)), store.ingest):
            try:
                act()
            except InputError as error:
                print("told:", error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout.count("told:") == 2, done.stderr
    assert "Traceback" not in done.stderr
    store = Store(tmp_path / "kb")
    assert {row["id"] for row in store.query("SELECT id FROM outcomes")} == {"c1"}
    store.ingest()
    assert {row["id"] for row in store.query("SELECT id FROM outcomes")} == {"c1", "c2"}


def test_a_damaged_database_is_told_with_the_remedy_and_rebuilt(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(outcome(1))
    store.ingest()
    store.database.resolve().write_bytes(b"no database")
    for act in (lambda: store.query("SELECT 1"), Store(tmp_path).ingest):
        with pytest.raises(InputError, match="kb rebuild"):
            act()
    store.rebuild()
    assert count(store, "outcomes") == 1


def test_sql_can_neither_write_nor_reach_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(outcome(1))
    store.ingest()
    for text in ("DELETE FROM outcomes", "COPY outcomes TO '/tmp/x.csv'", "SELECT * FROM read_text('/etc/passwd')",
                 "INSTALL httpfs", "SET enable_external_access = true", "SELEC"):  # fmt: skip
        with pytest.raises(InputError, match="Tables:"):
            queries.sql(store, text)
    assert queries.sql(store, "SELECT count(*) AS n FROM outcomes") == [{"n": 1}]


def test_a_reader_keeps_its_snapshot_while_others_ingest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(outcome(1))
    store.ingest()
    with store.reader() as old:
        store.write(outcome(2))
        store.ingest()
        assert count(store, "outcomes") == 2
        assert old.execute("SELECT count(*) FROM outcomes").fetchall() == [(1,)]


def chained(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    for first in (1, 4, 7):
        for n in range(first, first + 3):
            store.write(verdict(n))
        store.ingest()
    store.write(
        r.EndToEnd(
            id="e1", run_id="run", purpose="final", stack_id="s", metric="m", ratio=1.4, provenance=PROVENANCE, at=AT
        )
    )
    store.ingest()
    assert ledger.verify(store, head=ledger.head(tmp_path)).ok
    return store


def faults(store: Store, **given: str) -> set[str]:
    return {fault.id for fault in ledger.verify(store, **given).faults}


def test_verify_names_edited_missing_and_replaced_files(tmp_path: Path) -> None:
    store = chained(tmp_path)
    path = files.place(tmp_path, "verdicts", "v5")
    text = path.read_bytes()
    path.write_bytes(text.replace(b"1.2", b"9.2"))
    assert "v5" in faults(store)
    path.write_bytes(files.seal(verdict(5).model_copy(update={"run_id": "other"}))[2])  # a valid hash of its own
    assert "v5" in faults(store)
    path.unlink()
    assert "v5" in faults(store)
    path.write_bytes(text)
    assert faults(store) == set()


def test_verify_names_moved_edited_and_cut_lines(tmp_path: Path) -> None:
    store = chained(tmp_path)
    head = ledger.head(tmp_path)
    batch = tmp_path / "ledger" / "000000000004.json"
    text = batch.read_text()
    lines = json.loads(text)
    lines[0]["number"], lines[1]["number"] = lines[1]["number"], lines[0]["number"]
    batch.write_text(json.dumps([lines[1], lines[0], lines[2]]))
    assert {"v4", "v5"} & faults(store)
    lines = json.loads(text)
    lines[1]["hash"] = "0" * 64
    batch.write_text(json.dumps(lines))
    assert "v5" in faults(store)
    lines = json.loads(text)  # moved, renumbered, and the database rebuilt from it: only the chain can tell
    first, second = lines[0], lines[1]
    for key in ("id", "hash"):
        first[key], second[key] = second[key], first[key]
    batch.write_text(json.dumps(lines))
    store.rebuild()
    assert [f.problem for f in ledger.verify(store).faults] == [
        "the line was edited or moved: the chain breaks here"
    ] * 2
    batch.write_text(text)
    store.rebuild()
    assert faults(store) == set()
    (tmp_path / "ledger" / "000000000010.json").unlink()
    store.database.unlink()  # together with the database, so that only a noted head can tell
    store.rebuild()
    assert "e1" in {row["id"] for row in store.query("SELECT id FROM ledger")}
    (tmp_path / "ledger" / "000000000010.json").write_text("[]")
    assert any("head" in f.problem for f in ledger.verify(store, head="f" * 64).faults)
    assert ledger.verify(store, head=head).head != head


def test_verify_names_rows_that_were_edited_in_the_database(tmp_path: Path) -> None:
    store = chained(tmp_path)
    with duckdb.connect(str(store.database.resolve())) as con:
        con.execute("UPDATE verdicts SET speedup = 7 WHERE id = 'v3'")
        con.execute("DELETE FROM verdicts WHERE id = 'v8'")
        con.execute("UPDATE end_to_end SET decision = 'promoted' WHERE id = 'e1'")
    assert faults(store) == {"v3", "v8", "e1"}
    store.rebuild()
    assert ledger.verify(store).ok


# --- knowledge ---------------------------------------------------------------------------------------------------
def warm(store: Store, **key: object) -> tuple[r.WarmStart, ...]:
    asked = {"operator": "linear", "axes": {"m": 8, "n": 576, "k": 576}, "dtype": "bfloat16", "target": "t",
             "engine": "e", "at": "2026-02-01T00:00:00+00:00"}  # fmt: skip
    return lessons.warm_starts(store, **{**asked, **key})


def test_warm_starts_come_nearest_first_and_say_what_was_relaxed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    lessons.learn(store, outcome(1, axes={"m": 8, "n": 1536, "k": 576}, parameters={"block": 16}))
    lessons.learn(store, outcome(2, axes={"m": 8, "n": 49152, "k": 576}, parameters={"block": 64}))
    other = PROVENANCE.model_copy(update={"target": "elsewhere"})
    lessons.learn(store, outcome(3, parameters={"block": 8}, provenance=other))
    lessons.learn(store, outcome(4, operator="rmsnorm", axes={"rows": 8, "k": 576}))
    lessons.learn(store, outcome(5, conclusion="did_not_win", parameters={"block": 1}))
    store.ingest()
    starts = warm(store)
    assert [s.parameters["block"] for s in starts] == [16, 64, 8]
    assert [s.relaxed for s in starts] == [("shape",), ("shape",), ("target",)]
    assert starts[0].distance == pytest.approx(1.415, abs=1e-3)
    assert "relaxed: shape" in starts[0].note
    lessons.learn(store, outcome(6, parameters={"block": 32}))
    store.ingest()
    assert warm(store)[0].relaxed == ()
    assert warm(store, operator="softmax") == ()


def test_lessons_lose_expire_and_are_retired_and_restored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    lesson = lessons.learn(store, outcome(1))
    store.ingest()
    assert lesson is not None
    assert len(warm(store)) == 1
    assert warm(store, at="2027-01-01T00:00:00+00:00") == ()
    used = warm(store)
    for n in (2, 3):  # two later campaigns started from it and did not win
        lessons.learn(store, outcome(n, conclusion="did_not_win", problem_name="p"), used=used)
    store.ingest()
    assert next(x for x in lessons.active(store, at=AT) if x.id == lesson.id).losses == 2
    assert warm(store) == ()
    for n in (4, 5):
        lessons.learn(store, outcome(n))
    store.ingest()
    assert [x.wins for x in lessons.active(store, at=AT) if x.id == lesson.id] == [3]
    lessons.retire(store, lesson.id, "did not help on held-out shapes", "2026-01-02T00:00:00+00:00")
    store.ingest()
    assert warm(store) == ()
    lessons.restore(store, lesson.id, "measured again", "2026-01-03T00:00:00+00:00")
    store.ingest()
    assert len(warm(store)) == 1
    assert lessons.learn(store, outcome(9, conclusion="failed")) is None


def test_crash_sets_exclude_until_they_end_or_the_version_changes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for because in ("a", "b"):
        crashes.record(store, scope={"operator": "linear"}, combination={"block": 64, "unroll": 8}, failure="crash",
                       detail="signal 11", versions={"engine": "1"}, because=because, at=AT)  # fmt: skip
    store.ingest()
    ask = {"scope": {"operator": "linear", "target": "t"}, "versions": {"engine": "1"}, "at": AT}
    found = crashes.active(store, **ask)
    assert [c.seen for c in found] == [2]
    assert crashes.excluded({"block": 64, "unroll": 8, "threads": 1}, found) == found[0]
    assert crashes.excluded({"block": 64, "unroll": 4}, found) is None
    assert crashes.active(store, **{**ask, "versions": {"engine": "2"}}) == []
    assert crashes.active(store, **{**ask, "scope": {"operator": "rmsnorm"}}) == []
    assert crashes.active(store, **{**ask, "at": "2026-06-01T00:00:00+00:00"}) == []


def test_a_crash_is_shrunk_to_what_makes_it() -> None:
    calls = []

    def fails(point: dict) -> bool:
        calls.append(point)
        return point["b"] == 2 and point["g"] == 2

    names = "abcdefgh"
    found = crashes.shrink(dict.fromkeys(names, 2), dict.fromkeys(names, 1), fails, 60)
    assert found == {"b": 2, "g": 2}
    calls.clear()
    crashes.shrink(dict.fromkeys(names, 2), dict.fromkeys(names, 1), fails, 3)
    assert len(calls) == 3


def test_at_most_twelve_rules_are_shown_and_one_more_needs_an_edit(tmp_path: Path) -> None:
    store = Store(tmp_path)
    here = {"operator": "linear"}
    added = [r.Rule(id=f"r{n}", text=f"rule {n}", scope=here, origin="test") for n in range(11)]
    store.write_many(added)
    store.ingest()
    rules.add(store, "for all", {}, "test")
    rules.add(store, "for another", {"operator": "rmsnorm"}, "test")
    rules.count(store, added[4].id, "o1", won=False, at=AT)
    store.ingest()
    with pytest.raises(InputError, match="rule 4"):
        rules.add(store, "one more", here, "test")
    with pytest.raises(InputError, match="12"):
        rules.add(store, "one more for all", {}, "test")
    new = rules.edit(store, added[4].id, "better wording", origin="test", at=AT)
    shown = rules.shown(store, {"operator": "linear", "target": "t"})
    assert len(shown) == 12
    assert new.id in {x.id for x in shown}
    assert added[4].id not in {x.id for x in shown}


def test_seed_knowledge_names_its_source_and_is_written_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    number = lessons.seed(store)
    lessons.seed(store)
    store.ingest()
    assert count(store, "lessons") + count(store, "rules") == number
    assert all(row["source"] for row in queries.lessons(store))
    bad = tmp_path / "seed"
    bad.mkdir()
    (bad / "x.toml").write_text('[[lesson]]\noperator = "a"\n')
    with pytest.raises(InputError, match=r"x\.toml"):
        lessons.seed(store, folder=bad)
