"""Shapes that only the ruler sees: one, primes, tails, tall, wide."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kernels.ruler.spec import Shape

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 61, 67, 79, 97, 113, 127, 151, 181, 211, 251)


def hidden_shapes(visible: Sequence[Shape], variable: Sequence[str], *, seed: int, count: int = 6) -> tuple[Shape, ...]:
    """Draw shapes that differ from `visible`, none with more elements than twice the largest visible one.

    Each variable axis takes, in turn: all ones; a prime; just past a multiple of 16; one axis long and the others short
    (tall, wide); a plain draw from the visible range.

    Args:
        visible: shapes from the profile, variable axes only.
        variable: names of the variable axes.
        seed: decides the draw; keep it from agents.
        count: how many shapes are wanted; fewer come back when the range is too small to hold them.
    """
    if not variable:
        return ()
    rng = random.Random(seed)
    top = {axis: max(shape[axis] for shape in visible) for axis in variable}
    most = 2 * max(_volume(shape, variable) for shape in visible)
    reach = {axis: max(2 * top[axis], 64) for axis in variable}

    def prime(axis: str) -> int:
        return rng.choice([p for p in _PRIMES if p <= reach[axis]])

    def tail(axis: str) -> int:
        return 16 * rng.randint(0, min(top[axis] // 16, 16)) + rng.choice((1, 3, 7, 9, 15))

    draws: list[dict[str, int]] = [dict.fromkeys(variable, 1)]
    while len(draws) < 8 * count:
        kind = len(draws) % 5
        if kind in (2, 3):  # tall, wide: one long axis
            long = variable[(kind - 2) % len(variable)]
            low = max(2, top[long] // 2)
            draws.append(
                {a: rng.randint(low, reach[long]) if a == long else rng.choice((1, 2, 3, 5)) for a in variable}
            )
        elif kind == 4:
            draws.append({axis: rng.randint(1, top[axis]) for axis in variable})
        else:
            draws.append({axis: prime(axis) if kind == 1 else tail(axis) for axis in variable})
    seen = {tuple(shape[axis] for axis in variable) for shape in visible}
    out: list[Shape] = []
    for shape in draws:
        key = tuple(shape[axis] for axis in variable)
        if key not in seen and _volume(shape, variable) <= max(most, 64) and len(out) < count:
            seen.add(key)
            out.append(shape)
    return tuple(out)


def _volume(shape: Shape, variable: Sequence[str]) -> int:
    product = 1
    for axis in variable:
        product *= shape[axis]
    return product
