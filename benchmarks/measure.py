# SPDX-License-Identifier: BSD-3-Clause
"""How a callable is measured. All times are in microseconds."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

L2_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU we know
GRAPH_CALLS = 20
GRAPH_WORTH_US = 500  # above it launch gaps no longer matter
BUDGET_US = 2e5  # for the runs of one kind of time, where calls are short
SLOW_US, VERY_SLOW_US = 2e5, 2e6  # fewer runs then, and one


def device_times(call: Callable, runs: int, cold: bool = True) -> list[float]:
    """The GPU time of single calls; `cold` fills the L2 with other data before each.

    That data is read, not written: lines that must be written back would be paid for by the call.
    """
    flush = torch.zeros(L2_FLUSH_BYTES // 4 if cold else 1, device="cuda")
    events = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def wall_time(call: Callable, calls: int) -> float:
    """The time of one of many calls back to back, host and device together."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def cpu_times(call: Callable, runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def graph_time(call: Callable) -> float | None:
    """The time of a call inside a CUDA graph, warm caches; None where it cannot be captured."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(GRAPH_CALLS):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    graph.replay()
    return statistics.median(device_times(graph.replay, 15, cold=False)) / GRAPH_CALLS


def peak_bytes(call: Callable) -> int:
    """The most CUDA memory allocated during a call, what it is given included."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MB for each stream that had a matrix product
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def launches(call: Callable) -> int:
    """Kernels, copies and fills that a call puts on the GPU."""
    # Or else CUPTI stays, and slows every launch that is measured later.
    os.environ["TEARDOWN_CUPTI"] = "1"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """As timeit does: a collection walks through all that a compiler has left behind."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@no_garbage_collection()
def measure(call: Callable, device: str) -> dict:
    """The timing fields of a row, for a call that has run once."""
    if device == "cpu":
        once = statistics.median(cpu_times(call, 4)[1:])
        times = cpu_times(call, max(7, min(1000, int(1e6 / once))))
        return summary(times) | {"wall_us": statistics.median(times)}
    once = wall_time(call, 1)
    fewest = 11 if once < SLOW_US else 3 if once < VERY_SLOW_US else 1
    for _ in range(fewest // 3):
        call()
    if fewest > 1:
        once = statistics.median(device_times(call, 3))
    times = device_times(call, max(fewest, min(101, int(BUDGET_US / once))))
    row = summary(times)
    calls = max(fewest // 2, min(300, int(BUDGET_US / once)))
    row["wall_us"] = wall_time(call, calls) if calls > 0 else once
    if once < GRAPH_WORTH_US:
        row["graph_us"] = graph_time(call)
    row["launches"] = launches(call) if fewest > 1 else None
    row["peak_bytes"] = peak_bytes(call)
    return row


def summary(times: list[float]) -> dict:
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [0, 0, 0]
    return {
        "time_us": statistics.median(times),
        "time_iqr_us": quartiles[2] - quartiles[0],
        "mean_us": statistics.mean(times),
        "std_us": statistics.stdev(times) if len(times) > 1 else 0,
    }


def bandwidth(device: str) -> float:
    """Bytes a second that the card moves at best, by PyTorch: reading three tensors or copying."""
    if device == "cpu":
        return float("nan")
    data = [torch.ones(2**28, device=device) for _ in range(3)]
    size = data[0].numel() * data[0].element_size()
    total = torch.compile(lambda a, b, c: (a + b + c).sum())
    for _ in range(3):
        total(*data)
    read = statistics.median(device_times(lambda: total(*data), 21))
    both = statistics.median(device_times(lambda: data[0].copy_(data[1]), 21))
    return max(3 * size / read, 2 * size / both) * 1e6
