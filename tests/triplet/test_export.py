# SPDX-License-Identifier: BSD-3-Clause
"""torch.export and AOTInductor of a module that holds the loss."""

import pytest
import torch

import fused_ops
from fused_ops import set_fallback

from .cases import assert_same_bits, forward_op, random_inputs

ROWS = torch.export.Dim("rows", min=2)


class Scaled(torch.nn.Module):
    """A module with a parameter, so that its loss has a gradient."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.loss = fused_ops.TripletMarginLoss(swap=True)

    def forward(self, anchor, positive, negative):
        return self.loss(anchor * self.scale, positive, negative)


def exported(module, device, **options):
    inputs = tuple(random_inputs(5, 6, device=device))
    return torch.export.export(module, inputs, dynamic_shapes=({0: ROWS},) * 3, **options)


def ops_of(program):
    return {node.target for node in program.graph.nodes}


@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_module_holds_our_op_for_every_batch_size(device, strict, tmp_path):
    module = Scaled().to(device)
    with torch.no_grad():
        program = exported(module, device, strict=strict)
        assert forward_op in ops_of(program)
        torch.export.save(program, tmp_path / "loss.pt2")
        loaded = torch.export.load(tmp_path / "loss.pt2").module()
        for rows in (2, 9, 1000):
            inputs = random_inputs(rows, 6, device=device, seed=rows)
            assert_same_bits([loaded(*inputs)], [module(*inputs)])


@pytest.mark.parametrize("strict", [False, True])
def test_module_exported_with_gradients_keeps_them(device, strict):
    """A graph of our ops would lose them with no more than a warning."""
    module = Scaled().to(device)
    with set_fallback("error"), pytest.raises(Exception, match="try it in no_grad"):
        exported(module, device, strict=strict)
    program = exported(module, device, strict=strict)
    inputs = random_inputs(9, 6, device=device)
    gradients = []
    for function in (program.module(), module):
        (parameter,) = function.parameters()
        gradients.append(torch.autograd.grad(function(*inputs), parameter))
    assert gradients[0][0] != 0
    torch.testing.assert_close(*gradients)


QUICKLY = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}


@pytest.mark.usefixtures("fused_only", "inductor_cache")
def test_packaged_by_aot_inductor(tmp_path):
    """Run from the package alone, at another batch size than it was compiled at."""
    module = Scaled()
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            exported(module, "cpu"),
            package_path=str(tmp_path / "loss.pt2"),
            inductor_configs=QUICKLY,
        )
        packaged = torch._inductor.aoti_load_package(package)
        inputs = random_inputs(9, 6)
        assert_same_bits([packaged(*inputs)], [module(*inputs)])
