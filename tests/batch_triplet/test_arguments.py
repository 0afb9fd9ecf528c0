# SPDX-License-Identifier: BSD-3-Clause
"""What is refused and in which words, what falls back, and what explain says."""

import re

import pytest
import torch

import fused_ops
from fused_ops import FallbackError, batch_triplet_loss, explain, set_fallback

from .cases import MINING, REDUCTIONS, error, looped_loss, loss_and_gradients, random_batch

X, LABELS = random_batch(12, 4, 3)
OTHERS = {"reference_embeddings": X[:5], "reference_labels": LABELS[:5]}


@pytest.mark.parametrize(
    ("arguments", "settings", "kind", "message"),
    [
        (
            (X.long(), LABELS),
            {},
            TypeError,
            "embeddings: expected a floating-point tensor, got torch.int64",
        ),
        (([[1.0]], LABELS), {}, TypeError, "embeddings: expected a tensor, got list"),
        ((X, LABELS.float()), {}, TypeError, "labels: expected integers, got torch.float32"),
        ((X, None), {}, TypeError, "labels: expected a tensor, got NoneType"),
        ((X[0], LABELS), {}, ValueError, r"embeddings: expected (rows, dim), got shape (4,)"),
        ((X, LABELS[:5]), {}, ValueError, "shape (12,), got (5,)"),
        ((X, LABELS.to("meta")), {}, ValueError, "the device of embeddings, cpu, got meta"),
        ((X, LABELS, "1"), {}, TypeError, "margin: expected a number, got str"),
        ((X, LABELS, True), {}, TypeError, "margin: expected a number, got bool"),
        ((X, LABELS), {"mining": "easy"}, ValueError, "all, semihard, hard, got 'easy'"),
        ((X, LABELS), {"distance": "l1"}, ValueError, "euclidean, squared, cosine, got 'l1'"),
        ((X, LABELS), {"reduction": 1}, ValueError, "none, mean, mean_active, sum, got 1"),
        ((X, LABELS), {"soft": True}, ValueError, 'mining "semihard" or "hard" with it, got "all"'),
        ((X, LABELS), {"reference_labels": LABELS}, ValueError, "expected both or neither"),
        ((X.double(), LABELS), OTHERS, ValueError, "dtype of embeddings, torch.float64, got"),
        ((X[:, :3], LABELS), OTHERS, ValueError, "dim of embeddings, 3, got 4"),
        (
            (X, LABELS),
            OTHERS | {"reference_labels": LABELS[:5].float()},
            TypeError,
            "reference_labels: expected integers, got torch.float32",
        ),
    ],
)
def test_refused(arguments, settings, kind, message):
    for call in (batch_triplet_loss, lambda *a, **k: explain(batch_triplet_loss, *a, **k)):
        with pytest.raises(kind, match=re.escape(message)):
            call(*arguments, **settings)


def test_module_is_the_function(device, fused_only):
    embeddings, labels = random_batch(20, 4, 3, device=device)
    settings = {"margin": 0.4, "mining": "hard", "distance": "cosine", "soft": True}
    module = fused_ops.BatchTripletLoss(**settings, reduction="sum", return_stats=True)
    assert "mining='hard'" in repr(module)
    for references in ((), (embeddings[:5], labels[:5])):
        names = dict(zip(("reference_embeddings", "reference_labels"), references, strict=False))
        expected = batch_triplet_loss(
            embeddings, labels, **settings, reduction="sum", return_stats=True, **names
        )
        result = module(embeddings, labels, *references)
        assert torch.equal(result[0], expected[0]) and result[1] == expected[1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64], ids=str)
def test_labels_of_every_kind(device, fused_only, dtype):
    embeddings, labels = random_batch(20, 4, 3, device=device)
    expected = batch_triplet_loss(embeddings, labels)
    assert torch.equal(batch_triplet_loss(embeddings, labels.to(dtype)), expected)
    strided = labels.repeat_interleave(2)[::2]
    assert torch.equal(batch_triplet_loss(embeddings, strided), expected)
    if dtype != torch.uint8:
        assert torch.equal(batch_triplet_loss(embeddings, -labels.to(dtype)), expected)


def test_embeddings_of_every_layout(device, fused_only):
    embeddings, labels = random_batch(20, 6, 3, device=device)
    expected = loss_and_gradients(embeddings, labels)
    wide = torch.stack([embeddings, embeddings], dim=1).flatten(1)[:, :6]
    for other in (embeddings.T.contiguous().T, wide, embeddings.flip(0).flip(0)):
        results = loss_and_gradients(other, labels)
        for result, truth in zip(results, expected, strict=True):
            assert torch.equal(result, truth)


def test_inputs_stay(device, fused_only):
    embeddings, labels = random_batch(20, 6, 3, device=device)
    copies = embeddings.clone(), labels.clone()
    for mining in MINING:
        loss_and_gradients(embeddings, labels, (embeddings, labels), mining=mining)
    assert torch.equal(embeddings, copies[0]) and torch.equal(labels, copies[1])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)], ids=str)
def test_empty(shape, reduction):
    embeddings = torch.zeros(shape, requires_grad=True)
    labels = torch.arange(shape[0]) % 2
    loss = batch_triplet_loss(embeddings, labels, margin=0.5, reduction=reduction)
    expected = {"sum": 0.0 if shape[0] == 0 else 4.0, "none": 1.0}.get(reduction, 0.5)
    assert (loss == (0.0 if shape[0] == 0 else expected)).all()
    loss.sum().backward()
    assert embeddings.grad.shape == shape


def test_references_without_rows():
    loss = batch_triplet_loss(X, LABELS, reference_embeddings=X[:0], reference_labels=LABELS[:0])
    assert loss == 0


def test_explain(device):
    embeddings, labels = random_batch(20, 4, 3, device=device)
    assert str(explain(batch_triplet_loss, embeddings, labels)) == (
        f"batch_triplet_loss: fused (device={device}, dtype=float32)"
    )
    others = {"reference_embeddings": embeddings, "reference_labels": labels}
    assert explain(batch_triplet_loss, embeddings, labels, **others).path == "fused"


class Subclass(torch.Tensor):
    pass


def test_reasons():
    def reasons(embeddings, labels=LABELS):
        return "; ".join(explain(batch_triplet_loss, embeddings, labels).reasons)

    assert "no rows or no dimensions" in reasons(X[:0], LABELS[:0])
    assert "is not a plain torch.Tensor" in reasons(X, LABELS.as_subclass(Subclass))
    with torch.inference_mode():
        inference = X.clone()
    assert reasons(inference) == ""
    assert "float8" in reasons(X.to(torch.float8_e4m3fn))
    seen = []
    torch.func.vmap(lambda x: seen.append(reasons(x)) or x)(X[None])
    assert seen == ["a torch.func transform is active"]


def test_a_fallback_can_be_forbidden():
    with set_fallback("error"), pytest.raises(FallbackError, match="batch_triplet_loss has no"):
        batch_triplet_loss(X[:0], LABELS[:0])


@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_differentiating_the_gradient(device, mining, reduction):
    """The reference's, for a penalty on the gradient."""
    embeddings, labels = random_batch(16, 4, 3, torch.float64, device)
    found = []
    for function in (batch_triplet_loss, looped_loss):
        x = embeddings.clone().requires_grad_()
        loss = function(x, labels, margin=0.4, mining=mining, reduction=reduction)
        (first,) = torch.autograd.grad((loss**2).sum(), x, create_graph=True)
        found.append([first.detach(), *torch.autograd.grad(first.square().sum(), x)])
    assert error(*found) < 1e-12
    loss = batch_triplet_loss(embeddings.requires_grad_(), labels)
    with set_fallback("error"), pytest.raises(FallbackError, match="to be differentiated"):
        torch.autograd.grad(loss, embeddings, create_graph=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_more_than_once(device, fused_only, reduction):
    embeddings, labels = random_batch(16, 4, 3, device=device)
    x = embeddings.requires_grad_()
    loss = batch_triplet_loss(x, labels, reduction=reduction).sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (third,) = torch.autograd.grad(3 * loss, x)
    torch.testing.assert_close(third, 3 * first)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["anchors", "references"])
@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_some(device, fused_only, wanted, mining, reduction):
    embeddings, labels = random_batch(20, 4, 3, device=device)
    others, other_labels = random_batch(15, 4, 3, device=device, seed=1)
    settings = {"mining": mining, "reduction": reduction}
    _, *both = loss_and_gradients(embeddings, labels, (others, other_labels), **settings)
    x, y = embeddings.requires_grad_(wanted[0]), others.requires_grad_(wanted[1])
    loss = batch_triplet_loss(
        x, labels, **settings, reference_embeddings=y, reference_labels=other_labels
    )
    (gradient,) = torch.autograd.grad(loss.sum(), x if wanted[0] else y)
    assert torch.equal(gradient, both[wanted.index(True)])


def test_embeddings_as_their_own_references(device, fused_only):
    """Given as references nothing is left out, and both parts of the gradient arrive."""
    embeddings, labels = random_batch(20, 4, 3, torch.float64, device)
    results = []
    for function in (batch_triplet_loss, looped_loss):
        x = embeddings.clone().requires_grad_()
        loss = function(x, labels, reference_embeddings=x, reference_labels=labels)
        results.append([loss.detach(), *torch.autograd.grad(loss, x)])
    assert error(*results) < 1e-12


def test_many_gradients_at_once(device, fused_only):
    embeddings, labels = random_batch(10, 4, 3, device=device)
    x = embeddings.requires_grad_()
    loss = batch_triplet_loss(x, labels)
    (batched,) = torch.autograd.grad(
        loss, x, torch.tensor([1.0, 2.0], device=device), is_grads_batched=True, retain_graph=True
    )
    (single,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(batched, torch.stack([single, 2 * single]))
