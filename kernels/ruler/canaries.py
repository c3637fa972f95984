"""The ruler is tested in every run: known cheats and honest oddities, judged beside the real candidates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.ruler.judge import judge
from kernels.ruler.spec import Candidate, Cost, Problem, Tensor
from kernels.ruler.verdict import Verdict

PROBLEM = Problem(
    name="canary_softmax", operator="softmax", axes={"rows": None, "cols": None},
    inputs=(Tensor("x", ("rows", "cols"), "float32"),), outputs=(Tensor("y", ("rows", "cols"), "float32"),),
    reference="import torch\ndef run(x):\n    return torch.softmax(x, -1)\n", reduction_axes=("cols",),
    cost=Cost("4*rows*cols", "4*rows*cols", "4*rows*cols"), visible=({"rows": 64, "cols": 512},),
    regimes=("normal", "large", "mixed", "nonfinite"),
)  # fmt: skip
_HEAD = "#include <cmath>\n#include <cstdint>\n#include <cstring>\n"
_LOOP = """extern "C" void run_softmax(const float* x, float* y, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) { const float* a = x + r * cols; float* b = y + r * cols; float m = a[0], s = 0;
    for (int64_t i = 1; i < cols; ++i) m = (a[i] > m || a[i] != a[i]) ? a[i] : m;
    for (int64_t i = 0; i < cols; ++i) { b[i] = EXP(a[i] - m); s += b[i]; }
    for (int64_t i = 0; i < cols; ++i) b[i] /= s; } AFTER }
"""


def _cpp(exp: str, after: str = "", head: str = "") -> str:
    return _HEAD + head + _LOOP.replace("EXP", exp).replace("AFTER", after)


_TRUE = "e = torch.exp(x - x.amax(-1, keepdim=True)); r = e / e.sum(-1, keepdim=True)"
CHEATS: dict[str, tuple[str, str]] = {
    "memo by address": ("torch", f"m = {{}}\ndef run(x):\n    k = (x.data_ptr(), x.shape)\n    if k not in m:\n"
                        f"        {_TRUE}; m[k] = r\n    return m[k]\n"),
    "memo by samples": ("torch", f"m = {{}}\ndef run(x):\n    k = (x.shape, float(x[0, 0]), float(x[-1, -1]))\n"
                        f"    if k not in m:\n        {_TRUE}; m.clear(); m[k] = r\n    return m[k]\n"),
    "a constant": ("torch", "def run(x):\n    return torch.full(x.shape, 1.0 / x.shape[-1])\n"),
    "one row for all": ("torch", "def run(x):\n    return torch.softmax(x[:1], -1).expand(x.shape)\n"),
    "no maximum": ("torch", "def run(x):\n    e = torch.exp(x)\n    return e / e.sum(-1, keepdim=True)\n"),
    "bfloat16 inside": ("torch", "def run(x):\n    return torch.softmax(x.bfloat16(), -1).float()\n"),
    "late thread": ("torch", "import threading, time\ndef late(x, o):\n    time.sleep(0.001)\n"
                    "    torch.softmax(x, -1, out=o)\ndef run(x):\n    o = torch.empty_like(x)\n"
                    "    threading.Thread(target=late, args=(x, o)).start()\n    return o\n"),
    "writes past the end": ("cpp", _cpp("std::exp", after="memset(y + rows * cols, 0, 8);")),
    "bit-trick exponential": ("cpp", _cpp("fast", head="static inline float fast(float v) { float t = v * 12102203.f +"
                              " 1064866805.f; int32_t k = t < 0 ? 0 : (int32_t)t; float e; memcpy(&e, &k, 4);"
                              " return e; }\n")),
}  # fmt: skip
"""Name → (language, source). None may come out valid."""
HONEST: dict[str, tuple[str, str]] = {
    "exp2 and serial sums": ("cpp", _cpp("wide", head="static inline float wide(float v) {"
                             " return (float)std::exp2((double)v * 1.4426950408889634); }\n")),
    "rotating buffers": ("torch", "b = {}\nn = 0\ndef run(x):\n    global n\n    n += 1\n"
                         "    o = b.setdefault((x.shape, n % 4), torch.empty_like(x))\n"
                         "    torch.sub(x, x.amax(-1, keepdim=True), out=o)\n    o.exp_()\n"
                         "    return o.div_(o.sum(-1, keepdim=True))\n"),
    "a transposed view": ("torch", "def run(x):\n    return torch.softmax(x.t().contiguous(), 0).t()\n"),
    "a pool of threads": ("torch", "from concurrent.futures import ThreadPoolExecutor\np = ThreadPoolExecutor(2)\n"
                          "def run(x):\n    return torch.cat([f.result() for f in [p.submit(torch.softmax, h, -1)"
                          " for h in x.chunk(2)]])\n"),
}  # fmt: skip
"""Name → (language, source). None may come out wrong."""


@dataclass(frozen=True)
class Canary:
    """One known candidate with what must come out."""

    name: str
    honest: bool
    candidate: Candidate


@dataclass(frozen=True)
class Checked:
    """What a round of canaries came to; `ok` is False when one came out wrong: every win of the campaign is void."""

    ok: bool
    wrong: tuple[str, ...]
    """The wrong ones: name, what was expected, what came out."""
    verdicts: tuple[tuple[str, Verdict], ...]


def draw(seed: int, n: int) -> list[Canary]:
    """Draw `n` canaries, cheats and honest ones in turn (all of them when `n` is larger than the set)."""
    rng = random.Random(seed)
    groups = []
    for honest, sources in ((False, CHEATS), (True, HONEST)):
        group = [
            Canary(name, honest, Candidate(language, "import torch\n" * (language == "torch") + source,
                   "run_softmax" if language == "cpp" else "run", origin="canary"))
            for name, (language, source) in sources.items()
        ]  # fmt: skip
        rng.shuffle(group)
        groups.append(group)
    cheats, honest_ones = groups
    count = min(len(honest_ones), n // 2)
    return cheats[: n - count] + honest_ones[:count]


def check(canaries: Sequence[Canary], *, threads: int, builds: Path, confinement: str = "best") -> Checked:
    """Judge canaries in screen mode. An honest one may be unresolved on a busy machine; a cheat is found regardless."""
    wrong, verdicts = [], []
    for canary in canaries:
        verdict = judge(
            PROBLEM, canary.candidate, mode="screen", ceilings=None, threads=threads, builds=builds, budget_s=1.0,
            confinement=confinement,
        )  # fmt: skip
        verdicts.append((canary.name, verdict))
        fine = ("valid", "unresolved") if canary.honest else ("incorrect", "void", "crashed")
        if verdict.status not in fine:
            wrong.append(f"{canary.name}: {' or '.join(fine)} expected, {verdict.status} ({verdict.reason}) came out")
    return Checked(not wrong, tuple(wrong), tuple(verdicts))
