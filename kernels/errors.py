"""The one error for input that a person can mend."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: says where it stands, what is wrong and what to do about it.

    The command line prints `str(error)` and exits with code 2; nothing is lost and no traceback is shown.

    Args:
        problem: what is wrong, in one sentence.
        remedy: what the person can do, in one sentence.
        file: the file it stands in, if any.
        key: the key, option or name in that file, if any.
    """

    def __init__(self, problem: str, *, remedy: str, file: object = None, key: str | None = None) -> None:
        self.problem = problem
        self.remedy = remedy
        self.file = None if file is None else str(file)
        self.key = key
        where = ": ".join(part for part in (self.file, key) if part)
        super().__init__(f"{where}: {problem} {remedy}" if where else f"{problem} {remedy}")
