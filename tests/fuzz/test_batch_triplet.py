# SPDX-License-Identifier: BSD-3-Clause
"""batch_triplet_loss: losses, statistics and gradients of any call, against float64."""

import math
from dataclasses import dataclass

import torch
from batch_triplet.cases import DISTANCES, FORMS, REDUCTIONS
from hypothesis import strategies as st
from svgd.cases import random_tensor
from triplet.cases import assert_same_bits

from fused_ops import batch_triplet_loss, set_fallback
from fused_ops._support import accumulate_dtype
from fused_ops.batch_triplet import function, ops

from .batch_triplet_bounds import Bounds
from .strategies import (
    LAYOUTS,
    dtypes,
    fuzz,
    layouts,
    parts,
    poisoned,
    random_values,
    seeds,
    spoil,
)

LABELS = {
    "one class": lambda order: 0 * order,
    "all different": lambda order: order,
    "pairs": lambda order: order // 2,
    "two classes": lambda order: order % 2,
    "four classes": lambda order: order % 4,
    "nine classes": lambda order: order % 9,
    "one and others": lambda order: torch.where(order % 3 == 0, order, 0),
    "one apart": lambda order: (order == 1).long(),
}
# As given; below zero; beyond 32 bits, which equal ones must not be cut to
NUMBERS = {
    "small": lambda labels: labels,
    "int32": lambda labels: (labels - 3).int(),
    "int16": lambda labels: (-labels).short(),
    "every other": lambda labels: labels.repeat_interleave(2)[::2],
    "beyond 32 bits": lambda labels: labels * 2**32 + 5,
    "ends": lambda labels: torch.where(
        labels == 0, torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max - labels
    ),
}
REFERENCES = ("itself", "itself", "others", "whole batch")


def shapes(device):
    """Anchors, references where those are others, and columns."""
    tiny = st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 6))
    few = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70))
    some = st.tuples(st.integers(40, 130), st.integers(1, 130), st.integers(1, 40))
    most = st.tuples(st.integers(130, 300), st.integers(1, 300), st.integers(1, 9))
    wide = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(70, 300))
    bank = st.tuples(st.integers(1, 9), st.integers(500, 1100), st.integers(1, 9))
    chosen = [tiny, tiny, few, few, some, most, wide, bank]
    if device == "cuda":
        many = st.tuples(st.integers(300, 1100), st.integers(900, 1100), st.integers(1, 40))
        chosen += [many, st.tuples(st.integers(1, 9), st.integers(1024, 5000), st.integers(1, 9))]
    return st.one_of(*chosen)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int]
    dtype: torch.dtype
    margin: float
    form: tuple[str, bool]
    distance: str
    reduction: str
    references: str
    labels: tuple[str, str]
    numbers: str
    values: str
    mirrored: bool  # so that the centre of the rows is zero, and sums of lattice values are exact
    special: float  # put into some rows, 0 for none
    equal: float  # the share of rows that are equal
    layouts: tuple[str, str]
    needs_grad: tuple[bool, bool]
    upstream: str
    seed: int

    @property
    def mining(self):
        return self.form[0]

    @property
    def soft(self):
        return self.form[1]

    @property
    def settings(self):
        names = ("margin", "mining", "distance", "reduction", "soft")
        return {name: getattr(self, name) for name in names}

    def inputs(self, device):
        """Rows and labels of the anchors and of other references, or None, and the first own."""
        generator = torch.Generator().manual_seed(self.seed)
        anchors, others, dim = self.shape
        rows, labels = zip(
            *(
                (self.rows(generator, (count, dim)), self.labels_of(generator, count, kind))
                for count, kind in zip((anchors, others), self.labels, strict=True)
            ),
            strict=True,
        )
        tensors = [
            LAYOUTS[name](x.to(device, self.dtype))
            for name, x in zip(self.layouts, rows, strict=True)
        ]
        labels = [NUMBERS[self.numbers](x.to(device)) for x in labels]
        if self.references == "itself":
            return tensors[0], labels[0], None, None, 0
        if self.references == "others":
            return tensors[0], labels[0], tensors[1], labels[1], -1
        first = self.seed % others
        own = slice(first, first + anchors)
        return tensors[1][own], labels[1][own], tensors[1], labels[1], first

    def rows(self, generator, shape):
        x = random_values(generator, shape, self.values, self.dtype)
        x[torch.rand(len(x), generator=generator) < self.equal] = x[:1].clone()
        if self.mirrored:
            half = x[: len(x) // 2]
            x = torch.cat([half, -half, 0 * x[len(x) // 2 * 2 :]])
            x = x[torch.randperm(len(x), generator=generator)]
        if self.special != 0 and x.numel() > 0:
            spoil(generator, x, self.special)
        return x

    def labels_of(self, generator, count, kind):
        return LABELS[kind](torch.arange(count))[torch.randperm(count, generator=generator)]

    def grad_loss(self, loss):
        if self.upstream in ("ones", "zero"):
            return torch.full_like(loss, self.upstream == "ones")
        grad = random_tensor(*loss.shape, device=loss.device, seed=self.seed).to(loss.dtype)
        if self.upstream in LAYOUTS and grad.numel() > 0:
            return LAYOUTS[self.upstream](grad) if grad.dim() > 0 else grad
        return grad


def cases(device, **changes):
    fields = {
        "shape": shapes(device),
        "dtype": dtypes,
        "margin": st.sampled_from([0.2, 0.0, 0.5, 1.0, -0.5, 5.0, 1e-3, 100.0]),
        "form": st.sampled_from(FORMS),
        "distance": st.sampled_from(DISTANCES),
        "reduction": st.sampled_from(REDUCTIONS),
        "references": st.sampled_from(REFERENCES),
        "labels": st.tuples(*2 * [st.sampled_from(list(LABELS))]),
        "numbers": st.sampled_from(list(NUMBERS)),
        "values": st.sampled_from(["normal", "lattice", "lattice", "shifted", "large", "small"]),
        "mirrored": st.booleans(),
        "special": st.just(0),
        "equal": st.sampled_from([0, 0, 0, 0.2, 0.9, 1]),
        "layouts": st.tuples(layouts, layouts),
        "needs_grad": st.tuples(st.booleans(), st.booleans()),
        "upstream": st.sampled_from(
            ["ones", "random", "random", "zero", "all expanded", "every other column"]
        ),
        "seed": seeds,
    }
    return st.builds(Case, **fields | changes)


def run(case, inputs, reference=False):
    """Loss, statistics and the two gradients, None where not wanted; by the reference if so."""
    x, labels, y, reference_labels, first_own = inputs
    x = x.detach().requires_grad_(case.needs_grad[0])
    if y is not None:
        y = y.detach().requires_grad_(case.needs_grad[1])
    if reference or case.references == "whole batch":  # as the distributed loss calls it
        rows = [function.unit(z) if case.distance == "cosine" else z for z in (x, y)]
        settings = (first_own, *(case.settings[name] for name in ("margin", "mining")))
        settings += (case.distance, case.reduction, case.soft)
        numbers = labels.long(), (labels if y is None else reference_labels).long()
        call = ops.loss_in_torch if reference else ops.BatchTripletFunction.apply
        loss, totals = call(*rows, *numbers, settings)
        stats = function.stats(totals)
    else:
        loss, stats = batch_triplet_loss(
            x, labels, **case.settings, return_stats=True,
            reference_embeddings=y, reference_labels=reference_labels,
        )  # fmt: skip
    if loss.requires_grad:
        loss.backward(case.grad_loss(loss.detach()))
    return [loss.detach(), *stats, x.grad, None if y is None else y.grad]


def assert_same_results(results, others):
    for result, other in zip(results, others, strict=True):
        assert (result is None) == (other is None)
        if result is not None:
            assert_same_bits([result], [other])


def check(case, device):
    inputs = case.inputs(device)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    empty = any(x.numel() == 0 for x in tensors)
    with set_fallback("allow" if empty else "error"), poisoned():
        results = run(case, inputs)
        assert_same_results(run(case, inputs), results)
    assert_same_bits(tensors, before)
    loss, *_, x_grad, y_grad = results
    accumulate = accumulate_dtype(case.dtype)
    assert loss.dtype == accumulate
    assert loss.shape == (inputs[0].shape[:1] if case.reduction == "none" else ())
    for leaf, grad, wanted in zip(inputs[:3:2], (x_grad, y_grad), case.needs_grad, strict=True):
        assert (grad is not None) == (wanted and leaf is not None)
        assert grad is None or (grad.shape == leaf.shape and grad.dtype == case.dtype)
    if empty and len(inputs[0]) * len(inputs[0] if inputs[2] is None else inputs[2]) == 0:
        assert not any(x.any() for x in (loss, x_grad, y_grad) if x is not None)
        return
    x, labels, y, reference_labels, first_own = inputs
    x = x.double()
    others = (x, labels) if y is None else (y.double(), reference_labels)
    exact = case.values == "lattice" and case.distance != "cosine" and len(others[0]) <= 1024
    exact = exact and not others[0].sum(0).any()
    unit = torch.finfo(accumulate).eps
    bounds = Bounds(x, labels, *others, first_own, case, unit, exact)
    compare(case, bounds, results)
    if x.shape[0] * len(others[0]) ** 2 < 20_000:
        doubles = [z.double() if z is not None else None for z in (inputs[0], inputs[2])]
        doubled = (doubles[0], labels, doubles[1], reference_labels, first_own)
        compare(case, bounds, run(case, doubled, reference=True))


def compare(case, bounds, results):
    loss, active_fraction, *means, x_grad, y_grad = results
    truth, off = bounds.loss()
    near = (loss.double() - truth).abs() <= off
    near |= (loss == truth) | loss.isnan() & truth.isnan()
    assert near.all(), f"{loss[~near][:3]} for {truth[~near][:3]}, off by {off[~near][:3]}"
    if case.special != 0:
        for grad in (x_grad, y_grad)[: 1 + (case.references == "whole batch")]:
            assert grad is None or grad is y_grad or grad[bounds.poisoned].isnan().any(-1).all()
        return
    compare_stats(bounds, active_fraction, means)
    if x_grad is None and y_grad is None:
        return
    anchors, references = bounds.gradients(case.grad_loss(loss).double())
    if case.references == "itself":
        gradient, allowed, rows = anchors
        anchors = gradient + references[0], allowed + references[1], rows
    for found, expected in ((x_grad, anchors), (y_grad, references)):
        if found is not None:
            compare_gradient(case, found, *bounds.through_unit_rows(*expected))


def compare_stats(bounds, active_fraction, means):
    items = bounds.items
    count = max(1, items.count.sum().item())
    apart = abs(active_fraction.item() * count - items.active.sum().item())
    assert apart <= items.active_off.sum().item() + 1e-6 * count
    for mean, (total, off, number) in zip(means, items.sums.values(), strict=True):
        number = number.sum().item()
        if number == 0:
            assert mean.isnan()
        else:
            apart = abs(mean.item() * number - total.sum().item())
            assert apart <= off.sum().item() + bounds.unit_of_sums * total.sum().item()


def compare_gradient(case, found, truth, allowed):
    info = torch.finfo(case.dtype if found.dtype != torch.float64 else torch.float64)
    allowed = 1.01 * allowed + info.eps * truth.norm(dim=1)
    allowed += info.tiny * info.eps * math.sqrt(truth.shape[1]) + 1e-37
    error = (found.double() - truth).norm(dim=1)
    near = error <= allowed
    near |= ((truth.abs() + allowed[:, None] > info.max).any(1)) & ~found.isnan().any(
        1
    )  # of float16
    if not near.all():
        row = (~near).nonzero()[0].item()
        raise AssertionError(
            f"row {row}: error {error[row]}, at most {allowed[row]}: {found[row][:5]} for "
            f"{truth[row][:5]}; {int((~near).sum())} of {len(near)}"
        )


@parts
def test_finite_values(device, part):
    fuzz(lambda case: check(case, device), cases(device), part, share=0.12)


@parts
def test_ties(device, part):
    """Of distances, and of triplets with the margin, where nothing is rounded."""
    kept = st.sampled_from(["contiguous", "off by one", "every other row", "transposed"])
    tiny = st.tuples(st.integers(4, 40), st.integers(4, 40), st.integers(1, 4))
    banks = st.tuples(st.integers(1, 9), st.integers(600, 1000), st.integers(1, 4))
    found = cases(
        device,
        shape=st.one_of(*3 * [tiny], *6 * [banks], shapes(device)),
        references=st.sampled_from(["itself", "others", "others", "whole batch"]),
        distance=st.sampled_from(["euclidean", "squared"]),
        labels=st.tuples(*2 * [st.sampled_from(["pairs", *3 * ["two classes"], "four classes"])]),
        margin=st.sampled_from([0.0, 0.5, 1.0, -0.5]),
        values=st.just("lattice"),
        mirrored=st.just(True),
        layouts=st.tuples(kept, kept),
        needs_grad=st.just((True, True)),
        upstream=st.sampled_from(["ones", "random"]),
    )
    fuzz(lambda case: check(case, device), found, part, share=0.05)


@parts
def test_special_values(device, part):
    found = cases(
        device,
        special=st.sampled_from([math.nan, math.nan, math.inf, -math.inf]),
        values=st.sampled_from(["normal", "lattice"]),
    )
    fuzz(lambda case: check(case, device), found, part, share=0.05)


@parts
def test_without_rows_or_columns(device, part):
    some, none = st.integers(1, 9), st.just(0)
    shape = st.one_of(
        st.tuples(*x) for x in ((none, some, some), (some, none, some), (some, some, none))
    )
    found = cases(device, shape=shape, references=st.sampled_from(["itself", "others"]))
    fuzz(lambda case: check(case, device), found, part, share=0.01)


def check_second_gradients(case, device):
    """Of a sum that both the loss and the gradients are in, in float64."""
    inputs = case.inputs(device)

    def second(reference):
        leaves = [x if x is None else x.detach().requires_grad_() for x in inputs[:3:2]]
        wanted = [x for x in leaves if x is not None]
        settings = (inputs[4], case.margin, case.mining, case.distance, case.reduction, case.soft)
        if reference:
            rows = [function.unit(z) if case.distance == "cosine" else z for z in leaves]
            others = inputs[1] if inputs[3] is None else inputs[3]
            loss, _ = ops.loss_in_torch(*rows, inputs[1], others, settings)
        else:
            loss = batch_triplet_loss(
                leaves[0], inputs[1], **case.settings,
                reference_embeddings=leaves[1], reference_labels=inputs[3],
            )  # fmt: skip
        gradients = torch.autograd.grad(loss.sum(), wanted, create_graph=True)
        total = loss.square().sum() + sum(gradient.square().sum() for gradient in gradients)
        return torch.autograd.grad(total, wanted)

    with set_fallback("allow"):
        torch.testing.assert_close(second(False), second(True), rtol=1e-8, atol=1e-8)


@parts
def test_second_gradients(device, part):
    found = cases(
        device,
        shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)),
        dtype=st.just(torch.float64),
        references=st.sampled_from(["itself", "others"]),
        values=st.just("normal"),
        layouts=st.just(("contiguous", "contiguous")),
        equal=st.just(0),
    )
    fuzz(lambda case: check_second_gradients(case, device), found, part, share=0.01)
