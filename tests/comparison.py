# SPDX-License-Identifier: BSD-3-Clause
"""How the tests of every op compare tensors and watch what runs."""

from contextlib import contextmanager

import torch


def assert_same_bits(result, expected):
    assert result.dtype == expected.dtype
    if not torch.equal(result, expected):  # which NaN never is
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30))


@contextmanager
def recorded_ops():
    """The names of the ops that torch's dispatcher runs meanwhile, those inside ours included."""
    names = set()
    with torch.autograd.profiler.profile() as profile:
        yield names
    names.update(event.name for event in profile.function_events)
