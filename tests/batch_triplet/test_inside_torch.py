# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile, torch.export, autocast and the switches of matrix products."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fused_ops
from fused_ops import batch_triplet_loss, set_fallback

from .cases import MINING, REDUCTIONS, error, loss_and_gradients, random_batch

op = torch.ops.fused_ops.batch_triplet.default


def assert_equal(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype and torch.equal(result, other)


@pytest.mark.usefixtures("fresh_compiler", "fused_only")
@pytest.mark.parametrize(("mining", "reduction"), [("all", "mean"), ("hard", "none")])
def test_compiles_whole(device, mining, reduction):
    counter = CompileCounterWithBackend("aot_eager")
    module = fused_ops.BatchTripletLoss(mining=mining, reduction=reduction, distance="cosine")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for rows in (9, 12, 300):
        embeddings, labels = random_batch(rows, 7, 3, device=device, seed=rows)
        others = random_batch(20, 7, 3, device=device)
        upstream = torch.rand(rows, device=device) if reduction == "none" else None
        results, expected = (
            loss_and_gradients(
                embeddings, labels, others, upstream,
                lambda x, y, f=f, **others: f(x, y, *others.values()),
            )
            for f in (compiled, module)
        )  # fmt: skip
        counts.append(counter.frame_count)
        assert_equal(results[:1], expected[:1])
        # The compiler forms the gradient of the normalisation in an order of its own.
        assert error(results[1:], expected[1:]) < 1e-6
    assert counts[0] == counts[2], counts
    graphs = [m.graph for graph in counter.graphs for m in graph.modules() if hasattr(m, "graph")]
    assert op in {node.target for graph in graphs for node in graph.nodes}


@pytest.mark.usefixtures("fresh_compiler", "fused_only")
def test_compiles_with_statistics(device):
    embeddings, labels = random_batch(30, 5, 3, device=device)
    compiled = torch.compile(batch_triplet_loss, backend="aot_eager", fullgraph=True)
    results = compiled(embeddings, labels, return_stats=True)
    expected = batch_triplet_loss(embeddings, labels, return_stats=True)
    assert_equal([results[0], *results[1]], [expected[0], *expected[1]])


@pytest.mark.usefixtures("fused_only")
def test_exports(device):
    module = fused_ops.BatchTripletLoss(mining="hard", reduction="none")
    rows = torch.export.Dim("rows", min=2)
    with torch.no_grad():
        program = torch.export.export(
            module, random_batch(8, 5, 3, device=device), dynamic_shapes=({0: rows}, {0: rows})
        )
        assert op in {node.target for node in program.graph.nodes}
        for count in (2, 50):
            batch = random_batch(count, 5, 3, device=device)
            assert_equal([program.module()(*batch)], [module(*batch)])


@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_narrows_nothing(device, dtype, reduction, distance):
    embeddings, labels = random_batch(60, 9, 7, dtype, device)
    settings = {"reduction": reduction, "distance": distance}
    expected = loss_and_gradients(embeddings, labels, **settings)
    with torch.autocast(device, torch.bfloat16):
        assert_equal(loss_and_gradients(embeddings, labels, **settings), expected)


@pytest.mark.cuda
def test_tf32_is_the_user_s_choice(fused_only):
    embeddings, labels = random_batch(300, 64, 40, device="cuda")
    exact = loss_and_gradients(embeddings.double(), labels)
    assert error(loss_and_gradients(embeddings, labels), exact) < 1e-5
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        narrowed = error(loss_and_gradients(embeddings, labels), exact)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert 2e-5 < narrowed < 2e-2


@pytest.mark.parametrize("mining", MINING)
def test_vmap_falls_back(mining):
    batches = torch.randn(3, 10, 4, dtype=torch.float64)
    labels = torch.arange(10) % 3
    with set_fallback("allow"):
        losses = torch.func.vmap(lambda x: batch_triplet_loss(x, labels, mining=mining))(batches)
    expected = torch.stack([batch_triplet_loss(x, labels, mining=mining) for x in batches])
    torch.testing.assert_close(losses, expected)
