"""What many harnesses are: the candidate in their own process, no limits. Used to show that an effect is real.

`python naive_harness.py CANDIDATE EVIDENCE SECONDS`, in a working folder that holds `reference.py`.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import reference  # noqa: F401  (a module of the harness that a candidate may find)
import torch

SHAPES = {
    "rmsnorm": lambda: (torch.randn(8, 64), torch.randn(64), 1e-6), "softmax": lambda: (torch.randn(8, 64),),
    "matmul": lambda: (torch.randn(8, 16), torch.randn(16, 8)),
    "silu_mul": lambda: (torch.randn(8, 64), torch.randn(8, 64)),
}  # fmt: skip


def main():
    path = Path(sys.argv[1])
    text = path.read_text()
    operator = re.search(r"op: (\w+)", text).group(1)
    if path.suffix == ".cpp":
        flags = re.search(r"^// cflags: (.*)$", text, re.M)
        given = ["-wrapper", flags.group(1).removeprefix("-wrapper ")] if flags else []
        subprocess.run(["g++", "-O1", "-shared", "-fPIC", *given, str(path), "-o", "naive.so"], check=True)
        x, y = torch.randn(8, 64), torch.empty(8, 64)
        run = getattr(ctypes.CDLL(os.path.abspath("naive.so")), f"run_{operator}")
        run(*[ctypes.c_void_p(t.data_ptr()) for t in (x, y)], ctypes.c_int64(8), ctypes.c_int64(64))
        return
    space = {"__name__": "candidate"}
    exec(compile(text, str(path), "exec"), space)
    for _ in range(3):
        space["run"](*SHAPES[operator]())


main()
