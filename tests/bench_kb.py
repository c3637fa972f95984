"""How the memory holds up: `python tests/bench_kb.py [OUTCOMES] [IDEAS]` prints figures as JSON."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from kb import clock, ideas, score
from kb import records as r
from kb.store import Store


def main(outcomes: int = 1_000_000, many: int = 10_000) -> None:
    prov = r.Provenance(roofloop="1", ruler="1", engine="e", target="t", workload="w", target_family="cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        tree = ideas.Tree(store, "run", {}, clock.now)
        born = [
            r.Idea(
                id=f"i{n}", run_id="run", hypothesis="h", layer="kernel", lever=f"op{n % 50} × template:{n % 7}",
                operator=f"op{n % 50}", problem_name=f"p{n}", approach="a", time_share=0.5, headroom=1.0 + n % 9,
                derivation="d",
            )
            for n in range(many)
        ]  # fmt: skip
        store.write_many(born)
        for first in range(0, outcomes, 50_000):
            store.write_many(
                [
                    r.Outcome(
                        campaign_id=f"c{n}", run_id="old", idea_id=f"x{n}", operator=f"op{n % 50}",
                        lever=f"op{n % 50} × template:{n % 7}", problem_name="p",
                        conclusion="won" if n % 3 else "did_not_win",
                        reason="", speedup=1.0 + n % 5, provenance=prov, at="2026-01-01T00:00:00+00:00",
                    )
                    for n in range(first, min(outcomes, first + 50_000))
                ]
            )  # fmt: skip
        start = time.perf_counter()
        store.ingest()
        ingest_s = time.perf_counter() - start
        peak_ingest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        start = time.perf_counter()
        tree = ideas.load(store, "run", clock.now)
        load_s = time.perf_counter() - start
        start = time.perf_counter()
        known = score.odds(store)
        tree.rescore(known, target_family="cpu", cause="bench", why="bench")
        ideas.pick(tree, 8)
        rescore_s = time.perf_counter() - start
        start = time.perf_counter()
        store.ingest()
        again_s = time.perf_counter() - start
    print(json.dumps({
        "outcomes": outcomes, "ideas": many, "ingest_per_s": round((outcomes + many) / ingest_s),
        "ingest_s": round(ingest_s, 2),
        "load_tree_s": round(load_s, 3), "rescore_and_pick_s": round(rescore_s, 3),
        "ingest_of_one_rescore_s": round(again_s, 3),
        "peak_gib_after_ingest": round(peak_ingest, 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
