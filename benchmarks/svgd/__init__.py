# SPDX-License-Identifier: BSD-3-Clause
"""Benchmark of SVGD against eager PyTorch and torch.compile."""

from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.svgd import batch
from benchmarks.svgd import cases as single


def cases(device: str, bandwidth: float) -> Iterator[Case]:
    yield from single.cases(device, bandwidth)
    yield from batch.cases(device, bandwidth)
