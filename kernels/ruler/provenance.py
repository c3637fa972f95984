"""Whose kernel is it? A second verdict beside the time: `new kernel`, `vendor` or `unknown`, with the evidence.

A C++ library that takes no mathematics from a vendor's library and opens nothing at run time is a new kernel. A
Python candidate whose call dispatches torch operators is the vendor's work, however well arranged; that it dispatches
none is only its own word, hence `unknown`. Text is never read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.ruler.build import undefined_symbols
from kernels.ruler.spec import Candidate

VENDOR = re.compile(
    r"^(cblas_|[sdcz]gem[mv]|mkl_|MKL_|dnnl|_ZN?K?(2at|3c10|5torch|4dnnl)|cudnn|cublas|openblas|LIBXSMM)"
)
DYNAMIC = {"dlopen", "dlsym", "dlmopen", "dlvsym", "dl_iterate_phdr", "system", "popen", "execve", "syscall"}
PLUMBING = {
    "empty", "empty_like", "view", "_unsafe_view", "reshape", "as_strided", "t", "transpose", "permute", "detach",
    "slice", "select", "expand", "unsqueeze", "squeeze", "alias", "new_empty", "empty_strided", "lift_fresh",
}  # fmt: skip


def of(candidate: Candidate, path: Path, operators: Sequence[str]) -> dict[str, Any]:
    """The provenance verdict and its evidence.

    Args:
        candidate: what was judged.
        path: its built library or source.
        operators: torch operators that a call dispatched, by the worker's word.
    """
    if candidate.language == "cpp":
        names = undefined_symbols(path)
        vendor = sorted(name for name in names if VENDOR.match(name))
        dynamic = sorted(names & DYNAMIC)
        verdict = "vendor" if vendor else "unknown" if dynamic else "new kernel"
        return {"verdict": verdict, "evidence": [f"takes {name} from elsewhere" for name in (vendor + dynamic)[:20]]}
    worked = [name for name in operators if name[6:].split(".")[0] not in PLUMBING]
    return {"verdict": "vendor" if worked else "unknown", "evidence": [f"dispatches {name}" for name in worked[:20]]}
