"""A target: the hardware and its ceilings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from profiles.records import Record

Positive = Annotated[float, Field(gt=0)]


class Bandwidth(Record):
    """Bytes per second that one memory level gives to the best kernel that was tried."""

    level: str
    """`l1`, `l2`, `l3`, `dram`, `hbm`."""
    working_set_bytes: Annotated[int, Field(gt=0)]
    """Size, over all threads, at which it was measured, or the level's capacity from a datasheet."""
    capacity_bytes: Annotated[int, Field(gt=0)] | None = None
    """What this level can hold for these threads together; None for main memory."""
    threads: Annotated[int, Field(ge=1)]
    """Threads that reached it; 1 for a whole device from a datasheet."""
    read_gbps: Positive
    """Gigabytes (1e9 bytes) per second, reads only."""
    write_gbps: Positive | None = None
    copy_gbps: Positive | None = None
    """Read plus written bytes per second of a copy."""
    relative_spread: float = 0.0
    """(upper − lower quartile) / median of the repeats of the best reading kernel; 0 for a datasheet."""
    kernel: str = ""
    """Which of the reading kernels won; empty for a datasheet."""


class Flops(Record):
    """Floating-point operations per second that a dense matmul reaches, by dtype."""

    dtype: str
    threads: Annotated[int, Field(ge=1)]
    gflops: Positive
    relative_spread: float = 0.0
    kernel: str = ""
    """What reached it: `torch.matmul` or a register-blocked loop; empty for a datasheet."""


class Target(Record):
    """Ceilings of one kind of machine, measured or from a datasheet."""

    schema_version: Literal[1] = 1
    name: str
    kind: Literal["cpu", "cuda", "rocm", "neuron"]
    device: str
    """What the vendor calls it: `AMD EPYC 9654`, `NVIDIA H200`."""
    device_count: Annotated[int, Field(ge=1)] = 1
    origin: Literal["measured", "datasheet"]
    fingerprint: str = ""
    """Hash of CPU model, cores, features, memory, compiler and torch versions; empty for a datasheet."""
    measured_at: str = ""
    bandwidths: Annotated[tuple[Bandwidth, ...], Field(min_length=1)]
    flops: Annotated[tuple[Flops, ...], Field(min_length=1)]
    cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Capacity of caches whose bandwidth nobody published: what fits in them has no memory ceiling."""
    call_overhead_us: Annotated[float, Field(ge=0)] = 0.0
    """Time of the smallest torch operator in eager mode, for the 'overhead' bound."""
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.10
    """How much faster than these ceilings a kernel may be before physics calls it impossible."""
    sources: dict[str, str] = {}
    """Where each number comes from, by key."""
    noisy: bool = False
    """True when the machine was too busy for these ceilings to be trusted; no floor is then computed from them."""
    noise: str = ""
    """What made it noisy, in a sentence."""
