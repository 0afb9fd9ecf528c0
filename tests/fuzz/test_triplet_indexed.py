# SPDX-License-Identifier: BSD-3-Clause
"""triplet_margin_loss_indexed: any call, against torch's function of gathered rows in float64."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import assume
from hypothesis import strategies as st
from triplet.cases import REDUCTION_NUMBERS, assert_same_bits, error_of
from triplet.test_indexed import backward_op, forward_op

from fused_ops import explain, set_fallback, triplet_margin_loss_indexed
from fused_ops._support import accumulate_dtype
from fused_ops.triplet.indexed import reference

from . import test_triplet
from .strategies import (
    LAYOUTS,
    fuzz,
    layouts,
    parts,
    poisoned,
    random_values,
    spoil,
)

# Embeddings, columns and triplets, in the classes that launch policies tell apart
SHAPES = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 60)),
    st.tuples(st.integers(1, 5), st.integers(70, 5000), st.integers(1, 9)),
    st.tuples(st.integers(1, 600), st.integers(1, 130), st.integers(1, 500)),
    st.tuples(st.integers(1, 9), st.sampled_from([255, 256, 1001, 1024]), st.integers(1, 140)),
    st.tuples(st.integers(1, 2), st.sampled_from([16_381, 70_001]), st.integers(1, 4)),
    st.tuples(
        st.integers(1, 300), st.integers(1, 8), st.sampled_from([1000, 5461, 5462, 5463, 44_000])
    ),
)
SHARES = (0, 1, 3, 16, 100, 10_000)  # entries that a group of threads takes; 0 chooses

# What becomes of (3, triplets) random rows
PATTERNS = {
    "random": lambda rows, count: rows - count * (rows % 2),
    "from the start": lambda rows, count: rows,
    "from the end": lambda rows, count: rows - count,
    "one anchor": lambda rows, count: torch.cat([rows[:1, :1].expand_as(rows[:1]), rows[1:]]),
    "one row": lambda rows, count: rows[:1, :1].expand_as(rows),
    "few rows": lambda rows, count: rows % 3 % count,
    "positive is anchor": lambda rows, count: rows[[0, 0, 2]],
    "negative is positive": lambda rows, count: rows[[0, 1, 1]],
    "sorted": lambda rows, count: rows.sort(1).values,
    "first and last": lambda rows, count: (rows % 2) * (count - 1),
}
# How each of the three is given
FORMS = {
    "plain": lambda index: index,
    "int32": lambda index: index.int(),
    "every other": lambda index: index.repeat_interleave(2)[::2],
    "column": lambda index: index[:, None].repeat(1, 3)[:, 1],
}


@dataclass(frozen=True)
class Case(test_triplet.Case):
    """Of which `shape` is that of the gathered rows, and what is of inputs holds of one."""

    count: int
    pattern: str
    forms: tuple[str, str, str]
    split: int  # rows of a matrix of triplets; 0 for a vector
    equal_rows: float
    share: int

    def embeddings(self, device):
        generator = torch.Generator().manual_seed(self.seed)
        values = random_values(generator, (self.count, self.shape[-1]), self.values, self.dtype)
        values[torch.rand(self.count, generator=generator) < self.equal_rows] = values[0].clone()
        if self.special[0] != 0:
            spoil(generator, values, self.special[0])
        return LAYOUTS[self.layouts[0]](values.to(device, self.dtype))

    def indices(self, device):
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows = torch.randint(self.count, (3, self.shape[0]), generator=generator)
        rows = PATTERNS[self.pattern](rows, self.count)
        found = [FORMS[form](row) for form, row in zip(self.forms, rows, strict=True)]
        if self.split > 0 and self.shape[0] % self.split == 0:
            found = [index.reshape(self.split, -1) for index in found]
        return [index.to(device) for index in found]


def cases(**changes):
    form = st.sampled_from(list(FORMS))

    def build(shape, **fields):
        count, dim, triplets = shape
        fields |= {"shape": (triplets, dim), "count": count, "equal": "none"}
        fields |= {"layouts": 3 * fields["layouts"], "special": 3 * fields["special"]}
        return Case(**fields)

    fields = test_triplet.fields() | {
        "shape": SHAPES,
        "special": st.just((0,)),
        "layouts": st.tuples(layouts),
        "needs_grad": st.sampled_from([(True,), (True,), (False,)]),
        "pattern": st.sampled_from(list(PATTERNS)),
        "forms": st.tuples(form, form, form),
        "split": st.sampled_from([0, 0, 1, 2, 5]),
        "equal_rows": st.sampled_from([0, 0, 0, 0.3, 1]),
        "share": st.sampled_from(SHARES),
    }
    del fields["equal"]
    return st.builds(build, **fields | changes)


def run(case, embeddings, indices, grad_loss_of):
    """The loss and its gradient, None where not wanted, on CUDA with the share of the case."""
    (wanted,) = case.needs_grad
    if case.share > 0 and embeddings.is_cuda:
        stacked = torch.stack(indices).reshape(3, -1).long()
        settings = (case.margin, case.p, case.eps, case.swap, REDUCTION_NUMBERS[case.reduction])
        loss, state = forward_op(embeddings, stacked, *settings, False, wanted)
        gradient = None
        if wanted:
            gradient = backward_op(
                grad_loss_of(loss), embeddings, stacked, state, *settings, case.share
            )
        return loss.reshape(indices[0].shape) if case.reduction == "none" else loss, gradient
    leaf = embeddings.detach().requires_grad_(wanted)
    loss = triplet_margin_loss_indexed(leaf, *indices, **case.settings)
    if wanted:
        loss.backward(grad_loss_of(loss.detach()))
    return loss.detach(), leaf.grad


def check(case, device):
    embeddings, indices = case.embeddings(device), case.indices(device)
    before = [x.clone() for x in (embeddings, *indices)]
    grad_losses = []

    def grad_loss_of(loss):
        grad_losses.append(case.grad_loss(loss))
        return grad_losses[0]

    with set_fallback("error"), poisoned():
        loss, gradient = run(case, embeddings, indices, grad_loss_of)
        again = run(case, embeddings, indices, grad_loss_of)
    assert_same_bits([loss], again[:1])
    if gradient is not None:
        assert_same_bits([gradient], again[1:])
        assert gradient.shape == embeddings.shape and gradient.dtype == case.dtype
    assert_same_bits((embeddings, *indices), before)
    assert loss.dtype == case.dtype
    assert loss.shape == (indices[0].shape if case.reduction == "none" else ())
    rows = torch.stack([index.flatten().long() for index in indices]) % case.count
    grad_loss = (grad_losses[0] if grad_losses else torch.ones_like(loss)).reshape(
        -1 if case.reduction == "none" else ()
    )
    compare(case, embeddings, rows, loss, gradient, grad_loss)


def compare(case, embeddings, indices, loss, gradient, grad_loss):
    gathered = [embeddings[index] for index in indices]
    dtypes = torch.float64, accumulate_dtype(case.dtype)
    exact, eager = (
        test_triplet.torch_results(case, gathered, dtype, grad_loss) for dtype in dtypes
    )
    rows = test_triplet.Rows(case, gathered)
    rows.compare_loss(*(x.reshape(-1) for x in (loss, exact[0], eager[0])))
    if gradient is not None:
        upstream = grad_loss.double().reshape(-1).expand(rows.count).abs()
        compare_gradient(case, rows, indices, gradient, exact[1:], eager[1:], upstream)


def compare_gradient(case, rows, indices, gradient, exact, eager, upstream):
    """The sum of what each triplet gives to the rows that it names, and of how far that is off."""
    number = partial(torch.zeros, gradient.shape, dtype=torch.float64, device=gradient.device)
    truth, magnitude, allowed, count, may, must, nan = (number() for _ in range(7))
    in_order = torch.zeros_like(truth, dtype=accumulate_dtype(case.dtype))  # as torch adds them up
    for index, part, torch_part in zip(indices, exact, eager, strict=True):
        weight, part, errors, loose = rows.terms(upstream, part)
        in_order.index_add_(0, index, torch_part.nan_to_num(0, 0, 0))
        torch_part = torch_part.double()
        own = (torch_part - part).abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
        errors = torch.where(loose, 2.1 * weight + part.abs(), 2 * own + errors)
        certain = ~loose
        if case.p == math.inf:  # whose elements below the maximum torch multiplies with zero
            certain = certain & (weight.isfinite() | ~part.isnan())
        sums = {
            truth: part.nan_to_num(0, 0, 0),
            magnitude: part.abs().nan_to_num(0, 0, 0),
            allowed: errors.nan_to_num(0, 0, 0),
            count: torch.ones_like(part),
            may: ~(part.isfinite() & errors.isfinite() & (torch_part.isfinite() | ~loose)),
            must: certain & ~part.isfinite(),
            nan: certain & part.isnan(),
        }
        for total, values in sums.items():
            total.index_add_(0, index, values.double())
    info, found = torch.finfo(case.dtype), gradient.double()
    # Roundings of equal summands are equal too, and add up.
    allowed += rows.info.eps * (4 + count / 8) * magnitude
    allowed += 2 * (in_order.double() - truth).abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
    allowed += info.eps * truth.abs() + info.tiny * info.eps
    near = (found - truth).abs() <= allowed
    near |= (truth.abs() + allowed > info.max) & (found.abs() > info.max / 2)
    near |= may > 0
    near &= (must == 0) | ~found.isfinite()
    near &= (nan == 0) | found.isnan()
    if not near.all():
        place = tuple((~near).nonzero()[0].tolist())
        shown = [x[place].item() for x in (gradient, truth, allowed, may, must)]
        raise AssertionError(
            f"gradient{list(place)}: {shown[0]}, float64 {shown[1]}, at most {shown[2]} apart, "
            f"{shown[3]} terms may and {shown[4]} must not be finite; {int((~near).sum())} of "
            f"{near.numel()}"
        )


@parts
def test_finite_values(device, part):
    fuzz(lambda case: check(case, device), cases(), part, share=0.14)


@parts
def test_special_values(device, part):
    special = st.tuples(st.sampled_from([math.nan, math.inf, -math.inf]))
    found = cases(special=special, values=st.sampled_from(["normal", "lattice"]))
    fuzz(lambda case: check(case, device), found, part, share=0.05)


def check_fallback(case, device, change):
    """What the kernels do not take is the gathered call's to the bit, its errors included."""
    embeddings = case.embeddings(device)
    indices = CHANGES[change](case.indices(device))
    dispatch = explain(triplet_margin_loss_indexed, embeddings, *indices, **case.settings)
    assume(dispatch.path == "pytorch" or "the" in change)

    def results_of(function):
        leaf = embeddings.detach().requires_grad_(case.needs_grad[0])
        loss = function(leaf, *indices, **case.settings)
        if case.needs_grad[0]:
            loss.backward(case.grad_loss(loss.detach()))
        return [loss.detach(), *([] if leaf.grad is None else [leaf.grad])]

    try:
        expected = results_of(reference)
    except Exception:
        assert error_of(results_of, triplet_margin_loss_indexed) == error_of(results_of, reference)
    else:
        assert_same_bits(results_of(triplet_margin_loss_indexed), expected)


CHANGES = {
    "none": lambda indices: indices,
    "broadcast": lambda indices: [indices[0], indices[1].flatten()[:1], indices[2]],
    "int16": lambda indices: [indices[0].short(), *indices[1:]],
    "floating point": lambda indices: [*indices[:2], indices[2].float()],
    "lists": lambda indices: [index.flatten().tolist() for index in indices],
    "beyond the end": lambda indices: [indices[0].abs() + 100, *indices[1:]],
    "before the start": lambda indices: [*indices[:2], -100 - indices[2].abs()],
}


@parts
def test_fallback(device, part):
    some, none = st.integers(1, 20), st.integers(0, 1)
    shape = st.one_of(
        st.tuples(some, none, some), st.tuples(some, some, none), st.tuples(some, some, some)
    )
    found = cases(
        shape=shape,
        p=st.sampled_from([0, 0.5, 1.5, 3, 40.0, -1, -math.inf, 1, 2, math.inf]),
        share=st.just(0),
    )
    # An index that CUDA finds out of range ends the process's use of the device.
    changes = [name for name in CHANGES if device == "cpu" or "the" not in name]
    together = st.tuples(found, st.sampled_from(changes))
    fuzz(lambda both: check_fallback(both[0], device, both[1]), together, part, share=0.03)


def check_second_gradients(case, device):
    """Of a sum that both the loss and the gradient are in, in float64."""
    embeddings, indices = case.embeddings(device), case.indices(device)

    def second(function):
        leaf = embeddings.detach().requires_grad_()
        loss = function(leaf, *indices, **case.settings).sum()
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(loss.square() + gradient.square().sum(), leaf)[0]

    torch.testing.assert_close(
        second(triplet_margin_loss_indexed), second(reference), rtol=1e-9, atol=1e-9, equal_nan=True
    )


@parts
def test_second_gradients(device, part):
    found = cases(
        shape=st.tuples(st.integers(6, 9), st.integers(1, 6), st.integers(1, 6)),
        dtype=st.just(torch.float64),
        values=st.sampled_from(["normal", "small"]),
        equal_rows=st.just(0),
        pattern=st.sampled_from(["random", "from the start"]),
        margin=st.sampled_from([1.0, 0.3, 5.0]),
    )
    fuzz(lambda case: check_second_gradients(case, device), found, part, share=0.01)
