# SPDX-License-Identifier: BSD-3-Clause
"""What the functions take in the place of each argument, and what they say to the rest."""

import math

import numpy
import pytest
import torch

import fused_ops
from fused_ops import median_bandwidth, svgd_phi, svgd_step

from .cases import (
    DTYPES,
    KERNELS,
    RULES,
    assert_same_bits,
    bandwidth_op,
    distances_op,
    random_inputs,
    random_tensor,
    update_op,
)

CALLS = {
    "svgd_phi": svgd_phi,
    "svgd_step": lambda particles, score, **settings: svgd_step(particles, score, 0.1, **settings),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
def test_score_callable_is_called_once_with_the_particles(device, call):
    """numpyro#1947. Detached, so that it may run autograd; the result is that of its tensor."""
    particles = random_tensor(20, 3, device=device).requires_grad_()
    seen = []

    def score(x):
        seen.append(x)
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad(-leaf.square().sum() / 2, leaf)[0]

    with torch.no_grad():
        result = call(particles, score)
    (x,) = seen
    assert not x.requires_grad
    assert torch.equal(x, particles)
    assert_same_bits(result, call(particles.detach(), -particles.detach()))
    call(particles, score)
    assert len(seen) == 2
    assert not seen[1].requires_grad


def test_score_module(device):
    """A tensor that can be called is a tensor, and a module is a function."""
    particles = random_tensor(20, 3, device=device)
    module = torch.nn.Linear(3, 3, device=device)
    with torch.no_grad():
        assert_same_bits(svgd_phi(particles, module), svgd_phi(particles, module(particles)))

    class Callable(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        def __call__(self, x):
            raise AssertionError("was called")

    score = -particles
    assert_same_bits(svgd_phi(particles, score.as_subclass(Callable)), svgd_phi(particles, score))


@pytest.mark.usefixtures("fused_only")
@calls
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_of_bandwidth(device, dtype, call):
    """The same h as a name, a tensor of whichever dtype, and a number."""
    inputs = random_inputs(40, 3, dtype=dtype, device=device)
    for rule in RULES:
        h = median_bandwidth(inputs[0], rule)
        by_name = call(*inputs, bandwidth=rule)
        for same in (h, h.double(), h.item()):
            assert_same_bits(call(*inputs, bandwidth=same), by_name)
    assert_same_bits(call(*inputs), call(*inputs, bandwidth="median"))
    two = call(*inputs, bandwidth=2)
    assert not torch.equal(two, call(*inputs))
    halves = torch.full((3, 3), 2.0, device=device)[1, 1]
    for same in (2.0, halves, halves.half(), halves.bfloat16(), numpy.float64(2)):
        assert_same_bits(call(*inputs, bandwidth=same), two)


def test_defaults_are_the_paper_s_sign_and_kernel(device):
    inputs = random_inputs(10, 3, device=device)
    settings = {"bandwidth": "median", "kernel": "rbf", "repulsion": 1.0}
    assert_same_bits(svgd_phi(*inputs), svgd_phi(*inputs, **settings))
    for change in ({"bandwidth": "paper"}, {"kernel": "imq"}, {"repulsion": -1}):
        assert not torch.equal(svgd_phi(*inputs), svgd_phi(*inputs, **settings | change))
    with pytest.raises(TypeError):
        svgd_phi(*inputs, "paper")


def ones(*shape, **options):
    return torch.ones(shape, **options)


# name: (changed arguments, error, text)
GOOD = ones(4, 3)
BAD_BANDWIDTHS = (0, 0.0, -1, -math.inf, math.nan, math.inf, None, [1.0], numpy.ones(1), 1j)
BAD_CALLS = {
    "vector": ({"particles": ones(3)}, ValueError, r"particles: .*\(N, dim\), got \(3,\)"),
    "cube": ({"particles": ones(2, 3, 4)}, ValueError, r"particles: .*, got \(2, 3, 4\)"),
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
    "vector": ({"particles": ones(3), "score": ones(3)}, "particles: .* matrix"),
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


def test_bandwidth_op_refuses_other_rules(device):
    for rule in (-1, 3):
        with pytest.raises(RuntimeError, match=f"rule: expected 0 to 2, got {rule}"):
            bandwidth_op(GOOD.to(device), rule)


def test_ops_take_the_arguments_that_the_bad_ones_were_made_of(device):
    assert update_op(**op_arguments(device)).isfinite().all()
    assert fused_ops._C.STEIN_KERNELS == KERNELS
    assert fused_ops._C.BANDWIDTH_RULES == RULES
