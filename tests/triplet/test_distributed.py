# SPDX-License-Identifier: BSD-3-Clause
"""Training on two processes, and tensors that are spread over them."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import assert_passed, failures_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fused_ops
from fused_ops import explain, set_fallback, triplet_margin_loss

from .cases import REDUCTIONS, error_of, leaves, random_inputs, random_tensor, torch_loss

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")

RANKS = 2


class Embedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(12, 8)
        self.loss = fused_ops.TripletMarginLoss(swap=True)

    def forward(self, *inputs):
        return self.loss(*(self.layer(x).tanh() for x in inputs))


def trained(model, rank=0, ranks=1):
    """`model` after some steps, each on this rank's part of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with set_fallback("error"):
        for batch in random_tensor(4, 3, 16, 12):
            model(*(x.chunk(ranks)[rank] for x in batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def assert_trained_as_in_one_process(model):
    expected = trained(Embedding())
    assert not torch.equal(expected.layer.weight, Embedding().layer.weight)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        if hasattr(parameter, "full_tensor"):
            parameter = parameter.full_tensor()
        torch.testing.assert_close(parameter, other)


def check_data_parallel():
    model = DistributedDataParallel(Embedding())
    assert_trained_as_in_one_process(trained(model, dist.get_rank(), RANKS))


def check_fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Embedding(), mesh=init_device_mesh("cpu", (RANKS,)))
    assert model.layer.weight.to_local().shape == (4, 12)
    assert_trained_as_in_one_process(trained(model, dist.get_rank(), RANKS))


def check_rows_of_a_dtensor():
    """Left to torch, whose loss is made of ops that know how to be spread."""
    mesh = init_device_mesh("cpu", (RANKS,))
    from torch.distributed.tensor import Shard, distribute_tensor

    plain = leaves(random_inputs(9, 7))  # of which one rank has five and the other four
    sharded = leaves([distribute_tensor(x.detach(), mesh, [Shard(0)]) for x in plain])
    reasons = explain(triplet_margin_loss, *sharded).reasons
    assert reasons == ("DTensor is not a plain torch.Tensor",)
    try:
        torch_loss(*sharded)
    except NotImplementedError:  # of torch's norm, before torch 2.13
        assert error_of(triplet_margin_loss, *sharded)[0] is NotImplementedError
        return
    for reduction in REDUCTIONS:
        for p in (1, 2, 3, math.inf):
            settings = {"p": p, "swap": True, "reduction": reduction}
            losses = [triplet_margin_loss(*x, **settings) for x in (sharded, plain)]
            torch.testing.assert_close(losses[0].full_tensor(), losses[1])
            gradients, expected = (
                torch.autograd.grad(loss.sum(), x)
                for loss, x in zip(losses, (sharded, plain), strict=True)
            )
            for gradient, other in zip(gradients, expected, strict=True):
                assert gradient.placements == (Shard(0),)
                torch.testing.assert_close(gradient.full_tensor(), other)


CHECKS = [check_data_parallel, check_fully_sharded, check_rows_of_a_dtensor]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return failures_on_ranks(CHECKS, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_processes(failures, check):
    assert_passed(failures, check)
