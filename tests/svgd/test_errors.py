# SPDX-License-Identifier: BSD-3-Clause
"""Bad arguments: of the functions, with both sides named, and of the ops."""

import math

import numpy
import pytest
import torch

import fused_ops
from fused_ops import median_bandwidth, svgd_phi, svgd_step

from .cases import KERNELS, RULES, bandwidth_op, distances_op, random_inputs, update_op


def ones(*shape, **options):
    return torch.ones(shape, **options)


# name: (changed arguments, error, text)
GOOD = ones(4, 3)
BAD_BANDWIDTHS = (
    10**400,
    0,
    0.0,
    -1,
    -math.inf,
    math.nan,
    math.inf,
    None,
    [1.0],
    numpy.ones(1),
    1j,
)
BAD_CALLS = {
    "vector": ({"particles": ones(3)}, ValueError, r"particles: .*, N, dim\), got \(3,\)"),
    "number": ({"particles": ones()}, ValueError, r"particles: .*, got \(\)"),
    "integers": ({"particles": GOOD.int()}, TypeError, "floating-point.* got torch.int32"),
    "complex": ({"particles": GOOD + 1j}, TypeError, "floating-point.* got torch.complex64"),
    "bool": ({"particles": GOOD.bool()}, TypeError, "floating-point.* got torch.bool"),
    "list": ({"particles": [[1.0]]}, TypeError, "particles: expected a tensor, got list"),
    "score vector": ({"score": ones(3)}, ValueError, r"score: .*, got \(3,\)"),
    "score rows": ({"score": ones(3, 3)}, ValueError, r"score: .* \(4, 3\), got \(3, 3\)"),
    "score dim": ({"score": ones(4, 1)}, ValueError, r"score: .* \(4, 3\), got \(4, 1\)"),
    "score dtype": ({"score": GOOD.double()}, TypeError, "float32, got torch.float64"),
    "score integers": ({"score": GOOD.long()}, TypeError, "score: .* got torch.int64"),
    "score device": ({"score": GOOD.to("meta")}, ValueError, "score: .*, got meta"),
    "score array": ({"score": numpy.ones((4, 3))}, TypeError, "score: .* got ndarray"),
    "no score": ({"score": None}, TypeError, "score: expected a tensor, got NoneType"),
    "rule": ({"bandwidth": "mean"}, ValueError, "median, paper, reference, got 'mean'"),
    "rule case": ({"bandwidth": "Median"}, ValueError, "median, paper, reference, got 'Median'"),
    "bandwidth shape": ({"bandwidth": ones(1)}, ValueError, r"0-dim .*, got shape \(1,\)"),
    "bandwidth rows": ({"bandwidth": ones(4)}, ValueError, r"0-dim .*, got shape \(4,\)"),
    "bandwidth kind": ({"bandwidth": ones().int()}, TypeError, "bandwidth: .* torch.int32"),
    "bandwidth device": ({"bandwidth": ones(device="meta")}, ValueError, "bandwidth: .* on meta"),
    "kernel": ({"kernel": "gauss"}, ValueError, "kernel: expected one of rbf, imq, got 'gauss'"),
    "no kernel": ({"kernel": None}, ValueError, "kernel: expected one of rbf, imq, got None"),
    "repulsion": ({"repulsion": "1"}, TypeError, "repulsion: expected a number, got str"),
    "repulsion tensor": ({"repulsion": ones()}, TypeError, "repulsion: .* got Tensor"),
    "step size": ({"step_size": None}, TypeError, "step_size: expected a number, got NoneType"),
    "step size tensor": ({"step_size": ones()}, TypeError, "step_size: .* got Tensor"),
} | {
    f"bandwidth {value}": ({"bandwidth": value}, ValueError, "positive .* median, paper, reference")
    for value in BAD_BANDWIDTHS
}


@pytest.mark.parametrize("grad", [False, True], ids=["fused", "reference"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments(device, name, grad):
    changes, error, text = BAD_CALLS[name]
    arguments = {"particles": GOOD.clone().requires_grad_(grad), "score": GOOD} | changes
    arguments = {
        key: value.to(device)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        else value
        for key, value in arguments.items()
    }
    if "step_size" not in changes:
        with pytest.raises(error, match=text):
            svgd_phi(**arguments)
    with pytest.raises(error, match=text):
        svgd_step(**{"step_size": 0.1} | arguments)
    if "particles" in changes:
        with pytest.raises(error, match=text):
            median_bandwidth(arguments["particles"])


def test_bad_results_of_a_score_function(device):
    """They are checked as tensors are."""
    particles = GOOD.to(device)
    for name, (changes, error, text) in BAD_CALLS.items():
        if "score" in changes:
            with pytest.raises(error, match=text):
                svgd_phi(particles, lambda x, result=changes["score"]: result)
        else:
            assert not name.startswith("score")


def test_bad_rules_of_median_bandwidth(device):
    for rule in ("mean", "", None, 0, 1.0):
        with pytest.raises(ValueError, match=r"one of median, paper, reference, got "):
            median_bandwidth(GOOD.to(device), rule)


@pytest.mark.cuda
def test_tensors_on_two_devices():
    particles, score = random_inputs(5, 2, device="cuda")
    with pytest.raises(ValueError, match=r"score: expected the particles' cuda:0, got cpu"):
        svgd_phi(particles, score.cpu())
    with pytest.raises(ValueError, match=r"0-dim tensor on cuda:0, got shape \(\) on cpu"):
        svgd_phi(particles, score, bandwidth=torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="score: expected"):
        update_op(particles, score.cpu(), None, 0, 0.0, 0, 1.0, None)


# The ops check for themselves: nothing that reaches them may read memory that is not there.

BAD_OP_CALLS = {
    "no rows": ({"particles": ones(0, 3), "score": ones(0, 3)}, "particles: .* non-empty"),
    "no dim": ({"particles": ones(4, 0), "score": ones(4, 0)}, "particles: .* non-empty"),
    "vector": ({"particles": ones(3), "score": ones(3)}, "particles: expected a non-empty"),
    "four": (
        {"particles": ones(1, 1, 4, 3), "score": ones(1, 1, 4, 3)},
        "particles: expected a non-empty",
    ),
    "integers": ({"particles": GOOD.int(), "score": GOOD.int()}, "float16"),
    "score rows": ({"score": ones(3, 3)}, "score: expected the shape"),
    "score dim": ({"score": ones(4, 2)}, "score: expected the shape"),
    "score vector": ({"score": ones(4)}, "score: expected the shape"),
    "score dtype": ({"score": GOOD.half()}, "score: expected the shape, dtype"),
    "bandwidth dtype": ({"bandwidth": ones().double()}, "bandwidth: expected one element"),
    "bandwidth shape": ({"bandwidth": ones(2)}, "bandwidth: expected one element"),
    "no bandwidth": ({"bandwidth": ones(0)}, "bandwidth: expected one element"),
    "rule": ({"rule": 3}, "rule: expected 0 to 2, got 3"),
    "kernel": ({"kernel": 2}, "kernel: expected 0 or 1, got 2"),
    "negative kernel": ({"kernel": -1}, "kernel: expected 0 or 1, got -1"),
}


def op_arguments(device, **changes):
    arguments = {"particles": GOOD, "score": GOOD, "bandwidth": None, "rule": 0}
    arguments |= {"bandwidth_number": 1.0, "kernel": 0, "repulsion": 1.0, "step_size": None}
    arguments |= changes
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("name", BAD_OP_CALLS)
def test_ops_refuse_bad_arguments(device, name):
    changes, text = BAD_OP_CALLS[name]
    arguments = op_arguments(device, **changes)
    with pytest.raises(RuntimeError, match=text):
        update_op(**arguments)
    if "particles" in changes:
        with pytest.raises(RuntimeError, match=text):
            bandwidth_op(arguments["particles"], 0)
        with pytest.raises(RuntimeError, match=text):
            distances_op(arguments["particles"])


def test_several_problems_are_refused(device):
    """Where a call takes one."""
    particles = ones(2, 4, 3, device=device)
    with pytest.raises(RuntimeError, match="particles: expected a non-empty matrix"):
        distances_op(particles)
    arguments = op_arguments(device, particles=particles, score=particles, rows=2)
    with pytest.raises(RuntimeError, match="expected all of several problems"):
        update_op(**arguments)
    with pytest.raises(ValueError, match=r"score: .* \(2, 4, 3\), got \(4, 3\)"):
        svgd_phi(particles, particles[0])


def test_bandwidth_op_refuses_other_rules(device):
    for rule in (-1, 3):
        with pytest.raises(RuntimeError, match=f"rule: expected 0 to 2, got {rule}"):
            bandwidth_op(GOOD.to(device), rule)


def test_ops_take_the_arguments_that_the_bad_ones_were_made_of(device):
    assert update_op(**op_arguments(device)).isfinite().all()
    assert fused_ops._C.STEIN_KERNELS == KERNELS
    assert fused_ops._C.BANDWIDTH_RULES == RULES
