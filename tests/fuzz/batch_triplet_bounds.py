# SPDX-License-Identifier: BSD-3-Clause
"""What batch_triplet_loss computes, in float64, and how far rounding may move it.

Mining jumps: where two distances, or a triplet and the margin, are closer than rounding moves them,
either side will do, and what the triplets of both sides give is allowed beside the roundings.
Everything is by sorting, so that no cube is formed.
"""

import math
from dataclasses import dataclass

import torch

from fused_ops.batch_triplet.reference import distances, unit_rows

NEAR = 256  # where a squared distance is less than so small a part of the norms, they do not matter


@dataclass
class Items:
    """Of each anchor (A), or of its pairs with the references (A, M), with what they are off."""

    loss: torch.Tensor
    loss_off: torch.Tensor
    slope: torch.Tensor  # derivative of the loss by each distance
    slope_off: torch.Tensor
    count: torch.Tensor
    active: torch.Tensor
    active_off: torch.Tensor
    sums: dict  # of the distances of positives and negatives: sum, how far it is off, number


def rank(ordered, values, right=False):
    return torch.searchsorted(ordered, values.contiguous(), right=right)


class Bounds:
    """`x` (A, dim) and `y` (M, dim) in float64; `unit` is the rounding of the accumulation type.

    `exact` says that no rounding changes the squared distances, so that their ties are ties.
    """

    def __init__(self, x, labels, y, reference_labels, first_own, case, unit, exact):
        self.case, self.unit, self.exact = case, unit, exact
        self.inputs = x, y
        if case.distance == "cosine":
            x, y = unit_rows(x), unit_rows(y)
        self.x, self.y = x, y
        rows = max(1, 2**22 // max(1, y.numel()))
        self.d = torch.cat([distances(part, y, case.distance) for part in x.split(rows)])
        same = labels[:, None] == reference_labels
        own = torch.zeros_like(same)
        if first_own >= 0:
            own[:, first_own:].fill_diagonal_(True)
        self.positive, self.negative = same & ~own, ~same
        valid = self.positive.any(1) & self.negative.any(1)
        self.positive &= valid[:, None]
        self.negative &= valid[:, None]
        used = self.positive | self.negative
        infinite = self.d.isinf()
        self.poisoned = (used & self.d.isnan()).any(1)
        infinite = (self.positive & infinite).any(1), (self.negative & infinite).any(1)
        self.less_infinity = infinite[0] & infinite[1]
        self.d = torch.where(self.poisoned[:, None] | ~used, 0, self.d)
        self.norms = self.squared_norms()
        largest = self.d.nan_to_num(0, 0, 0).amax(1, keepdim=True)
        blur = self.rounding()
        self.blur = blur.amax(1, keepdim=True)  # of the distances of an anchor
        self.relative = torch.where(self.d > 0, blur / self.d, 0).nan_to_num(0, 0, 0)
        # Sums are formed in double, here too.
        self.unit_of_sums = 8 * unit + 2**-54 * sum(self.d.shape)
        self.hinge = 2 * self.blur + self.unit_of_sums * (largest + abs(case.margin))
        self.items = {"all": self.all, "semihard": self.semihard, "hard": self.hard}[case.mining]()

    def squared_norms(self):
        """Moves the rows around their centre; there |x|^2 + |y|^2."""
        step = (len(self.y) + 1023) // 1024
        centre = self.y[::step].mean(0).nan_to_num(0, 0, 0)
        self.x, self.y = self.x - centre, self.y - centre
        of_x, of_y = (rows.square().sum(1) for rows in (self.x, self.y))
        rounded = (4 * self.unit + 2**-52 * len(self.y)) * centre  # a sum in double
        return of_x[:, None] + of_y + rounded.square().sum()

    def rounding(self):
        """Of the distances in the accumulation type."""
        case, d = self.case, self.d
        if self.exact:
            return self.unit * d if case.distance == "euclidean" else torch.zeros_like(d)
        squared = {"euclidean": d.square(), "squared": d, "cosine": 2 * d}[case.distance]
        units = self.unit * (16 + 2 * math.sqrt(self.x.shape[1]))
        lost = units * torch.minimum(self.norms, NEAR * squared)
        if case.distance == "cosine":  # whose rows are rounded too
            lost = (lost + 2 * units * squared.sqrt() + units**2) / 2
        elif case.distance == "euclidean":
            lost = torch.where(d > 0, lost / (2 * d), 0) + self.unit * d
        return lost.nan_to_num(0, 0, 0)

    def all(self):
        positive, negative, d = self.positive, self.negative, self.d
        bound = d + self.case.margin
        ordered = torch.where(negative, d, math.inf).sort(1).values
        bounds = torch.where(positive, bound, math.inf).sort(1).values
        finite = torch.where(ordered.isfinite(), ordered, 0)
        prefix = torch.cat([torch.zeros_like(finite[:, :1]), finite.cumsum(1)], 1)
        threshold = torch.where(positive, bound, -math.inf)
        below, below_off = self.ranks(ordered, threshold)
        above, above_off = self.ranks(bounds, d, right=True)
        positives = positive.sum(1, keepdim=True)
        above = torch.where(negative, positives - above, 0)
        slope = torch.where(positive, below, 0) - above
        off = torch.where(positive, below_off, 0) + torch.where(negative, above_off, 0)
        off = torch.minimum(off, (positive | negative).sum(1, keepdim=True))
        loss = torch.where(below > 0, below * bound - prefix.gather(1, below), 0).sum(1)
        loss[self.less_infinity] = math.nan  # where an infinite distance is taken off another
        terms = (slope.abs() + off) * positive
        active = torch.where(positive, below, 0).sum(1)
        blurred = self.blur[:, 0]
        sums = {}
        for name, mask in (("positive", positive), ("negative", negative)):
            number = mask.sum(1)
            sums[name] = torch.where(mask, d, 0).sum(1), number * blurred, number
        return Items(
            loss, 2 * terms.sum(1) * self.hinge[:, 0], slope.double(), off.double(),
            positive.sum(1) * negative.sum(1), active, (off * positive).sum(1), sums,
        )  # fmt: skip

    def ranks(self, ordered, values, right=False):
        """Ranks, and how many more or fewer they may be."""
        left, to_right = rank(ordered, values), rank(ordered, values, right=True)
        low, high = rank(ordered, values - self.hinge), rank(ordered, values + self.hinge, True)
        ties = to_right - left if self.exact else 0
        return to_right if right else left, high - low - ties

    def semihard(self):
        positive, d, blur = self.positive, self.d, 2 * self.selection()
        ordered, columns = torch.where(self.negative, d, math.inf).sort(dim=1, stable=True)
        last = (self.negative.sum(1, keepdim=True) - 1).clamp_min(0)
        farthest = rank(ordered, ordered.gather(1, last))  # the first of those

        def picked(bound, right):
            place = rank(ordered, bound, right)
            return torch.where(place <= last, place, farthest)

        def distance_at(place):
            return ordered.gather(1, place)

        place = picked(d, True)
        value = distance_at(place)
        low = torch.minimum(distance_at(picked(d - blur, self.exact)), value) - blur
        high = torch.maximum(distance_at(picked(d + blur, True)), value) + blur
        first, end = rank(ordered, low), rank(ordered, high, right=True)
        sure = (end - first == 1) | self.exact
        item = self.item(d, value, low, high)
        slope = torch.zeros_like(d).scatter_add_(
            1, columns.gather(1, place), torch.where(positive, -item.weight, 0)
        )
        slope = slope + torch.where(positive, item.weight, 0)
        # Each of the candidates of an unsure pair may get all of its weight.
        steps = torch.zeros(len(d), d.shape[1] + 1, dtype=d.dtype, device=d.device)
        unsure = torch.where(positive & ~sure, item.most, 0)
        steps.scatter_add_(1, first, unsure).scatter_add_(1, end, -unsure)
        candidates = steps.cumsum(1)[:, :-1].clamp_min(0)
        off = torch.zeros_like(d).scatter_(1, columns, candidates)
        off.scatter_add_(1, columns.gather(1, place), torch.where(positive, item.weight_off, 0))
        off += torch.where(positive, item.weight_off, 0)
        return self.summed(item, positive, slope, off, d, value, high - low)

    def hard(self):
        d, blur = self.d, 2 * self.selection()
        far = torch.where(self.positive, d, -math.inf)
        near = torch.where(self.negative, d, math.inf)
        valid = self.positive.any(1, keepdim=True)
        of_positive = torch.where(valid, far.amax(1, keepdim=True), 0)
        of_negative = torch.where(valid, near.amin(1, keepdim=True), 0)
        spread = blur.expand_as(of_positive)
        item = self.item(of_positive, of_negative, of_negative - spread, of_negative + spread)
        slope, off = torch.zeros_like(d), torch.zeros_like(d)
        for candidates, picked, sign in (
            (self.positive & (far >= of_positive - blur), far.argmax(1, keepdim=True), 1),
            (self.negative & (near <= of_negative + blur), near.argmin(1, keepdim=True), -1),
        ):
            first = candidates.int().argmax(1, keepdim=True) if self.exact else picked
            weight = torch.where(valid, item.weight, 0)
            slope.scatter_add_(1, first, sign * weight)
            unsure = (candidates.sum(1, keepdim=True) > 1) & (not self.exact)
            off += torch.where(candidates & unsure, item.most, 0)
            off.scatter_add_(1, first, torch.where(valid, item.weight_off, 0))
        return self.summed(item, valid, slope, off, of_positive, of_negative, 2 * spread)

    def selection(self):
        """How far apart distances must be that rounding is not to swap."""
        return torch.zeros_like(self.blur) if self.exact else self.blur

    def item(self, d_positive, d_negative, low, high):
        """Losses and weights with the negative at d_negative, or with one from low to high."""
        value = d_positive - d_negative + self.case.margin
        rounded = self.hinge
        if self.exact:  # a loss of zero is that
            rounded = torch.where(value == 0, 0, rounded)
            low = high = d_negative
        most, least = d_positive - low + self.case.margin, d_positive - high + self.case.margin
        found, upper, lower = (
            self.loss_and_weight(x) for x in (value, most + rounded, least - rounded)
        )
        loss, weight = found
        loss_off = torch.maximum(upper[0] - loss, loss - lower[0])
        loss_off, weight_off = loss_off.nan_to_num(0, 0, 0), upper[1] - lower[1]
        return Item(loss, loss_off, weight, weight_off, upper[1])

    def loss_and_weight(self, value):
        if self.case.soft:
            return torch.logaddexp(value, torch.zeros_like(value)), value.sigmoid()
        return value.clamp_min(0), (value > 0).double()

    def summed(self, item, mask, slope, off, d_positive, d_negative, spread):
        def total(values):
            return torch.where(mask, values, 0).sum(1)

        number = mask.sum(1)
        unsure = (item.loss > 0) != (item.loss - item.loss_off > 0)
        unsure |= (item.loss > 0) != (item.loss + item.loss_off > 0)
        if self.case.soft:  # all but what underflows
            unsure = item.loss < 1e-30
        moved = self.blur.expand_as(d_positive)
        sums = {
            "positive": (total(d_positive), total(moved), number),
            "negative": (total(d_negative), total(moved + spread.nan_to_num(0, 0, 0)), number),
        }
        return Items(
            total(item.loss), total(item.loss_off), slope, off, number, total(item.loss > 0),
            total(unsure), sums,
        )  # fmt: skip

    def scale(self):
        """What sums are multiplied with, and by how much that may be off."""
        items, reduction = self.items, self.case.reduction
        if reduction in ("sum", "none"):
            return 1.0, 0.0
        if reduction == "mean":
            return 1 / max(1, items.count.sum().item()), 0.0
        active, off = items.active.sum().item(), items.active_off.sum().item()
        scale, most = 1 / max(1, active), 1 / max(1, active - off)
        return scale, max(most - scale, scale - 1 / max(1, active + off))

    def loss(self):
        """The loss and how far it may be off."""
        items = self.items
        loss = torch.where(self.poisoned, math.nan, items.loss)
        off = items.loss_off
        if self.case.reduction != "none":
            scale, scale_off = self.scale()
            off = scale * off.sum() + scale_off * items.loss.sum().abs()
            loss = scale * loss.sum()
        return loss, off + 2 * self.unit_of_sums * loss.abs() + 1e-37

    def gradients(self, upstream):
        """For anchors and references: gradients, and how far the norm of a row's may be off."""
        items, d = self.items, self.d
        scale, scale_off = self.scale()
        weight = (upstream * scale).expand(len(d))[:, None]
        per_distance = {
            "euclidean": torch.where(d > 0, 1 / d, 0),
            "squared": torch.full_like(d, 2),
            "cosine": torch.ones_like(d),
        }[self.case.distance]
        coefficients = weight * items.slope * per_distance
        apart = torch.cdist(self.x, self.y, compute_mode="donot_use_mm_for_euclid_dist")
        # "hard" adds up differences, the others products with rows around the centre, and so does
        # what float64 is compared with.
        differs = self.case.mining == "hard" and self.unit > 1e-10
        reach = apart if differs else (2 * self.norms).sqrt()
        if self.case.distance == "cosine":  # whose rows are rounded too
            reach = reach + 2
        count = coefficients.count_nonzero(1)[:, None] + coefficients.count_nonzero(0)
        relative = self.relative if self.case.distance == "euclidean" else 0
        relative = relative + (scale_off / scale if scale > 0 else 0)
        off = coefficients.abs() * (apart * relative + self.unit * (8 + 2 * count.sqrt()) * reach)
        off += weight.abs() * items.slope_off * per_distance * apart * (1 + scale_off / scale)
        between = torch.where(d > 0, coefficients, 0)  # of equal rows only roundings are left
        results = []
        for rows, others, c, inputs, allowed in (
            (self.x, self.y, between, self.inputs[0], off.sum(1)),
            (self.y, self.x, between.mT, self.inputs[1], off.sum(0)),
        ):
            gradient = c.sum(1, keepdim=True) * rows - c @ others
            results.append((gradient, allowed, inputs))
        return results

    def through_unit_rows(self, gradient, allowed, inputs):
        """Of the inputs from that of their unit rows."""
        if self.case.distance != "cosine":
            return gradient, allowed
        rows = unit_rows(inputs)
        norm = inputs.norm(dim=1)
        norm = torch.where(norm == 0, 1, norm)
        length = gradient.norm(dim=1)
        gradient = gradient - rows * (rows * gradient).sum(1, keepdim=True)
        units = self.unit * (8 + 2 * math.sqrt(rows.shape[1]))
        return gradient / norm[:, None], (allowed + units * length) / norm


@dataclass
class Item:
    loss: torch.Tensor
    loss_off: torch.Tensor
    weight: torch.Tensor
    weight_off: torch.Tensor
    most: torch.Tensor  # of the weight
