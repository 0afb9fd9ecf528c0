# SPDX-License-Identifier: BSD-3-Clause
"""Triplet margin loss."""

from fused_ops.triplet.function import TripletMarginLoss, reference, triplet_margin_loss
from fused_ops.triplet.ops import set_gradients_in_forward

__all__ = [
    "TripletMarginLoss",
    "reference",
    "set_gradients_in_forward",
    "triplet_margin_loss",
]
