# SPDX-License-Identifier: BSD-3-Clause
"""Wall-clock times of two implementations, side by side."""

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP = 2
# Rounds end after this many or, where calls are slow, after this time, but not before the fewest.
ROUNDS, FEWEST_ROUNDS = 50, 5
BUDGET_SECONDS = 2.0


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`, so that a clock read next sees it finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, call: Callable[..., object], *arguments: object) -> float:
    """Time of one call, until its work on the device is done."""
    synchronize(device)
    start = time.perf_counter()
    call(*arguments)
    synchronize(device)
    return time.perf_counter() - start


def median_seconds(
    device: torch.device, first: Callable[..., object], second: Callable[..., object], *arguments
) -> tuple[float, float]:
    """Median time of each call with the same arguments.

    The calls take turns, so that a slow moment of the machine falls on both.
    """
    calls = first, second
    for call in calls * WARM_UP:
        call(*arguments)
    rounds = []
    end = time.perf_counter() + BUDGET_SECONDS
    while len(rounds) < FEWEST_ROUNDS or (len(rounds) < ROUNDS and time.perf_counter() < end):
        rounds.append([seconds(device, call, *arguments) for call in calls])
    first_times, second_times = zip(*rounds, strict=True)
    return statistics.median(first_times), statistics.median(second_times)
