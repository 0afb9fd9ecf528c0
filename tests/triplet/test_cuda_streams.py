# SPDX-License-Identifier: BSD-3-Clause
"""Streams, graphs, devices, launches, and that the host never waits."""

import math

import pytest
import torch
from cuda_tools import capture, kernels_of

from fused_ops import explain, triplet_margin_loss

from .cases import (
    assert_same_bits,
    check_against_float64,
    loss_and_gradients,
    random_inputs,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fused_only")]


def static_step(inputs):
    loss = triplet_margin_loss(*inputs, swap=True, margin=0.3)
    return [loss, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("shape", [(64, 128), (5000, 33), (2, 130_000)], ids=str)
def test_graph_replays_on_new_inputs(shape, backward):
    """Fault 28. Captured on a side stream, in each form."""
    inputs = [x.clone().requires_grad_(backward) for x in random_inputs(*shape, device="cuda")]

    def step():
        if backward:
            return static_step(inputs)
        return [triplet_margin_loss(*inputs, swap=True, margin=0.3)]

    graph, captured = capture(step)
    losses = set()
    for seed in (10, 20, 30):
        with torch.no_grad():
            for x, new in zip(inputs, random_inputs(*shape, seed=seed), strict=True):
                x.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits([x.detach() for x in captured], [x.detach() for x in step()])
        losses.add(captured[0].item())
    assert len(losses) == 3


@pytest.mark.parametrize("shape", [(64, 128), (5000, 33), (2, 130_000)], ids=str)
def test_side_stream_is_kept_to(shape):
    """The inputs are written there late: a kernel on another stream would read NaN."""
    new = random_inputs(*shape, device="cuda")
    expected = loss_and_gradients(triplet_margin_loss, new)
    late = [torch.full_like(x, math.nan).requires_grad_() for x in new]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        with torch.no_grad():
            for x, values in zip(late, new, strict=True):
                x.copy_(values)
        loss = triplet_margin_loss(*late)
        gradients = torch.autograd.grad(loss, late)
        torch.cuda.current_stream().synchronize()
    assert_same_bits([loss.detach(), *gradients], expected)


@pytest.mark.parametrize("shape", [(64, 128), (5000, 33), (2, 130_000)], ids=str)
def test_host_never_waits(shape):
    inputs = [x.requires_grad_() for x in random_inputs(*shape, device="cuda")]
    static_step(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            inputs[0].sum().item()
        static_step(inputs)
        with torch.no_grad():
            triplet_margin_loss(*inputs, reduction="none")
        explain(triplet_margin_loss, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(64, 128), (5000, 33), (2, 130_000)], ids=str)
def test_kernels_launched(shape):
    """One forward and one backward. No other kernel, and no copy."""
    inputs = [x.requires_grad_() for x in random_inputs(*shape, device="cuda")]
    grad_loss = torch.ones((), device="cuda")
    loss = triplet_margin_loss(*inputs)
    if not kernels_of(lambda: inputs[0] + 1):
        pytest.skip("the profiler sees no kernels here")
    forward = kernels_of(lambda: triplet_margin_loss(*inputs))
    backward = kernels_of(lambda: torch.autograd.grad(loss, inputs, grad_loss))
    assert len(forward) == 1, forward
    assert len(backward) == 1, backward
    assert all("triplet" in name for name in forward + backward)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_a_device_that_is_not_current():
    inputs = random_inputs(300, 257, device="cuda:1")
    assert torch.cuda.current_device() == 0
    results = loss_and_gradients(triplet_margin_loss, inputs)
    assert all(result.device == torch.device("cuda:1") for result in results)
    assert torch.cuda.current_device() == 0
    check_against_float64(inputs)
