# SPDX-License-Identifier: BSD-3-Clause
"""Values and gradients, against three loops in float64."""

import math

import pytest
import torch

from fused_ops import batch_triplet_loss, set_fallback
from fused_ops.batch_triplet import function

from .cases import (
    DISTANCES,
    DTYPES,
    FORMS,
    MINING,
    REDUCTIONS,
    distances_of,
    error,
    looped_loss,
    loss_and_gradients,
    random_batch,
)

forms = pytest.mark.parametrize(("mining", "soft"), FORMS)


@pytest.fixture
def in_torch(monkeypatch):
    """Calls the reference instead of the kernels."""

    def call(*args, **kwargs):
        with monkeypatch.context() as patch, set_fallback("allow"):
            patch.setattr(function, "reasons", lambda *tensors: ["the test wants it"])
            return batch_triplet_loss(*args, **kwargs)

    return call


def looped(mining, soft, distance, reduction, references, upstream):
    return loss_and_gradients(
        *BATCH, references, upstream, looped_loss,
        margin=0.3, mining=mining, soft=soft, distance=distance, reduction=reduction,
    )  # fmt: skip


# Classes of two to a dozen rows, and two that are equal.
BATCH = random_batch(64, 5, 9, torch.float64)
BATCH[1][:2] = 9
BATCH[0][0] = BATCH[0][1]
REFERENCES = random_batch(40, 5, 8, torch.float64, seed=1)


@forms
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("references", [None, REFERENCES], ids=["batch", "references"])
def test_equals_three_loops(device, in_torch, mining, soft, distance, references):
    """The kernels and the reference, in float64, for every reduction."""
    upstream = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    batch = [x.to(device) for x in BATCH]
    others = references and [x.to(device) for x in references]
    for reduction in REDUCTIONS:
        settings = {"mining": mining, "soft": soft, "distance": distance, "reduction": reduction}
        weights = upstream if reduction == "none" else None
        exact = looped(references=references, upstream=weights, **settings)
        for call in (None, in_torch):
            results = loss_and_gradients(*batch, others, weights, call, margin=0.3, **settings)
            assert error([x.cpu() for x in results], exact) < 1e-12


@forms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [3, 32, 515])
def test_dtypes(device, fused_only, mining, soft, dtype, dim):
    """As exact as the rounding of the gradient to its dtype and float32 products allow."""
    embeddings, labels = random_batch(90, dim, 12, dtype, device)
    # Where rounding picks another pair the gradient jumps, so pairs are kept apart by the seed.
    settings = {"mining": mining, "soft": soft, "margin": 0.3}
    results = loss_and_gradients(embeddings, labels, **settings)
    exact = loss_and_gradients(embeddings.double(), labels, **settings)
    assert results[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert results[1].dtype == dtype
    assert error(results[:1], exact[:1]) < 1e-5
    assert error(results[1:], exact[1:]) < 2 * torch.finfo(dtype).eps + 2e-4


@pytest.mark.parametrize("mining", MINING)
def test_large_classes(device, fused_only, mining):
    """More positives than are sorted at a time, against the reference on a part of the anchors."""
    embeddings, labels = random_batch(2600, 4, 2, torch.float32, device)
    settings = {"mining": mining, "margin": 0.1, "reduction": "sum"}
    results = loss_and_gradients(embeddings, labels, **settings)
    exact = loss_and_gradients(embeddings.double(), labels, **settings)
    assert error(results[:1], exact[:1]) < 1e-5
    if mining != "semihard":  # whose gradient jumps where rounding swaps two neighbours
        assert error(results[1:], exact[1:]) < 1e-4
    # The float64 kernels, by anchors of their own, whose gradient no others have part in.
    anchors = embeddings[:3].double()
    references = embeddings.double(), labels
    results = loss_and_gradients(anchors, labels[:3], references, **settings)
    exact = loss_and_gradients(anchors, labels[:3], references, function=by_sorting, **settings)
    assert error(results, exact) < 1e-12


def by_sorting(anchors, labels, mining, margin, reduction, reference_embeddings, reference_labels):
    """The sum of losses from the sorted distances of each anchor."""
    total = 0
    for anchor, label in zip(anchors, labels, strict=True):
        d = distances_of(anchor, reference_embeddings, "euclidean")
        positives, negatives = d[reference_labels == label], d[reference_labels != label]
        negatives = negatives.sort().values
        if mining == "all":
            terms = positives[:, None] - negatives + margin
        elif mining == "hard":
            terms = positives.max() - negatives[0] + margin
        else:
            place = torch.searchsorted(negatives.detach(), positives.detach(), right=True)
            terms = positives - negatives[place.clamp_max(len(negatives) - 1)] + margin
        total = total + terms.clamp_min(0).sum()
    return total


@forms
def test_equal_rows(device, fused_only, mining, soft):
    """All at distance zero: the loss is that of the margin, the gradient zero."""
    embeddings = torch.full((12, 7), 3.7, device=device)
    labels = torch.arange(12, device=device) % 3
    loss, gradient = loss_and_gradients(embeddings, labels, mining=mining, soft=soft, margin=0.25)
    expected = math.log1p(math.exp(0.25)) if soft else 0.25
    torch.testing.assert_close(loss.item(), expected)
    assert not gradient.any()


@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2, 3]], ids=["one class", "no pair"])
def test_no_triplet(device, fused_only, mining, reduction, labels):
    embeddings = torch.randn(4, 3, device=device)
    labels = torch.tensor(labels, device=device)
    loss, gradient = loss_and_gradients(embeddings, labels, mining=mining, reduction=reduction)
    assert not loss.any() and not gradient.any()


@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_propagates(device, fused_only, in_torch, mining, reduction):
    embeddings, labels = random_batch(30, 6, 4, device=device)
    embeddings[3, 2] = torch.nan
    settings = {"mining": mining, "reduction": reduction}
    for call in (None, in_torch):
        loss, gradient = loss_and_gradients(embeddings, labels, function=call, **settings)
        assert loss.isnan().all() and gradient[3].isnan().any()


def test_nan_of_a_class_without_pairs_is_not_used(device, fused_only):
    """An anchor has no loss without a positive, but is a negative of the others."""
    embeddings, _ = random_batch(6, 5, 2, device=device)
    labels = torch.tensor([0, 0, 1, 1, 1, 2], device=device)
    embeddings[0] = torch.nan
    losses = batch_triplet_loss(embeddings, labels, reduction="none")
    assert losses.isnan().tolist() == [True] * 5 + [False] and losses[5] == 0


@pytest.mark.parametrize("mining", MINING)
def test_rows_far_from_zero(device, fused_only, mining):
    """The same loss, though inner products of such rows lose every digit of a distance."""
    embeddings, labels = random_batch(80, 16, 9, torch.float64, device)
    moved = embeddings + 4096.0
    exact = loss_and_gradients(moved, labels, mining=mining)
    single = loss_and_gradients(moved.float(), labels, mining=mining)
    same = loss_and_gradients(moved.float().double(), labels, mining=mining)
    assert error(exact[1:], loss_and_gradients(embeddings, labels, mining=mining)[1:]) < 1e-8
    assert error(single, same) < 2e-5


def test_close_rows_keep_their_digits(device, fused_only):
    """Rows a thousandth of their norm apart, a millionth of its square, in the same class."""
    embeddings, labels = random_batch(64, 32, 32, torch.float32, device, spread=1e-3)
    settings = {"mining": "hard", "margin": 3.0}
    exact = loss_and_gradients(embeddings.double(), labels, **settings)
    assert error(loss_and_gradients(embeddings, labels, **settings), exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_margin_keeps_its_digits_beside_large_distances(device, fused_only, dtype):
    """Of the first row both others are as far that the sum of distance and margin is rounded."""
    far = 2.0 ** {torch.float32: 20, torch.float64: 49}[dtype]
    x = torch.tensor([[0], [far], [-far]], dtype=dtype, device=device)
    labels = torch.tensor([0, 0, 1], device=device)
    loss = batch_triplet_loss(x, labels, margin=0.1, reduction="sum")
    assert loss == torch.tensor(0.1, dtype=dtype)


@forms
@pytest.mark.parametrize("margin", [math.inf, -math.inf, 1e30, -1e30])
def test_margins_that_no_distance_reaches(device, fused_only, in_torch, mining, soft, margin):
    """For anchors with triplets and without."""
    embeddings, labels = random_batch(12, 3, 3, device=device)
    labels[0] = 7
    settings = {"margin": margin, "mining": mining, "soft": soft, "reduction": "none"}
    loss = batch_triplet_loss(embeddings, labels, **settings)
    assert loss[0] == 0
    assert soft or (loss[1:] > 0).all() == (margin > 0)
    torch.testing.assert_close(loss, in_torch(embeddings, labels, **settings), equal_nan=True)


@pytest.mark.parametrize("mining", MINING)
def test_infinite_rows_are_far(device, fused_only, mining):
    embeddings, labels = random_batch(20, 4, 3, device=device)
    labels[5] = 7
    expected = batch_triplet_loss(embeddings, labels, mining=mining, reduction="sum")
    far = torch.cat([embeddings, torch.full((1, 4), torch.inf, device=device)])
    labels = torch.cat([labels, labels.new_tensor([8])])
    loss = batch_triplet_loss(far, labels, mining=mining, reduction="sum")
    if mining != "semihard":  # where the farthest negative is one more term
        torch.testing.assert_close(loss, expected)
    assert loss.isfinite()


@forms
@pytest.mark.parametrize("values", ["huge", "infinite"])
def test_infinite_distances_of_both_kinds(device, fused_only, in_torch, mining, soft, values):
    """One less another is NaN, wherever a triplet has both, not the zero of one without a loss."""
    far = {"huge": 1e30, "infinite": math.inf}[values]
    rows = torch.tensor([[0.0], [far], [1], [2], [-far], [3], [4], [5]], device=device)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2], device=device)
    settings = {"mining": mining, "soft": soft, "reduction": "none"}
    expected = in_torch(rows, labels, **settings)
    assert expected.isnan().any() and not expected.isnan().all()
    loss = batch_triplet_loss(rows, labels, **settings)
    torch.testing.assert_close(loss, expected, equal_nan=True)


@pytest.mark.parametrize("mining", MINING)
def test_ties_take_the_first(device, fused_only, mining):
    """Two positives and two negatives at the same distance: the gradient goes to the first."""
    rows = [[0.0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]]
    embeddings = torch.tensor(rows, device=device)
    labels = torch.tensor([0, 0, 0, 1, 2], device=device)
    anchor = {"embeddings": embeddings[:1].clone(), "labels": labels[:1]}
    settings = {"margin": 0.5, "mining": mining, "reduction": "sum"}
    loss, _, gradient = loss_and_gradients(
        **anchor, references=(embeddings[1:].clone(), labels[1:]), **settings
    )
    expected = {
        "all": ([2, -2, -2, 2], 4 * 0.5),
        "semihard": ([1, -1, -2, 0], 2 * 0.5),
        "hard": ([1, 0, -1, 0], 0.5),
    }[mining]
    assert loss.item() == expected[1]
    along = torch.stack([gradient[0, 0], gradient[1, 0], gradient[2, 1], gradient[3, 1]])
    assert along.tolist() == expected[0]


def test_semihard_is_farther_than_the_positive(device, fused_only):
    """A negative at the positive's own distance is not."""
    rows = torch.tensor([[0.0], [1.0], [-1.0], [2.0], [-2.0]], device=device)  # of mean zero
    labels = torch.tensor([0, 0, 1, 1, 1], device=device)
    references = {"reference_embeddings": rows[1:], "reference_labels": labels[1:]}
    loss = batch_triplet_loss(rows[:1], labels[:1], 1.5, "semihard", **references)
    assert loss == 1 - 2 + 1.5


@pytest.mark.parametrize("mining", MINING)
def test_at_the_margin(device, fused_only, mining):
    """A loss of exactly zero is not active and has no gradient, as of torch's relu."""
    rows = torch.tensor([[0.0], [1.0], [1.5]], device=device)
    anchor, labels = rows[:1].clone(), torch.tensor([0, 0, 1], device=device)
    references = {"reference_embeddings": rows[1:], "reference_labels": labels[1:]}
    anchor.requires_grad_()
    loss, stats = batch_triplet_loss(
        anchor, labels[:1], 0.5, mining, return_stats=True, **references
    )
    assert loss == 0 and stats.active_fraction == 0
    assert not torch.autograd.grad(loss, anchor)[0].any()


@forms
def test_by_hand(device, fused_only, mining, soft):
    """One anchor at 0 on a line, its positives at 1 and 3, its negatives at -2 and 4."""
    anchor = torch.zeros(1, 1, device=device, dtype=torch.float64)
    references = torch.tensor([[1.0], [3], [-2], [4]], device=device, dtype=torch.float64)
    labels = torch.tensor([5, 5, 6, 7], device=device)
    gaps = {
        "all": [1 - 2, 1 - 4, 3 - 2, 3 - 4], "semihard": [1 - 2, 3 - 4], "hard": [3 - 2]
    }[mining]  # fmt: skip
    terms = [gap + 1.5 for gap in gaps]
    terms = [math.log1p(math.exp(x)) if soft else max(x, 0) for x in terms]
    loss, stats = batch_triplet_loss(
        anchor, labels[:1], margin=1.5, mining=mining, soft=soft, return_stats=True,
        reference_embeddings=references, reference_labels=labels,
    )  # fmt: skip
    assert loss.item() == pytest.approx(sum(terms) / len(terms))
    active = sum(term > 0 for term in terms) / len(terms)
    distances = {"all": (2, 3), "semihard": (2, 3), "hard": (3, 2)}[mining]
    assert [x.item() for x in stats] == pytest.approx([active, *distances])


def test_stats_without_triplets(device, fused_only):
    embeddings = torch.randn(3, 2, device=device)
    labels = torch.arange(3, device=device)
    _, stats = batch_triplet_loss(embeddings, labels, return_stats=True)
    assert stats.active_fraction == 0 and stats.positive_distance.isnan()


@pytest.mark.parametrize("mining", MINING)
def test_stats_of_the_reference_are_the_same(device, in_torch, mining):
    embeddings, labels = random_batch(50, 6, 5, torch.float64, device)
    settings = {"mining": mining, "return_stats": True, "margin": 0.4}
    _, ours = batch_triplet_loss(embeddings, labels, **settings)
    _, theirs = in_torch(embeddings, labels, **settings)
    torch.testing.assert_close(list(ours), list(theirs))
