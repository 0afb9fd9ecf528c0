# SPDX-License-Identifier: BSD-3-Clause
"""That the suite for compute-sanitizer is whole: what it does not launch nobody watches."""

import re
from pathlib import Path

import pytest
import sanitized_calls
import torch
from cuda_tools import kernels_of

CSRC = Path(__file__).parents[1] / "csrc"
KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", re.DOTALL)


@pytest.mark.parametrize("op", sanitized_calls.OPS)
def test_its_calls_are_valid(op, monkeypatch):
    """On the CPU, which has one way for all of them."""
    for name in ("SVGD_MANY", "SVGD_WIDE", "BATCHES_MANY"):
        monkeypatch.setattr(sanitized_calls, name, [])
    monkeypatch.setattr(sanitized_calls, "BATCH_IN_BLOCKS", (3, 2600, 3, 2))
    sanitized_calls.run(op, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not CSRC.exists(), reason="needs the sources")
@pytest.mark.parametrize("op", sanitized_calls.OPS)
def test_every_kernel_is_launched(op):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels on tensor cores are for compute capability 9.0")
    sources = [path.read_text() for path in (CSRC / op).iterdir()]
    kernels = {name for source in sources for name in KERNEL.findall(source)}
    assert kernels
    launched = " ".join(kernels_of(lambda: sanitized_calls.run(op)))
    if not launched:
        pytest.skip("the profiler sees no kernels here")
    assert not {name for name in kernels if not re.search(rf"\b{name}\b", launched)}
