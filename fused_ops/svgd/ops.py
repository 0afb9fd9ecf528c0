# SPDX-License-Identifier: BSD-3-Clause
"""The ops of csrc/svgd as torch sees them: fake kernels. Gradients run through the reference."""

import torch

from fused_ops._library import native
from fused_ops._support import accumulate_dtype

if native is not None:
    update = torch.ops.fused_ops.svgd_update.default
    bandwidth = torch.ops.fused_ops.svgd_bandwidth.default
    share_memory = torch.ops.fused_ops.svgd_share_memory.default
    share_pass = torch.ops.fused_ops.svgd_share_pass.default
    share_bandwidth = torch.ops.fused_ops.svgd_share_bandwidth.default

    @torch.library.register_fake("fused_ops::svgd_update")
    def _(
        particles, score, bandwidth, rule, bandwidth_number, kernel, repulsion, step_size,
        precision=1, form=-1, first_row=0, rows=None,
    ):  # fmt: skip
        *problems, count, dim = particles.shape
        return particles.new_empty((*problems, count - first_row if rows is None else rows, dim))

    @torch.library.register_fake("fused_ops::svgd_bandwidth")
    def _(particles, rule, form=-1):
        return particles.new_empty(particles.shape[:-2], dtype=accumulate_dtype(particles.dtype))

    @torch.library.register_fake("fused_ops::svgd_distances")
    def _(particles):
        count = particles.shape[0]
        return particles.new_empty((count, count), dtype=accumulate_dtype(particles.dtype))

    # svgd_share_memory has none: what it returns depends on the device.
    @torch.library.register_fake("fused_ops::svgd_share_pass")
    def _(particles, memory, received, rule, share_pass, share, shares, form=-1):
        return particles.new_empty((native.SVGD_SHARE_SLOTS + shares,), dtype=torch.int64)

    @torch.library.register_fake("fused_ops::svgd_share_bandwidth")
    def _(particles, memory, received, rule, shares, form=-1):
        return particles.new_empty((), dtype=accumulate_dtype(particles.dtype))
