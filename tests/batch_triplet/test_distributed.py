# SPDX-License-Identifier: BSD-3-Clause
"""A batch that several processes share, against all of it in one."""

import pytest
import torch
import torch.distributed as dist
from ranks import assert_passed, failures_on_ranks, needs_two_gpus, own, place
from torch.nn.parallel import DistributedDataParallel

import fused_ops
from fused_ops import distributed, set_fallback

from .cases import DISTANCES, FORMS, error, random_batch

RANKS = [
    pytest.param((3, "gloo"), id="3 gloo"),
    pytest.param((2, "nccl"), id="2 nccl", marks=[pytest.mark.cuda, needs_two_gpus]),
]

# The rest of this file up to the fixture runs in every process.


def splits(total):
    """How many rows each rank has: alike, uneven, and none in one."""
    ranks = dist.get_world_size()
    even = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    return even, [0, *[(total + r) // (ranks - 1) for r in range(ranks - 1)]]


def compare(embeddings, labels, counts, told, **settings):
    """Loss, statistics and this rank's gradient, for an upstream gradient of 3."""
    x = embeddings.clone().requires_grad_()
    loss, stats = fused_ops.batch_triplet_loss(x, labels, return_stats=True, **settings)
    (gradient,) = torch.autograd.grad(3 * loss, x)
    y = own(embeddings, counts).clone().requires_grad_()
    ours, our_stats = distributed.batch_triplet_loss(
        y, own(labels, counts), return_stats=True, counts=counts if told else None, **settings
    )
    (our_gradient,) = torch.autograd.grad(3 * ours, y)
    bound = 1e-12 if embeddings.dtype == torch.float64 else 1e-5
    assert error([ours.detach(), *our_stats], [loss.detach(), *stats]) < bound
    assert ours.dtype == loss.dtype and our_gradient.dtype == y.dtype
    scale = gradient.norm()
    assert scale > 0 and (our_gradient - own(gradient, counts)).norm() < bound * scale
    everywhere = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, ours.detach())
    assert all(torch.equal(other, ours) for other in everywhere)


def check_same_as_one_process():
    embeddings, labels = random_batch(41, 5, 6, torch.float64, place())
    forms = [(*form, "euclidean", "mean") for form in FORMS]
    forms += [("all", False, distance, "mean_active") for distance in DISTANCES]
    forms += [("hard", True, "squared", "sum")]
    for counts in splits(41):
        assert sum(counts) == 41
        for mining, soft, distance, reduction in forms:
            settings = {"mining": mining, "soft": soft, "distance": distance}
            with set_fallback("error"):
                compare(
                    embeddings, labels, counts, mining == "all", **settings, reduction=reduction
                )


def check_float32():
    embeddings, labels = random_batch(41, 5, 6, torch.float32, place())
    for mining, _ in FORMS:
        compare(embeddings, labels, splits(41)[0], True, mining=mining)


def check_without_kernels():
    from fused_ops.batch_triplet import function

    embeddings, labels = random_batch(41, 5, 6, torch.float64, place())
    expected = fused_ops.batch_triplet_loss(embeddings, labels)
    counts = splits(41)[1]
    x = own(embeddings, counts).clone().requires_grad_()
    distributed.batch_triplet_loss(x, own(labels, counts), counts=counts).backward()
    found, x.grad, function.reasons = x.grad, None, lambda *tensors: ["the test wants it"]
    loss = distributed.batch_triplet_loss(x, own(labels, counts), counts=counts)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(x.grad, found)


def check_data_parallel():
    """As the docstring says: with the loss times the number of processes."""
    data, labels = random_batch(40, 6, 5, torch.float64, place())

    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(6, 4, dtype=torch.float64, device=place())

    single, spread = model(), DistributedDataParallel(model())
    fused_ops.batch_triplet_loss(single(data), labels).backward()
    counts = splits(40)[0]
    loss = distributed.batch_triplet_loss(spread(own(data, counts)), own(labels, counts))
    (loss * dist.get_world_size()).backward()
    for ours, theirs in zip(spread.parameters(), single.parameters(), strict=True):
        assert theirs.grad.any()
        torch.testing.assert_close(ours.grad, theirs.grad)


def check_refusals():
    embeddings, labels = random_batch(6, 3, 2, device=place())
    for call, message in (
        (lambda: distributed.batch_triplet_loss(embeddings, labels, reduction="none"), "reduction"),
        (lambda: distributed.batch_triplet_loss(embeddings, labels, counts=[1]), "counts"),
        (lambda: distributed.batch_triplet_loss(embeddings, labels[:2]), "labels"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


CHECKS = [
    check_same_as_one_process,
    check_float32,
    check_without_kernels,
    check_data_parallel,
    check_refusals,
]


@pytest.fixture(scope="module", params=RANKS)
def failures(request, tmp_path_factory):
    ranks, backend = request.param
    if backend == "gloo" and not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    return failures_on_ranks(CHECKS, ranks, tmp_path_factory.mktemp("ranks"), backend)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_several_processes(failures, check):
    assert_passed(failures, check)
