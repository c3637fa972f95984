"""Parts of a round that need no engine: neighbours before and after."""

from __future__ import annotations

from finished_run import profile

from flows.rounds import _by_operator


def test_neighbours_are_compared_by_the_fastest_after_and_the_slowest_before():
    quiet = profile({("rotary", "qk", "decode"): (10.0, None), ("attention_decode", "a", "decode"): (80.0, None),
                     ("attention_decode", "b", "decode"): (20.0, None)}, 200.0)  # fmt: skip
    busy = profile(
        {("rotary", "qk", "decode"): (15.0, None), ("attention_decode", "a", "decode"): (120.0, None)}, 200.0
    )
    assert _by_operator([quiet], min) == {"rotary": 10.0, "attention_decode": 100.0}
    assert _by_operator([quiet, busy], max) == {"rotary": 15.0, "attention_decode": 120.0}
    assert _by_operator([quiet, busy], min) == {"rotary": 10.0, "attention_decode": 100.0}
