# SPDX-License-Identifier: BSD-3-Clause
"""What every op of ours has, those included that a later one adds."""

import pytest
import torch

import fused_ops  # noqa: F401  (registers them)

OPS = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fused_ops::")]


UNTRACED = {"fused_ops::svgd_share_memory"}  # what it returns depends on the device


def test_all_ops_are_found():
    assert {"fused_ops::triplet_forward", "fused_ops::svgd_update"} <= set(OPS)


@pytest.mark.parametrize("name", sorted(set(OPS) - UNTRACED))
def test_has_a_fake_kernel(name):
    """Without which torch.compile, torch.export and meta tensors stop at it."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")


@pytest.mark.parametrize("name", OPS)
def test_leaves_autograd_to_python(name):
    """A kernel for it would stand in the way of every call."""
    for key in ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
