# SPDX-License-Identifier: BSD-3-Clause
"""The same bits every time, in memory of any content, and chunk by chunk."""

import pytest
import torch

from .cases import FORMS, loss_and_gradients, random_batch

pytestmark = pytest.mark.usefixtures("fused_only")

forms = pytest.mark.parametrize(("mining", "soft"), FORMS)


def assert_repeats(embeddings, labels, references=None, times=5, **settings):
    first = loss_and_gradients(embeddings, labels, references, **settings)
    assert all(result.any() for result in first)
    for _ in range(times - 1):
        again = loss_and_gradients(embeddings, labels, references, **settings)
        assert all(map(torch.equal, again, first))


@forms
@pytest.mark.parametrize("classes", [2, 40])
def test_repeats(device, mining, soft, classes):
    count = 3000 if device == "cuda" else 400  # of which some are sorted in pieces
    embeddings, labels = random_batch(count, 20, classes, device=device)
    others = random_batch(500, 20, classes, device=device, seed=1)
    for references in (None, others):
        assert_repeats(embeddings, labels, references, mining=mining, soft=soft, margin=0.5)


@pytest.mark.usefixtures("poisoned_memory")
@forms
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_reads_no_memory_before_it_is_written(device, mining, soft, reduction):
    embeddings, labels = random_batch(150, 9, 8, device=device)
    labels[:2] = torch.tensor([100, 101])
    settings = {"mining": mining, "soft": soft, "reduction": reduction}
    for references in (None, random_batch(70, 9, 8, device=device, seed=1)):
        results = loss_and_gradients(embeddings, labels, references, **settings)
        assert all(result.isfinite().all() for result in results)


@pytest.mark.usefixtures("two_threads")
@forms
def test_mining_does_not_depend_on_threads(mining, soft):
    """In float64, whose products differ too little to change what is picked."""
    embeddings, labels = random_batch(500, 20, 30, torch.float64)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(loss_and_gradients(embeddings, labels, mining=mining, soft=soft))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("mining", "soft"), [("all", False), ("semihard", True), ("hard", False)])
def test_chunks(device, mining, soft):
    """More anchors than the products of one chunk have rows, against the same in parts."""
    count = 70_000 if device == "cpu" else 600_000
    references = random_batch(200, 2, 9, device=device, seed=1)
    embeddings, labels = random_batch(count, 2, 9, device=device)
    settings = {"mining": mining, "soft": soft, "reduction": "sum"}
    loss, gradient, shared = loss_and_gradients(embeddings, labels, references, **settings)
    parts = [
        loss_and_gradients(x, y, references, **settings)
        for x, y in zip(embeddings.chunk(7), labels.chunk(7), strict=True)
    ]
    torch.testing.assert_close(loss, sum(part[0] for part in parts), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.cat([part[1] for part in parts]))
    torch.testing.assert_close(shared, sum(part[2] for part in parts), rtol=1e-3, atol=0.2)
