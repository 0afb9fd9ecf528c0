# SPDX-License-Identifier: BSD-3-Clause
"""Triplet losses mined inside a batch."""

from fused_ops.batch_triplet.function import BatchTripletLoss, BatchTripletStats, batch_triplet_loss

__all__ = ["BatchTripletLoss", "BatchTripletStats", "batch_triplet_loss"]
