"""Puts promoted candidates into a running model, counts how often each is taken, and takes them off again."""

from kernels.overlay.call import Tally
from kernels.overlay.install import Handle, PromotedLike, install

__all__ = ["Handle", "PromotedLike", "Tally", "install"]
