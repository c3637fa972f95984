"""Built candidates as callables on torch tensors.

A candidate is somebody else's code: load it only in a confined process. The ruler has a smaller loader of its own in
its worker; this one serves the engine's child, where promoted kernels run.
"""

from __future__ import annotations

from pathlib import Path

from kernels.errors import InputError
from kernels.languages.loaded import Loaded
from kernels.ruler.build import build
from kernels.ruler.spec import Candidate, Problem

__all__ = ["LANGUAGES", "Loaded", "load"]

LANGUAGES = ("cpp", "torch", "triton")


def load(candidate: Candidate, problem: Problem, builds: Path) -> Loaded:
    """Build `candidate` (or find it built in `builds`) and load it into this process.

    Returns:
        A callable `loaded(*inputs)` on contiguous CPU tensors of the problem's dtypes, giving a fresh output tensor (a
        tuple where there are several). Inputs are not checked: whoever calls has checked them. A candidate that
        prepares takes what `loaded.prepare(*constants)` gave in the place of the first constant, and no other.

    Raises:
        InputError: an unknown language.
        kernels.ruler.build.BuildFailed: the candidate does not build.
        OSError: the library cannot be loaded; AttributeError or another error of the candidate's own module code.
    """
    if candidate.language not in LANGUAGES:
        raise InputError(
            "Unknown language.", remedy=f"Candidates are in {', '.join(LANGUAGES)}.", key=candidate.language
        )
    path = build(candidate, problem, builds).path
    if candidate.language == "cpp":
        from kernels.languages import cpp

        return cpp.load(path, problem, candidate)
    from kernels.languages import python

    return python.load(path, problem, candidate)
