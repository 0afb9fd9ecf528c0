# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile: one graph, few compilations, the same bits."""

import itertools
import time

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fused_ops
from fused_ops import triplet_margin_loss

from .cases import (
    assert_same_bits,
    backward_op,
    forward_op,
    loss_and_gradients,
    random_inputs,
    random_tensor,
    torch_loss,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler", "fused_only")


def in_autocast(*inputs):
    with torch.autocast(inputs[0].device.type, torch.bfloat16):
        return triplet_margin_loss(*inputs)


# name: (what is compiled, dtype of the inputs)
FORMS = {
    "mean": (lambda *x: triplet_margin_loss(*x, swap=True, margin=0.5), torch.float32),
    "a loss for each row": (lambda *x: triplet_margin_loss(*x, reduction="none"), torch.float32),
    "module": (fused_ops.TripletMarginLoss(p=1), torch.float64),
    "autocast": (in_autocast, torch.bfloat16),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["found dynamic", "dynamic"])
@pytest.mark.parametrize("name", FORMS)
def test_compiles_whole_and_once_more_for_every_batch_size(device, name, dynamic):
    """Fault 29. One graph forward and one backward, with our ops in them."""
    function, dtype = FORMS[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for rows in (7, 9, 4096):
        inputs = random_inputs(rows, 33, dtype=dtype, device=device, seed=rows)
        grad_loss = random_tensor(*function(*inputs).shape, device=device, seed=3)
        results = loss_and_gradients(compiled, inputs, grad_loss)
        counts.append(counter.frame_count)
        assert_same_bits(results, loss_and_gradients(function, inputs, grad_loss))
    assert 0 < counts[0] <= counts[1] == counts[2]
    assert counts[1] - counts[0] <= (0 if dynamic else 1)
    graphs = [m.graph for graph in counter.graphs for m in graph.modules() if hasattr(m, "graph")]
    targets = {node.target for graph in graphs for node in graph.nodes}
    assert {forward_op, backward_op} <= targets


def test_compiled_fallback(device):
    compiled = torch.compile(triplet_margin_loss, backend="aot_eager", fullgraph=True)
    inputs = random_inputs(5, 6, device=device)
    with fused_ops.set_fallback("allow"):
        results = loss_and_gradients(compiled, inputs, p=3)
    torch.testing.assert_close(results, loss_and_gradients(torch_loss, inputs, p=3))


class Embedding(torch.nn.Module):
    """A small model that holds the loss."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 16)
        self.loss = fused_ops.TripletMarginLoss(swap=True)

    def embed(self, *inputs):
        return [self.layer(x).tanh() for x in inputs]

    def forward(self, *inputs):
        return self.loss(*self.embed(*inputs))


def train(device, compiled, steps=300):
    """[losses], and the seconds of the fastest step, which the machine disturbs least."""
    torch.manual_seed(0)
    model = loss_of = Embedding().to(device)
    if compiled == "whole":
        loss_of = torch.compile(model, fullgraph=True)
    elif compiled == "but the loss":
        model.embed = torch.compile(model.embed, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = random_tensor(4, 3, 2048, 32, device=device)
    losses, times = [], []
    for batch in itertools.islice(itertools.cycle(batches), steps):
        start = time.perf_counter()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - start)
    return losses, min(times)


@pytest.mark.usefixtures("inductor_cache")
def test_compiled_training(device):
    losses, expected = (train(device, compiled, steps=8)[0] for compiled in ("whole", None))
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.timing
@pytest.mark.usefixtures("inductor_cache")
def test_training_compiled_whole_is_no_slower_than_with_an_eager_loss(device):
    assert train(device, "whole")[1] < 1.05 * train(device, "but the loss")[1]


@pytest.mark.cuda
def test_compiled_into_cuda_graphs():
    """Replayed on new inputs; an op that waited for the device would not be captured."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(triplet_margin_loss, mode="reduce-overhead", fullgraph=True)
    for seed in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = random_inputs(64, 128, device="cuda", seed=seed)
        results = [x.clone() for x in loss_and_gradients(compiled, inputs, swap=True)]
        assert_same_bits(results, loss_and_gradients(triplet_margin_loss, inputs, swap=True))
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
