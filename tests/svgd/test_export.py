# SPDX-License-Identifier: BSD-3-Clause
"""torch.export of a module that moves particles."""

import pytest
import torch

from fused_ops import svgd_step

from .cases import assert_same_bits, random_inputs, update_op

COUNT = torch.export.Dim("count", min=2)


class TwoSteps(torch.nn.Module):
    def forward(self, particles, center):
        for _ in range(2):
            particles = svgd_step(particles, lambda x: center - x, 0.1, bandwidth="paper")
        return particles


@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_module_holds_our_op_for_every_count(device, strict, tmp_path):
    particles, center = random_inputs(7, 3, device=device)
    shapes = ({0: COUNT}, None)
    program = torch.export.export(
        TwoSteps(), (particles, center[0]), dynamic_shapes=shapes, strict=strict
    )
    assert [node.target for node in program.graph.nodes].count(update_op) == 2
    torch.export.save(program, tmp_path / "steps.pt2")
    loaded = torch.export.load(tmp_path / "steps.pt2").module()
    for count in (2, 9, 500):
        particles = random_inputs(count, 3, device=device, seed=count)[0]
        assert_same_bits(loaded(particles, center[0]), TwoSteps()(particles, center[0]))
