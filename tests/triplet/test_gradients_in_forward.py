# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that the forward forms for a guessed upstream gradient, and the backward corrects."""

import math

import pytest
import torch
from cuda_tools import capture
from torch.utils.checkpoint import checkpoint

from fused_ops import explain, set_gradients_in_forward, triplet_margin_loss
from fused_ops.triplet import ops

from .cases import (
    DTYPES,
    NORMS,
    REDUCTION_NUMBERS,
    REDUCTIONS,
    assert_as_exact_as_torch,
    assert_same_bits,
    backward_op,
    correct_gradients_op,
    forward_op,
    forward_with_gradients_op,
    leaves,
    loss_and_gradients,
    random_inputs,
    random_tensor,
)

cuda = [pytest.mark.cuda, pytest.mark.usefixtures("fused_only", "poisoned_memory")]
# A part of a warp, a warp, a block, tiles of odd rows, and rows that no block holds
SHAPES = [(300, 16), (70, 257), (40, 1024), (400, 8192), (301, 63), (17_001, 63), (3, 70_001)]


def test_setting_is_restored():
    with set_gradients_in_forward(False):
        assert not set_gradients_in_forward.enabled
        with set_gradients_in_forward(True):
            assert set_gradients_in_forward.enabled
        assert not set_gradients_in_forward.enabled
    assert set_gradients_in_forward.enabled


def test_the_cpu_leaves_them_to_the_backward():
    assert not ops.forms_gradients_in_forward(random_inputs(3, 4)[0])


def from_the_backward(inputs, grad_loss, **settings):
    with set_gradients_in_forward(False):
        return loss_and_gradients(triplet_margin_loss, inputs, grad_loss, **settings)


class TestOnCuda:
    pytestmark = cuda

    @pytest.mark.parametrize("swap", [False, True])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("p", NORMS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_same_bits_whatever_is_guessed(self, shape, dtype, p, reduction, swap):
        if reduction == "sum" and dtype == torch.float16 and shape[0] > 10_000:
            pytest.skip("beyond its range")
        inputs = random_inputs(*shape, dtype=dtype, device="cuda")
        settings = {"margin": 0.3, "p": p, "swap": swap, "reduction": reduction}
        loss_shape = shape[:-1] if reduction == "none" else ()
        for upstream in (1, 1, 0.37, 0.37, 0.37, -2, 0, math.nan, math.nan, 1, 1, 1):
            grad_loss = torch.tensor(upstream, dtype=dtype, device="cuda").expand(loss_shape)
            results = loss_and_gradients(triplet_margin_loss, inputs, grad_loss, **settings)
            assert_same_bits(results, from_the_backward(inputs, grad_loss, **settings))
        assert_as_exact_as_torch(results, inputs, grad_loss, **settings)

    @pytest.mark.parametrize("dim", [63, 64, 513])
    def test_gradients_off_the_boundaries(self, dim):
        inputs = random_inputs(50, dim, device="cuda")
        settings = 0.3, 2, 1e-6, True, REDUCTION_NUMBERS["mean"]
        state = forward_op(*inputs, *settings, False, True)[1]
        one = torch.ones((), device="cuda")
        memory = torch.empty(3, 50 * dim + 1, device="cuda")
        gradients = [part[-50 * dim :].view(50, dim) for part in memory]
        correct_gradients_op(one, *inputs, state, *settings, *gradients)
        assert_same_bits(gradients, backward_op(one, *inputs, state, *settings, *3 * [True]))

    def test_a_gradient_for_each_row(self):
        inputs = random_inputs(500, 64, device="cuda")
        weights = random_tensor(500, device="cuda").round()  # of which many are 1
        for _ in range(4):
            results = loss_and_gradients(
                triplet_margin_loss, inputs, weights, margin=0.3, reduction="none"
            )
        assert_as_exact_as_torch(results, inputs, weights, margin=0.3, reduction="none")

    def test_a_constant_upstream_gradient_is_guessed_from_the_third_step_on(self):
        inputs = random_inputs(50, 52, device="cuda")  # a dim of its own, so that none is known
        settings = 0.2, 2, 1e-6, False, REDUCTION_NUMBERS["mean"]
        formed = []
        for upstream in (1, 1, 0.37, 0.37, 0.37, 0.37, 5, 6, 7, 7, 7):
            _, state, *gradients = forward_with_gradients_op(*inputs, *settings, False, *3 * [True])
            before = [gradient.clone() for gradient in gradients]
            grad_loss = torch.tensor(float(upstream), device="cuda")
            correct_gradients_op(grad_loss, *inputs, state, *settings, *gradients)
            formed.append(all(map(torch.equal, before, gradients)))
        #                 1     1     0.37   0.37   0.37  0.37  5      6      7      7      7
        assert formed == [True, True, False, False, True, True, False, False, False, False, True]

    def test_explain_tells(self):
        short, long = (leaves(random_inputs(300, n, device="cuda")) for n in (16_384, 16_388))
        for inputs, in_forward in ((short, True), (long, False)):
            details = explain(triplet_margin_loss, *inputs).details
            assert details["gradients_in_forward"] == in_forward == details["holds_rows"]
            with torch.no_grad():
                assert "gradients_in_forward" not in explain(triplet_margin_loss, *inputs).details

    @pytest.mark.parametrize("needed", range(1, 8))
    def test_only_wanted_gradients(self, needed):
        needs_grad = [bool(needed & 1), bool(needed & 2), bool(needed & 4)]
        expected = from_the_backward(random_inputs(70, 257, device="cuda"), None)[1:]
        for scale in (1, 2, 2, 2):
            inputs = leaves(random_inputs(70, 257, device="cuda"), needs_grad)
            (triplet_margin_loss(*inputs) * scale).backward()
            for x, gradient, wanted in zip(inputs, expected, needs_grad, strict=True):
                assert (x.grad is not None) == wanted
                if wanted:
                    assert_same_bits([x.grad], [gradient * scale])

    def test_the_same_tensor_twice(self):
        x, negative = leaves(random_inputs(70, 257, device="cuda"))[:2]
        triplet_margin_loss(x, x, negative).backward()
        expected = from_the_backward([x, x, negative], None)
        torch.testing.assert_close(x.grad, expected[1] + expected[2])

    def test_backward_again(self):
        inputs = leaves(random_inputs(70, 257, device="cuda"))
        loss = triplet_margin_loss(*inputs)
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        kept = [gradient.clone() for gradient in first]
        second = torch.autograd.grad(loss * 3, inputs, retain_graph=True)
        assert_same_bits(first, kept)
        torch.testing.assert_close(second, [gradient * 3 for gradient in kept])
        assert_same_bits(torch.autograd.grad(loss, inputs), kept)

    def test_grad_keeps_the_buffers(self):
        inputs = leaves(random_inputs(1024, 1024, device="cuda"))
        unit = inputs[0].numel() * 4
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = triplet_margin_loss(*inputs)
        assert torch.cuda.memory_allocated() - before >= 3 * unit
        loss.backward()
        assert torch.cuda.max_memory_allocated() - before < 3.1 * unit

    def test_memory_tight(self):
        inputs = leaves(random_inputs(1000, 1024, device="cuda"))
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            without = triplet_margin_loss(*inputs)
        assert torch.cuda.memory_allocated() - before <= 512
        with set_gradients_in_forward(False):
            loss = triplet_margin_loss(*inputs)
        assert torch.cuda.memory_allocated() - before <= 16 * 1024
        assert_same_bits([loss.detach()], [without])
        checkpointed = checkpoint(triplet_margin_loss, *inputs, use_reentrant=False)
        assert torch.cuda.memory_allocated() - before <= 16 * 1024
        gradients = torch.autograd.grad(checkpointed, inputs)
        assert_same_bits(gradients, from_the_backward(inputs, None)[1:])

    def test_graph_replays_with_another_upstream_gradient(self):
        inputs = leaves(random_inputs(70, 257, device="cuda"))
        scale = torch.ones((), device="cuda")
        graph, results = capture(
            lambda: torch.autograd.grad(triplet_margin_loss(*inputs), inputs, scale)
        )
        for step, upstream in enumerate((1, 3, 3, 3, 2, 0.5, 0.5, 0.5)):
            scale.fill_(upstream)
            with torch.no_grad():
                for x, new in zip(inputs, random_inputs(70, 257, seed=step), strict=True):
                    x.copy_(new)
            graph.replay()
            assert_same_bits(results, from_the_backward(inputs, scale)[1:])

    def test_streams_do_not_share_a_guess(self):
        inputs = random_inputs(3000, 1024, device="cuda")
        expected = [from_the_backward(inputs, torch.tensor(s, device="cuda")) for s in (1.0, 7.0)]
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = [[], []]
        for _ in range(20):
            for stream, scale, list_ in zip(streams, (1.0, 7.0), results, strict=True):
                with torch.cuda.stream(stream):
                    grad_loss = torch.full((), scale, device="cuda")
                    list_.append(loss_and_gradients(triplet_margin_loss, inputs, grad_loss))
        torch.cuda.synchronize()
        for list_, truth in zip(results, expected, strict=True):
            for result in list_:
                assert_same_bits(result, truth)

    @pytest.mark.parametrize("bad", ["shape", "dtype", "strides"])
    def test_op_refuses_buffers_that_are_not_the_forwards(self, bad):
        inputs = random_inputs(5, 8, device="cuda")
        settings = 1.0, 2, 1e-6, False, 1
        _, state, *gradients = forward_with_gradients_op(*inputs, *settings, False, *3 * [True])
        gradients[1] = {
            "shape": gradients[1][:4],
            "dtype": gradients[1].half(),
            "strides": torch.zeros(8, 5, device="cuda").t(),
        }[bad]
        with pytest.raises(RuntimeError, match="gradient: expected"):
            correct_gradients_op(
                torch.ones((), device="cuda"), *inputs, state, *settings, *gradients
            )
