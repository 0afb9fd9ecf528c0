# SPDX-License-Identifier: BSD-3-Clause
"""The same bits in every process, with one thread and two, and beside other work on the GPU.

Repeats within a process are in each op's test_repeatability.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comparison import assert_same_bits
from every_op import fingerprint, make_inputs, run_every_op

pytestmark = pytest.mark.usefixtures("fused_only")


ANOTHER_PROCESS = """
from every_op import fingerprint
for threads in (1, 2):
    print(fingerprint({device!r}, threads))
"""


def test_processes_and_threads(device):
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    found = subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS.format(device=device)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert found == 2 * [fingerprint(device)]


@pytest.mark.cuda
def test_other_work_on_the_device():
    """100 repeats while another stream keeps the multiprocessors busy, so that blocks start and end
    in another order."""
    inputs = make_inputs("cuda", shapes=[(300, 257), (2100, 64), (5, 70_001)])
    expected = run_every_op(inputs)
    a = torch.randn(2048, 2048, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(stream):
            for _ in range(3):
                a @ a
        for result, other in zip(run_every_op(inputs), expected, strict=True):
            assert_same_bits(result, other)
