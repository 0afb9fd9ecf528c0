# SPDX-License-Identifier: BSD-3-Clause
"""The functions that work on tensors sharded over the processes of torch.distributed."""

from fused_ops.batch_triplet.distributed import batch_triplet_loss
from fused_ops.svgd.distributed import median_bandwidth, svgd_phi, svgd_step

__all__ = ["batch_triplet_loss", "median_bandwidth", "svgd_phi", "svgd_step"]
