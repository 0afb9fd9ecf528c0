# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile: one graph, few compilations, the same bits."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fused_ops
from fused_ops import median_bandwidth, svgd_phi, svgd_step

from .cases import assert_same_bits, bandwidth_op, random_inputs, update_op

pytestmark = [pytest.mark.usefixtures("fresh_compiler", "fused_only")]


def in_autocast(x, s, h):
    with torch.autocast(x.device.type, torch.bfloat16):
        return svgd_phi(x, s)


FUNCTIONS = {
    "phi": lambda x, s, h: svgd_phi(x, s),
    "phi at a bandwidth": lambda x, s, h: svgd_phi(x, s, bandwidth=h, kernel="imq"),
    "step": lambda x, s, h: svgd_step(x, s, 0.1, bandwidth="paper", repulsion=-1.0),
    "step of a function": lambda x, s, h: svgd_step(x, lambda y: -y, 0.1, bandwidth=0.8),
    "bandwidth": lambda x, s, h: median_bandwidth(x, "reference"),
    "autocast": in_autocast,
}


@pytest.mark.parametrize("dynamic", [None, True, False], ids=["found dynamic", "dynamic", "static"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_whole_and_once_more_for_every_count(device, name, dynamic):
    """One graph with our op in it; a bandwidth tensor read on the host would break it."""
    function = FUNCTIONS[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for count in (7, 7) if dynamic is False else (7, 9, 1500):
        inputs = random_inputs(count, 3, device=device, seed=count)
        inputs.append(inputs[0].new_tensor(0.7 + count))
        assert_same_bits(compiled(*inputs), function(*inputs))
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert counts[1] == counts[-1]
    assert counts[1] - counts[0] <= (dynamic is None)
    targets = {
        node.target
        for graph in counter.graphs
        for module in graph.modules()
        if hasattr(module, "graph")
        for node in module.graph.nodes
    }
    assert {update_op, bandwidth_op} & targets


@pytest.mark.parametrize("name", ["bandwidth", "repulsion"])
def test_compiles_whole_with_numbers_that_change(device, name):
    """torch compiles anew for each; from the second on they are symbols while it traces."""
    compiled = torch.compile(svgd_phi, backend="aot_eager", fullgraph=True)
    inputs = random_inputs(12, 3, device=device)
    for number in (0.5, 0.7, 0.9):
        settings = {name: number}
        assert_same_bits(compiled(*inputs, **settings), svgd_phi(*inputs, **settings))


def test_compiled_gradients(device):
    compiled = torch.compile(svgd_phi, backend="aot_eager", fullgraph=True)
    gradients = []
    with fused_ops.set_fallback("allow"):
        for function in (compiled, svgd_phi):
            inputs = [x.requires_grad_() for x in random_inputs(12, 3, device=device)]
            gradients.append(torch.autograd.grad(function(*inputs).square().sum(), inputs))
    torch.testing.assert_close(*gradients)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [300, 3000])
def test_compiled_into_cuda_graphs(count):
    """Replayed on new inputs; an op that waited for the device would not be captured."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(svgd_step, mode="reduce-overhead", fullgraph=True)
    for seed in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = random_inputs(count, 16, device="cuda", seed=seed)
        assert_same_bits(compiled(*inputs, 0.1).clone(), svgd_step(*inputs, 0.1))
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
