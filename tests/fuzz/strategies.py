# SPDX-License-Identifier: BSD-3-Clause
"""What fuzzing of the ops shares: how many examples, and tensors of odd strides and values.

A test runs a few examples by default. `pytest -m slow tests/fuzz` runs FUSED_OPS_FUZZ_EXAMPLES of
them on each device, 20,000 unless that is set, in parts that pytest-xdist spreads. The examples
are the same each time the same tests run, and hypothesis prints the smallest that fails.
"""

import math
import os
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fused_ops._support import accumulate_dtype

EXAMPLES = int(os.environ.get("FUSED_OPS_FUZZ_EXAMPLES", 20_000))
QUICK = 60  # examples of a test by default
PARTS = 28

parts = pytest.mark.parametrize(
    "part", ["quick", *(pytest.param(part, marks=pytest.mark.slow) for part in range(PARTS))]
)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
seeds = st.integers(0, 2**16)


def fuzz(check, cases, part, share):
    """Calls `check` with each example of a part of all; `share` is that of the test in them."""
    quick = part == "quick"
    run = given(cases)(check)
    run = seed(PARTS if quick else part)(run)
    settings(
        max_examples=QUICK if quick else math.ceil(EXAMPLES * share / PARTS),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(run)()


@contextmanager
def poisoned():
    """New memory is filled with NaN, so that an element never written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Views of a new tensor with the values of (..., rows, dim) `x`, or of some of its rows for all.
LAYOUTS = {
    "contiguous": lambda x: x,
    "off by one": lambda x: _offset(x, 1),
    "off by three": lambda x: _offset(x, 3),
    "sliced columns": lambda x: _surrounded(x, 2, 5)[..., 2:-5],
    "columns of aligned rows": lambda x: _surrounded(x, 0, 8)[..., :-8],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "leading dimensions swapped": lambda x: (
        x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 2 else x
    ),
    "rows expanded": lambda x: x[..., :1, :].expand(x.shape) if x.dim() > 1 else x,
    "all expanded": lambda x: x[(0,) * (x.dim() - 1)].expand(x.shape) if x.numel() else x,
    "columns expanded": lambda x: x[..., :1].expand(x.shape),
    "overlapping": lambda x: (
        x.flatten().as_strided(x.shape, (1,) * x.dim()) if x.dim() == 2 and x.numel() > 0 else x
    ),
}
layouts = st.one_of(st.just("contiguous"), st.sampled_from(list(LAYOUTS)))


def _offset(x, elements):
    memory = x.new_full((x.numel() + elements,), math.nan)
    return memory[elements:].view(x.shape).copy_(x)


def _surrounded(x, before, after):
    """NaN beside the columns, which must not be read."""
    wide = x.new_full((*x.shape[:-1], before + x.shape[-1] + after), math.nan)
    wide[..., before : before + x.shape[-1]] = x
    return wide


VALUES = ("normal", "lattice", "shifted", "large", "small", "huge", "tiny", "subnormal")


def random_values(generator, shape, kind, dtype):
    """Float64 values that the dtype takes, of one of VALUES."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "lattice":  # whose differences and squares are exact, with ties
        return (2 * x).round().clamp(-4, 4) / 2
    if kind == "shifted":
        return x + 100
    info, wide = torch.finfo(dtype), torch.finfo(accumulate_dtype(dtype))
    scales = {
        "large": 1e3,
        "small": 1e-3,
        "huge": min(wide.max**0.6, info.max / 8),  # squares beyond the range
        "tiny": max(wide.tiny**0.6, 8 * info.tiny * info.eps),
        "subnormal": info.tiny / 8,
    }
    return x * scales.get(kind, 1.0)


def spoil(generator, x, value):
    """Puts a value into one element of some rows, in place."""
    rows = x.view(-1, x.shape[-1])
    chosen = torch.rand(len(rows), generator=generator) < 0.3
    columns = torch.randint(x.shape[-1], (int(chosen.sum()),), generator=generator)
    rows[chosen.nonzero().flatten(), columns] = value
