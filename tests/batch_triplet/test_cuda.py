# SPDX-License-Identifier: BSD-3-Clause
"""Streams, graphs, memory, launches, and that the host never waits."""

import pytest
import torch
from cuda_tools import capture, kernels_of

from fused_ops import batch_triplet_loss

from .cases import FORMS, MINING, loss_and_gradients, random_batch

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fused_only")]

forms = pytest.mark.parametrize(("mining", "soft"), FORMS)


def step(embeddings, labels, **settings):
    loss = batch_triplet_loss(embeddings, labels, **settings)
    return [loss, *torch.autograd.grad(loss.sum(), embeddings)]


@forms
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_graph_replays_on_new_inputs(mining, soft, reduction):
    embeddings, labels = random_batch(300, 20, 30, device="cuda")
    embeddings.requires_grad_()
    settings = {"mining": mining, "soft": soft, "reduction": reduction}
    graph, captured = capture(lambda: step(embeddings, labels, **settings))
    losses = set()
    for seed in (1, 2, 3):
        new, new_labels = random_batch(300, 20, 30, device="cuda", seed=seed)
        with torch.no_grad():
            embeddings.copy_(new)
            labels.copy_(new_labels)
        graph.replay()
        torch.cuda.synchronize()
        for result, expected in zip(captured, step(embeddings, labels, **settings), strict=True):
            assert torch.equal(result, expected)
        losses.add(captured[0].sum().item())
    assert len(losses) == 3


@forms
def test_side_stream_is_kept_to(mining, soft):
    """The inputs are written there late: a kernel on another stream would read NaN."""
    new, labels = random_batch(300, 20, 30, device="cuda")
    settings = {"mining": mining, "soft": soft}
    expected = loss_and_gradients(new, labels, **settings)
    late = torch.full_like(new, torch.nan).requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        with torch.no_grad():
            late.copy_(new)
        loss = batch_triplet_loss(late, labels, **settings)
        (gradient,) = torch.autograd.grad(loss, late)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(loss.detach(), expected[0]) and torch.equal(gradient, expected[1])


@forms
def test_host_never_waits(mining, soft):
    embeddings, labels = random_batch(300, 20, 30, device="cuda")
    embeddings.requires_grad_()
    for reduction in ("mean_active", "none"):
        settings = {"mining": mining, "soft": soft, "reduction": reduction, "return_stats": True}
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss, _ = batch_triplet_loss(embeddings, labels, **settings)
            torch.autograd.grad(loss.sum(), embeddings)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("mining", "most"), [("all", 12), ("semihard", 12), ("hard", 9)])
def test_launches(mining, most):
    embeddings, labels = random_batch(1024, 64, 100, device="cuda")
    embeddings.requires_grad_()
    kernels = kernels_of(lambda: step(embeddings, labels, mining=mining))
    assert 0 < len(kernels) <= most, kernels


@pytest.mark.parametrize("mining", MINING)
def test_memory(mining):
    """A block of rows of the distances, and no more of 20000 rows, whose matrix takes 1.6 GB."""
    embeddings, labels = random_batch(20_000, 64, 2000, device="cuda")
    embeddings.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(embeddings, labels, mining=mining)
    assert torch.cuda.max_memory_allocated() - before < 700 * 2**20


@pytest.mark.parametrize("mining", ["all", "hard"])
def test_more_elements_than_32_bits_count(mining):
    """The last of so many references is the nearest negative of both anchors."""
    count, dim = (1 << 21) + 8, 1024
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GB")
    generator = torch.Generator("cuda").manual_seed(0)
    references = torch.randn(
        count, dim, dtype=torch.half, device="cuda", generator=generator
    ).requires_grad_()
    labels = torch.zeros(count, dtype=torch.long, device="cuda")
    labels[-3] = 1
    anchors = references.detach()[-1].float() + torch.tensor([[0.1], [-0.1]], device="cuda")
    loss = batch_triplet_loss(
        anchors.half(), torch.ones(2, dtype=torch.long, device="cuda"), mining=mining,
        reference_embeddings=references, reference_labels=labels, reduction="sum", margin=-30.0,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, references)
    assert loss > 0
    assert gradient[-1].any() and gradient[-3].any() and not gradient[:-3].any()


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    embeddings, labels = random_batch(100, 8, 9)
    expected = loss_and_gradients(embeddings.to("cuda:0"), labels.to("cuda:0"))
    results = loss_and_gradients(embeddings.to("cuda:1"), labels.to("cuda:1"))
    for result, other in zip(results, expected, strict=True):
        assert result.device.index == 1 and torch.equal(result.cpu(), other.cpu())
