"""The worker: runs one side of a comparison; the same code for baseline and candidate.

As a script it is a template process: it imports torch, runs nothing, and forks a fresh worker for each request. Between
the ruler and a worker stand a supervisor (outside the confinement; kills the worker when the ruler dies) and the
sandbox. A worker gets commands of eight bytes, answers each with one byte, and is frozen whenever it is not asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import linecache
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<BBHI")
LOAD, CONFIGURE, RUN, PREPARE, TRACE = 1, 2, 3, 4, 5
CANDIDATE = "/tmp/candidate.py"
OK, RAISED, MISFIT, NO_MEMORY, BAD_LOAD = b"K", b"E", b"T", b"M", b"L"


def template(channel: socket.socket, threads: int) -> None:
    """Fork a worker for every request `{policy, groups, …}` with its descriptors, until the channel closes."""
    import torch

    from kernels.ruler import cgroup

    ruler = os.getppid()

    with listener(set()):  # imports what TRACE needs
        torch.empty(0).add(1)
    torch.set_num_threads(threads)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    channel.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 8)
        if not message:  # the ruler has ended, perhaps between making a group and asking for its worker
            cgroup.sweep(ruler)
            return
        if os.fork() == 0:
            channel.close()
            os._exit(_supervisor(json.loads(message), fds))
        for fd in fds:
            os.close(fd)


def listener(names: set[str]) -> Any:
    """A context in which the names of dispatched torch operators are collected."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(str(func.name()))
            return func(*args, **(kwargs or {}))

    return Listener()


def _supervisor(request: dict[str, Any], fds: list[int]) -> int:
    from kernels.ruler import cgroup, sandbox

    go, reply, log, inputs, outputs, life, report = fds
    sandbox.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    policy = sandbox.read_policy(request["policy"])
    failed = sandbox.split(policy)
    gate_r, gate_w = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sandbox.die_with_parent()
            os.read(gate_r, 1)
            for fd in (gate_r, gate_w, life, report):
                os.close(fd)
            _worker(request, policy, failed, (go, reply, log, inputs, outputs))
        finally:
            os._exit(70)
    for fd in (gate_r, go, reply, log, inputs, outputs):
        os.close(fd)
    for folder in request["groups"]:
        with contextlib.suppress(OSError):
            Path(folder, "cgroup.procs").write_text(str(child))
    os.write(report, f"{child}\n".encode())
    os.write(gate_w, b"1")
    code = sandbox.supervise(child, life)
    for folder in request["groups"]:
        cgroup.remove(Path(folder))
    with contextlib.suppress(OSError):
        os.write(report, f"{code}\n".encode())
    return 0


def _worker(request: dict[str, Any], policy: Any, failed: list[str], fds: tuple[int, ...]) -> None:
    from kernels.ruler import sandbox

    go, reply, log, inputs, outputs = fds
    os.setsid()
    sandbox.go_first(True)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.environ.clear()
    os.environ.update(request["env"])
    sizes = request["input_bytes"], request["output_bytes"]
    keep = {0, 1, 2, go, reply, log, inputs, outputs}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 256)):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    side = _side(request["tickets"], (inputs, outputs), sizes)  # after the rest is closed: a driver opens files, too
    os.close(inputs)
    os.close(outputs)
    lacking = failed + sandbox.enter(policy, not failed)
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
    import torch

    # The fork left a dead thread pool, which the first call replaces: two first calls at once would meet nothing.
    torch.set_num_threads(torch.get_num_threads())
    os.write(log, json.dumps(lacking).encode() + b"\n")
    os.write(reply, OK)
    warnings.simplefilter("ignore")
    _answer(side, go, reply, log)
    os._exit(0)


def _answer(side: Side, go: int, reply: int, log: int) -> None:
    """Do what is asked, one byte of answer each time, until nobody asks."""
    while True:
        head = side.serve(go, reply)
        while len(head) < HEADER.size:
            part = os.read(go, HEADER.size - len(head))
            if not part:
                return
            head += part
        kind, which, first, count = HEADER.unpack(head)
        try:
            if kind == RUN:
                side.benchmark_time(which, first, count)
            else:
                body = b""
                while len(body) < count:
                    body += os.read(go, count - len(body))
                side.command(kind, json.loads(body), log)
            answer = OK
        except Misfit as error:
            answer = MISFIT
            _tell(log, str(error))
        except MemoryError:
            answer = NO_MEMORY
        except BaseException as error:
            answer = NO_MEMORY if "allocate memory" in str(error) else BAD_LOAD if kind == LOAD else RAISED
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == CANDIDATE]
            _tell(log, "".join([*traceback.format_list(own[-2:]), *traceback.format_exception_only(error)]))
        os.write(reply, answer)


def _side(tickets: list[list[Any]], fds: tuple[int, int], sizes: tuple[int, int]) -> Side:
    """Map the ruler's memory: files on the CPU (the inputs read-only), handles on an accelerator."""
    if not tickets[0]:
        given = mmap.mmap(fds[0], sizes[0], mmap.MAP_SHARED, mmap.PROT_READ)
        return Side(given, mmap.mmap(fds[1], sizes[1]), lambda: None)
    import torch

    opened = []
    for ticket in tickets:
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in ticket]
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
        opened.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    torch.cuda.synchronize()  # loads what it needs before the candidate is here
    return Side(opened[0], opened[1], torch.cuda.synchronize)


def _tell(log: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(log, text.encode(errors="replace")[:2000])


class Misfit(Exception):
    """The candidate's result is not of the specified number, type, shape or dtype."""


class Side:
    """What one worker has loaded: functions, and for each the prepared calls of the current shape."""

    def __init__(self, inputs: Any, outputs: Any, finish: Callable[[], Any]) -> None:
        self.inputs, self.outputs = inputs, outputs  # memory maps, or all bytes of a device's memory as tensors
        self.finish = finish
        """Waits until the device has done all that was asked of it."""
        self.functions: dict[int, dict[str, Any]] = {}
        self.calls: dict[int, Any] = {}
        self.packed: dict[int, list[Any]] = {}

    def serve(self, go: int, reply: int) -> bytes:
        """Let a native function answer its runs by itself; returns the next command's head, if it read one."""
        native = self.calls.get(0, {}).get("native")
        return native(go, reply) if native is not None else b""

    def command(self, kind: int, body: dict[str, Any], log: int) -> None:
        """Load a function, lay out a shape, pack constants, or tell which torch operators a call dispatches."""
        if kind == LOAD:
            self.functions[body["which"]] = _load(body)
        elif kind == CONFIGURE:
            self.calls.clear()
            self.packed.clear()
            gc.collect()
            for which, function in self.functions.items():
                if not function["prepares"]:
                    self.calls[which] = self._calls(function, body, None)
        elif kind == PREPARE:
            which = body["which"]
            function = self.functions[which]
            packed = [self._prepare(function, body, number) for number in range(body["sets"])]
            self.packed[which] = packed
            self.calls[which] = self._calls(function, body, packed)
        elif kind == TRACE:
            names: set[str] = set()
            calls = self.calls[body["which"]]
            with listener(names):
                calls["function"](*calls["slots"][0][0])
            _tell(log, " ".join(sorted(names)))
        # A side with more functions or slots has more objects: collections during a call must not see them.
        gc.freeze()

    def benchmark_time(self, which: int, first: int, count: int) -> None:
        """Call Python function `which` on slots `first … first + count - 1`.

        Every call goes through here, checked or timed. The name is bait for what looks at its callers' names.
        """
        calls = self.calls[which]
        function, store = calls["function"], calls["store"]
        for arguments, outputs in calls["slots"][first : first + count]:
            store(function(*arguments), outputs)
        self.finish()

    def _tensor(self, memory: Any, place: dict[str, Any], slot: int) -> Any:
        import torch

        dtype = getattr(torch, place["dtype"])
        host = isinstance(memory, mmap.mmap)
        if 0 in place["shape"]:
            return torch.empty(place["shape"], dtype=dtype, device="cpu" if host else memory.device)
        count = 1 + sum((n - 1) * s for n, s in zip(place["shape"], place["strides"], strict=True))
        start = place["offset"] + slot * place["pitch"]
        if host:  # a storage of its own, as a tensor of the model would have
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        else:
            flat = memory[start : start + count * dtype.itemsize].view(dtype)
        return flat.as_strided(place["shape"], place["strides"])

    def _address(self, memory: mmap.mmap, place: dict[str, Any], slot: int) -> int:
        import torch

        base = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        return base + place["offset"] + slot * place["pitch"]

    def _calls(self, function: dict[str, Any], body: dict[str, Any], packed: list[Any] | None) -> dict[str, Any]:
        constant, scalars, sets = body["constant"], body["scalars"], body["sets"]
        inputs, outputs = body["inputs"], body["outputs"]
        packs = next((i for i, c in enumerate(constant) if c), -1) if packed is not None else -1
        left = [i for i in range(len(inputs)) if packed is None or not constant[i] or i == packs]
        if function["native"]:
            table = []
            for slot in range(body["slots"]):
                for i in left:
                    if i == packs and packed is not None:
                        table.append(packed[slot % sets][1])
                    elif inputs[i] is not None:
                        table.append(self._address(self.inputs, inputs[i], slot % sets if constant[i] else slot))
                table += [self._address(self.outputs, place, slot) for place in outputs]
            pointers = (ctypes.c_void_p * len(table))(*table)
            numbers = (ctypes.c_double * 16)(*[s for i in left if (s := scalars[i]) is not None])
            axes = (ctypes.c_int64 * 16)(*body["axes"])
            head = ctypes.create_string_buffer(HEADER.size)

            def native(go: int, reply: int) -> bytes:
                function["serve"](go, reply, head, function["address"], pointers, numbers, axes)
                return head.raw

            return {"native": native, "keep": packed}
        slots = []
        for slot in range(body["slots"]):
            arguments = []
            for i in left:
                if i == packs and packed is not None:
                    arguments.append(packed[slot % sets])
                elif inputs[i] is None:
                    arguments.append(scalars[i])
                else:
                    arguments.append(self._tensor(self.inputs, inputs[i], slot % sets if constant[i] else slot))
            slots.append((tuple(arguments), [self._tensor(self.outputs, place, slot) for place in outputs]))
        call = function["make"](slots) if "make" in function else function["function"]
        return {"native": None, "function": call, "store": _store, "slots": slots}

    def _prepare(self, function: dict[str, Any], body: dict[str, Any], number: int) -> Any:
        places = [p for p, c in zip(body["inputs"], body["constant"], strict=True) if c]
        if not function["native"]:
            return function["prepare"](*[self._tensor(self.inputs, place, number) for place in places])
        axes = [ctypes.c_int64(a) for a in body["fixed_axes"]]
        size = int(function["prepare_bytes"](*axes))
        if not 0 <= size <= body["most_packed_bytes"]:
            raise Misfit(f"prepare asks for {size} bytes; at most {body['most_packed_bytes']} are allowed")
        block = mmap.mmap(-1, size + 4096)
        address = (ctypes.addressof(ctypes.c_char.from_buffer(block)) + 63) // 64 * 64
        sources = [ctypes.c_void_p(self._address(self.inputs, place, number)) for place in places]
        function["prepare"](*sources, ctypes.c_void_p(address), *axes)
        return block, address


def _store(got: Any, outputs: list[Any]) -> None:
    import torch

    several = list(got) if type(got) in (tuple, list) else [got]
    if len(several) != len(outputs):
        raise Misfit(f"{len(several)} outputs, {len(outputs)} expected")
    for value, out in zip(several, outputs, strict=True):
        if type(value) is not torch.Tensor:
            raise Misfit(f"an output is a {type(value).__name__}, not a torch.Tensor")
        if value.shape != out.shape or value.dtype != out.dtype:
            raise Misfit(f"an output is {tuple(value.shape)} {value.dtype}, expected {tuple(out.shape)} {out.dtype}")
        out.copy_(value)


def _load(body: dict[str, Any]) -> dict[str, Any]:
    """Load one function: a shared library with its loop, Python source, or one of the ruler's own."""
    if body["language"] == "cpp":
        shim = ctypes.CDLL(body["shim"])
        shim.serve.restype = None
        library = ctypes.CDLL(body["path"]) if body["path"] else shim
        found: dict[str, Any] = {
            "native": True, "prepares": body["prepares"], "serve": shim.serve, "keep": (shim, library),
            "address": ctypes.cast(getattr(library, body["entry"]), ctypes.c_void_p),
        }  # fmt: skip
        if body["prepares"]:
            found["prepare"] = getattr(library, f"prepare_{body['operator']}")
            found["prepare"].restype = None
            found["prepare_bytes"] = getattr(library, f"prepare_{body['operator']}_bytes")
            found["prepare_bytes"].restype = ctypes.c_int64
        return found
    if body["language"] == "null":
        return {"native": False, "prepares": False, "make": _null}
    source = Path(body["path"]).read_text() if body["path"] else body["source"]
    module = types.ModuleType("candidate")
    module.__file__ = CANDIDATE
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    sys.modules["candidate"] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    function = getattr(module, body["entry"])
    if body["compile"]:
        import torch
        from torch._inductor import config

        config.cpp_cache_precompile_headers = False  # they would be made anew each time
        function = torch.compile(function, dynamic=False)
    found = {"native": False, "prepares": body["prepares"], "function": function}
    if body["prepares"]:
        found["prepare"] = module.__dict__["prepare"]
    return found


def _null(slots: list[Any]) -> Callable[..., Any]:
    """A function that costs nothing: it hands out ready tensors of the outputs' shapes."""
    ready = [out.clone() for out in slots[0][1]]
    result = ready[0] if len(ready) == 1 else tuple(ready)
    return lambda *_: result


def main() -> None:
    """The template process: `worker.py SOCKET_FD THREADS`."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    template(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
