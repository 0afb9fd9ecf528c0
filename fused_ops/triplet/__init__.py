# SPDX-License-Identifier: BSD-3-Clause
"""Triplet margin loss."""

from fused_ops.triplet.function import TripletMarginLoss, reference, triplet_margin_loss
from fused_ops.triplet.indexed import triplet_margin_loss_indexed
from fused_ops.triplet.ops import set_gradients_in_forward
from fused_ops.triplet.patch import patch_torch

__all__ = [
    "TripletMarginLoss",
    "patch_torch",
    "reference",
    "set_gradients_in_forward",
    "triplet_margin_loss",
    "triplet_margin_loss_indexed",
]
