"""Bounds by hand-computed figures, ceilings that never call a warm cache impossible, and the picture."""

import io
import math

import pytest
from matplotlib.image import imread

from kernels.ruler.floor import floor_s
from kernels.ruler.spec import Cost, Problem, Tensor
from profiles.load import load_target
from profiles.roofline import Point, amdahl_limit, bound, ceilings, gap, intensity, peak, roofline_figure
from profiles.target import Bandwidth, Flops, Target

MIB = 2**20
TARGET = Target(
    name="auto", kind="cpu", device="made up", origin="measured", call_overhead_us=2.0,
    bandwidths=(
        Bandwidth(level="l2", working_set_bytes=MIB, capacity_bytes=2 * MIB, threads=2, read_gbps=200, write_gbps=100),
        Bandwidth(level="l3", working_set_bytes=MIB, capacity_bytes=32 * MIB, threads=2, read_gbps=100, write_gbps=50),
        Bandwidth(level="dram", working_set_bytes=256 * MIB, threads=1, read_gbps=12, write_gbps=6),
        Bandwidth(level="dram", working_set_bytes=256 * MIB, threads=2, read_gbps=20, write_gbps=10, copy_gbps=15),
        Bandwidth(level="dram", working_set_bytes=256 * MIB, threads=4, read_gbps=30, write_gbps=15),
    ),
    flops=(
        Flops(dtype="float32", threads=1, gflops=60),
        Flops(dtype="float32", threads=2, gflops=100),
        Flops(dtype="bfloat16", threads=2, gflops=400),
        Flops(dtype="float16", threads=2, gflops=3),
    ),
)  # fmt: skip


def test_memory_compute_and_overhead():
    memory = bound(1e6, 200e6, 10e6, "bfloat16", TARGET, 2)
    assert memory.bound == "memory"
    assert memory.time_s == pytest.approx(200e6 / 20e9 + 10e6 / 10e9)
    assert memory.ceiling_gbps == pytest.approx(210e6 / memory.time_s / 1e9)
    compute = bound(4e9, 1e6, 0, "bfloat16", TARGET, 2)
    assert (compute.bound, compute.time_s) == ("compute", pytest.approx(0.01))
    overhead = bound(100, 4000, 4000, "float32", TARGET, 2)
    assert overhead.bound == "overhead"
    assert overhead.time_s == pytest.approx(4000 / 20e9 + 4000 / 10e9)
    assert overhead.reachable_s == pytest.approx(2e-6)
    with pytest.raises(ValueError, match="not a cost"):
        bound(math.nan, 1, 1, "float32", TARGET, 1)


def test_threads_and_levels():
    assert bound(0, 1e9, 0, "float32", TARGET, 1).time_s == pytest.approx(1e9 / 12e9)
    assert bound(0, 1e9, 0, "float32", TARGET, 3).time_s == pytest.approx(1e9 / 30e9)  # the next higher count
    assert bound(0, 1e9, 0, "float32", TARGET, 64).time_s == pytest.approx(1e9 / 30e9)
    assert bound(0, 1e6, 0, "float32", TARGET, 2, working_set_bytes=1e6).time_s == pytest.approx(1e6 / 200e9)
    assert bound(0, 1e7, 0, "float32", TARGET, 2, working_set_bytes=1e7).time_s == pytest.approx(1e7 / 100e9)


def test_dtypes_that_were_not_measured():
    assert peak(TARGET, "bfloat16", 2) == 400
    assert peak(TARGET, "float16", 2) == 100  # may be computed in float32, whatever the matmul of float16 does
    assert peak(TARGET, "float64", 2) == 100
    assert peak(TARGET, "float8", 2) is None
    assert bound(1e12, 0, 0, "float8", TARGET, 2).time_s == 0


def problem(size):
    return Problem(
        name="sum", operator="sum", axes={"n": None}, inputs=(Tensor("x", ("n",), "float32"),),
        outputs=(Tensor("y", None, "float32"),), reference="def run(x): return x.sum()",
        cost=Cost(flops="n", bytes_read="4*n", bytes_written="4"), visible=({"n": size},),
    )  # fmt: skip


@pytest.mark.parametrize("size", [10_000, MIB, 30 * MIB, 64 * MIB, 1024 * MIB])
def test_the_floor_lies_under_what_warm_caches_allow(size):
    """A kernel that keeps what fits in the caches and streams the rest at full speed is never called impossible."""
    cached2 = min(size, 2 * MIB)
    cached3 = min(size - cached2, 32 * MIB)
    fastest_s = cached2 / 200e9 + cached3 / 100e9 + (size - cached2 - cached3) / 20e9
    found = ceilings(TARGET, 2, size)
    assert found.trusted
    floor = floor_s(problem(size // 4), {"n": size // 4}, found)
    assert floor <= fastest_s * 1.001
    assert floor > 0.9 * fastest_s or size < 1e5  # and it is a floor, not nothing


def test_ceilings_fall_with_the_working_set_and_noise_is_not_trusted():
    speeds = [ceilings(TARGET, 2, size).read_gbps for size in (1e4, 1e6, 1e7, 1e8, 1e9, 1e11)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] == pytest.approx(20, rel=0.01)
    assert not ceilings(TARGET.model_copy(update={"noisy": True, "noise": "busy"}), 2, 1e9).trusted


def test_caches_of_unknown_speed():
    h200 = load_target("h200")
    assert not ceilings(h200, 1, 1e6).trusted
    big = ceilings(h200, 1, 1e9)
    assert big.trusted
    assert big.read_gbps == pytest.approx(4800 * 1e9 / (1e9 - h200.cache_bytes))
    assert ceilings(h200, 1, 1e12).read_gbps == pytest.approx(4800, rel=1e-3)


def test_helpers():
    assert intensity(10, 5) == 2
    assert intensity(10, 0) == math.inf
    assert gap(3.0, 1.0) == 3
    assert gap(0.5, 1.0) == 1
    assert gap(1.0, 0.0) == math.inf
    assert amdahl_limit(0.5) == 2
    assert amdahl_limit(0.5, 2.0) == pytest.approx(4 / 3)
    assert amdahl_limit(1.0) == math.inf
    assert amdahl_limit(0.0, 9.0) == 1
    with pytest.raises(ValueError, match="Amdahl"):
        amdahl_limit(1.2)


def test_the_picture_is_a_png_with_the_operators_in_it():
    points = [
        Point("linear", 2e9, 1e8, 0.02, 0.6),
        Point("rmsnorm", 1e5, 1e5, 1e-5, 0.2),
        Point("nothing measured", 0, 0, 0.0, 0.1),
    ]
    with_points, without = (roofline_figure(p, TARGET, 2) for p in (points, []))
    for png in (with_points, without):
        assert imread(io.BytesIO(png)).shape[2] == 4
    assert imread(io.BytesIO(with_points)).shape[1] >= 900
    reds = [
        ((image[..., 0] > 0.7) & (image[..., 1] < 0.6)).sum()
        for image in map(imread, map(io.BytesIO, (with_points, without)))
    ]
    assert reds[0] > reds[1]
    assert roofline_figure(points, TARGET, 2) == with_points


def test_an_inner_level_is_never_slower_than_an_outer_one():
    slow = Bandwidth(level="l1", working_set_bytes=16384, capacity_bytes=32768, threads=2, read_gbps=50, write_gbps=50)
    found = ceilings(TARGET.model_copy(update={"bandwidths": (slow, *TARGET.bandwidths)}), 2, 10_000)
    assert (found.read_gbps, found.write_gbps) == (pytest.approx(200), pytest.approx(100))
