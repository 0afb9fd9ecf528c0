# SPDX-License-Identifier: BSD-3-Clause
"""Triplet margin loss."""

from fused_ops.triplet.function import TripletMarginLoss, reference, triplet_margin_loss

__all__ = ["TripletMarginLoss", "reference", "triplet_margin_loss"]
