"""What a loaded candidate is, whatever its language."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.ruler.spec import Candidate, Problem


@dataclass(frozen=True)
class Packed:
    """Constants in the candidate's own layout."""

    value: Any
    """What stands in the place of the first constant: a uint8 tensor for C, any object for Python."""
    bytes: int
    """Memory it takes; 0 where that is not known."""
    seconds: float
    """Time that packing took."""


class Loaded:
    """A candidate that can be called. See `kernels.languages.load`."""

    def __init__(
        self, candidate: Candidate, problem: Problem, run: Callable[..., Any], pack: Callable[..., Packed] | None
    ) -> None:
        self.candidate = candidate
        self.problem = problem
        self.run = run
        self._pack = pack
        self.prepared_bytes = 0
        """Memory of all packed constants so far."""
        self.prepare_s = 0.0

    def __call__(self, *inputs: Any) -> Any:
        """The candidate's output for `inputs`."""
        return self.run(*inputs)

    def prepare(self, *constants: Any) -> Any:
        """Pack the constant inputs, in their order; the result stands for them in later calls.

        Raises:
            TypeError: the candidate does not prepare.
        """
        if self._pack is None:
            raise TypeError("this candidate takes its constants as they are")
        packed = self._pack(*constants)
        self.prepared_bytes += packed.bytes
        self.prepare_s += packed.seconds
        return packed.value

    def bind(self, *constants: Any) -> Callable[..., Any]:
        """A callable on the inputs that are not constant, with `constants` packed or held."""
        places = [index for index, tensor in enumerate(self.problem.inputs) if tensor.constant]
        if self.candidate.prepares:
            held: dict[int, Any] = {places[0]: self.prepare(*constants)}
            left = len(self.problem.inputs) - len(places) + 1
        else:
            held = dict(zip(places, constants, strict=True))
            left = len(self.problem.inputs)
        run = self.run

        def bound(*inputs: Any) -> Any:
            given = iter(inputs)
            return run(*[held[i] if i in held else next(given) for i in range(left)])

        return bound
