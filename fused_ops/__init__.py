# SPDX-License-Identifier: BSD-3-Clause
"""Fused PyTorch kernels for CPU and CUDA, with plain PyTorch behind them."""

import torch  # noqa: F401  (first: it loads the libraries that the native module needs)

from fused_ops import distributed
from fused_ops._support import Dispatch, FallbackError, explain, set_fallback
from fused_ops.batch_triplet import BatchTripletLoss, BatchTripletStats, batch_triplet_loss
from fused_ops.svgd import SVGD, ksd, median_bandwidth, svgd_phi, svgd_step
from fused_ops.triplet import (
    TripletMarginLoss,
    patch_torch,
    set_gradients_in_forward,
    triplet_margin_loss,
    triplet_margin_loss_indexed,
)

__version__ = "0.1.0"

__all__ = [
    "SVGD",
    "BatchTripletLoss",
    "BatchTripletStats",
    "Dispatch",
    "FallbackError",
    "TripletMarginLoss",
    "batch_triplet_loss",
    "distributed",
    "explain",
    "ksd",
    "median_bandwidth",
    "patch_torch",
    "set_fallback",
    "set_gradients_in_forward",
    "svgd_phi",
    "svgd_step",
    "triplet_margin_loss",
    "triplet_margin_loss_indexed",
]
