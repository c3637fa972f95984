"""Prompts of real English text, at exact token lengths, of which a part stays hidden.

The text comes with every Python (the language reference in `pydoc_data.topics` and docstrings of the standard library),
so that nothing is downloaded. It is cut into paragraphs; each paragraph belongs to exactly one of three parts, by the
hash of its words: what agents may see and tune on (`visible`), what only the end-to-end evaluation draws (`hidden`),
and what accuracy is measured on (`held_out`). Paragraphs that repeat others are left out.

Every prompt opens with a few words drawn at random, so that no two prompts share more than the first tokens and no
prefix cache is warm. Hidden prompts come from a secret that the caller draws afresh; they are never written anywhere.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sysconfig
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from kernels.errors import InputError

Part = Literal["visible", "hidden", "held_out"]
Prompt = tuple[int, ...]

DOCSTRING_MODULES = (
    "argparse", "asyncio.tasks", "collections", "concurrent.futures._base", "configparser", "contextlib", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "doctest", "email.message", "enum", "fractions", "ftplib",
    "functools", "heapq", "http.client", "inspect", "ipaddress", "json", "logging", "mailbox", "multiprocessing.pool",
    "optparse", "os", "pathlib", "pickle", "pickletools", "platform", "random", "selectors", "shutil", "socket",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "trace",
    "traceback", "typing", "unittest.case", "urllib.request", "uuid", "zipfile",
)  # fmt: skip
"""Modules whose docstrings are long prose. They are parsed, never imported."""

OPENING_WORDS = 4


class PromptSource:
    """Draws prompts for one tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer, slow or fast. If it puts a beginning-of-sequence token before a text, each
            prompt starts with that token.

    Raises:
        InputError: the tokenizer makes next to nothing of English text (all unknown), so prompts would be alike.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        plain = tokenizer.encode("the", add_special_tokens=False)
        full = tokenizer.encode("the")
        bos = tokenizer.bos_token_id
        self._start: Prompt = (bos,) if bos is not None and full[:1] == [bos] and plain[:1] != [bos] else ()
        self._streams: dict[Part, Prompt] = {}

    def visible(self, seed: int, n: int, length: int | Sequence[int]) -> tuple[Prompt, ...]:
        """`n` prompts of `length` tokens each (or of n lengths), the same for the same seed."""
        return self._draw("visible", f"visible:{seed}".encode(), n, length)

    def hidden(self, secret: bytes, n: int, length: int | Sequence[int]) -> tuple[Prompt, ...]:
        """`n` prompts from text that no visible prompt holds, decided by `secret`.

        Draw the secret with `secrets.token_bytes(32)` for each round and keep it in memory only.

        Raises:
            InputError: fewer than 16 bytes of secret.
        """
        if len(secret) < 16:
            raise InputError(
                f"A secret of {len(secret)} bytes can be guessed.", remedy="Use secrets.token_bytes(32).", key="secret"
            )
        return self._draw("hidden", b"hidden:" + secret, n, length)

    def held_out(self, n: int, length: int) -> tuple[Prompt, ...]:
        """`n` fixed texts of `length` tokens for accuracy, from paragraphs of neither other part, without opening
        words: plain text, evenly spread over the part.
        """
        stream = self._stream("held_out")
        _check(n, [length] * n)
        step = max(len(stream) // max(n, 1), 1)
        return tuple(self._cut(self._start, stream, i * step, length) for i in range(n))

    def _draw(self, part: Part, key: bytes, n: int, length: int | Sequence[int]) -> tuple[Prompt, ...]:
        lengths = [length] * n if isinstance(length, int) else list(length)
        _check(n, lengths)
        stream = self._stream(part)
        # Random seeded by a digest, not by the key: the same on every platform, and the key cannot be read back
        rng = random.Random(int.from_bytes(hashlib.sha256(key).digest()))
        prompts: list[Prompt] = []
        for wanted in lengths:
            words = " ".join(rng.choice(self._words) for _ in range(OPENING_WORDS)).capitalize()
            opening = (*self._start, *self._tokenizer.encode(f"{words}.\n", add_special_tokens=False))
            prompts.append(self._cut(opening, stream, rng.randrange(len(stream)), wanted))
        return tuple(prompts)

    @staticmethod
    def _cut(opening: Prompt, stream: Prompt, offset: int, length: int) -> Prompt:
        """`opening` and then the stream from `offset`, round and round, `length` tokens in all."""
        missing = max(length - len(opening), 0)
        rounds = stream[offset:] + stream * (missing // len(stream) + 1)
        return (opening + rounds[:missing])[:length]

    def _stream(self, part: Part) -> Prompt:
        if part not in self._streams:
            text = "\n\n".join(paragraph for paragraph in paragraphs() if part_of(paragraph) == part)
            # Without verbose=False a tokenizer warns that the text is longer than the model's context
            ids = tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
            if len(set(ids)) < 50:
                raise InputError(
                    f"The tokenizer maps {len(text)} characters of English to {len(set(ids))} different tokens.",
                    remedy="Check that the model folder holds the tokenizer that belongs to the model.",
                    key="tokenizer",
                )
            self._streams[part] = ids
        return self._streams[part]

    @cached_property
    def _words(self) -> list[str]:
        return sorted({w.lower() for p in paragraphs() for w in re.findall(r"\b[A-Za-z]{4,10}\b", p)})


def part_of(paragraph: str) -> Part:
    """Which part a paragraph belongs to, by the hash of its words: of 8, visible 3, hidden 3, held out 2."""
    words = " ".join(paragraph.split()).lower()
    bucket = hashlib.sha256(words.encode()).digest()[0] % 8
    return "visible" if bucket < 3 else "hidden" if bucket < 6 else "held_out"


@cache
def paragraphs() -> tuple[str, ...]:
    """The paragraphs of at least 60 characters, in the order of the documents, without those that repeat 12 words in a
    row from an earlier one: else a hidden text could be, in the main, a visible one.
    """
    kept: list[str] = []
    seen: set[str] = set()
    for document in _documents():
        for paragraph in re.split(r"\n\s*\n", document):
            words = paragraph.lower().split()
            runs = {" ".join(words[i : i + 12]) for i in range(max(len(words) - 11, 1))}
            if len(paragraph) >= 60 and not runs & seen:
                seen |= runs
                kept.append(" ".join(paragraph.split()))
    return tuple(kept)


def _documents() -> list[str]:
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    for name in DOCSTRING_MODULES:
        # a Python may lack one of these; the prompts then differ, and the text is still English
        stem = Path(sysconfig.get_path("stdlib"), *name.split("."))
        file = next((f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.is_file()), None)
        if file is None:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        documents.extend(doc for node in nodes if (doc := ast.get_docstring(node)))
    return documents


def _check(n: int, lengths: list[int]) -> None:
    if n < 1 or len(lengths) != n or min(lengths) < 1:
        raise InputError(
            f"{n} prompts of lengths {lengths[:4]} cannot be made.",
            remedy="Ask for at least one prompt, of at least one token, with one length for each.",
            key="length",
        )
