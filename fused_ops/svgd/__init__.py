# SPDX-License-Identifier: BSD-3-Clause
"""Stein variational gradient descent."""

from fused_ops.svgd.discrepancy import ksd
from fused_ops.svgd.driver import SVGD
from fused_ops.svgd.function import median_bandwidth, svgd_phi, svgd_step

__all__ = ["SVGD", "ksd", "median_bandwidth", "svgd_phi", "svgd_step"]
