# SPDX-License-Identifier: BSD-3-Clause
"""triplet_margin_loss_indexed against the gathered call, which is what it computes."""

import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fused_ops
from fused_ops import explain, set_fallback, triplet_margin_loss_indexed
from fused_ops.triplet.indexed import reference

from .cases import (
    DTYPES,
    NORMS,
    REDUCTION_NUMBERS,
    REDUCTIONS,
    assert_same_bits,
    error_of,
    random_tensor,
    recorded_ops,
)

pytestmark = pytest.mark.usefixtures("fused_only")

forward_op = torch.ops.fused_ops.triplet_indexed_forward.default
backward_op = torch.ops.fused_ops.triplet_indexed_backward.default


def random_indices(count, triplets, device="cpu", seed=0):
    """From both ends, without any structure."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-count, count, (3, triplets), generator=generator).to(device)


def loss_and_gradient(function, embeddings, indices, grad_loss=None, **settings):
    embeddings = embeddings.detach().requires_grad_()
    loss = function(embeddings, *indices, **settings)
    if grad_loss is None:
        grad_loss = torch.ones_like(loss)
    return [loss.detach(), *torch.autograd.grad(loss, embeddings, grad_loss.to(loss.dtype))]


def assert_as_exact_as_gathered(results, embeddings, indices, grad_loss=None, **settings):
    """Asserts that `results` are no further from float64 than twice what the gathered call's are.

    Where that happens to be exact, a rounding to the result's type and some of the type that sums
    are formed in are allowed.
    """
    compare = partial(loss_and_gradient, reference)
    exact = compare(embeddings.double(), indices, grad_loss, **settings)
    gathered = compare(embeddings, indices, grad_loss, **settings)
    for result, other, truth in zip(results, gathered, exact, strict=True):
        assert result.shape == truth.shape
        largest = max(truth.abs().max().item(), 1)
        units = 64 * 2**-52 if result.dtype == torch.float64 else 16 * 2**-23
        allowed = (torch.finfo(result.dtype).eps + units) * largest
        error, others = ((x.double() - truth).abs().max().item() for x in (result, other))
        assert error <= 2 * others + allowed, f"error {error}, the gathered call's {others}"


def check(embeddings, indices, grad_loss=None, **settings):
    results = loss_and_gradient(
        triplet_margin_loss_indexed, embeddings, indices, grad_loss, **settings
    )
    assert_as_exact_as_gathered(results, embeddings, indices, grad_loss, **settings)
    assert results[1].any() or len(embeddings) == 1


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("p", NORMS)
def test_values_and_gradients(device, p, swap, dtype):
    for seed, (count, dim, triplets) in enumerate([(40, 33, 300), (3, 128, 500), (900, 16, 20)]):
        embeddings = random_tensor(count, dim, dtype=dtype, device=device, seed=seed)
        indices = random_indices(count, triplets, device, seed)
        grad_loss = random_tensor(triplets, device=device, seed=5)
        check(embeddings, indices, grad_loss, p=p, swap=swap, margin=0.3, reduction="none")
        check(embeddings, indices, p=p, swap=swap, eps=1e-3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (2, 70_001), (64, 1000)], ids=str)
def test_shapes_and_reductions(device, shape, reduction):
    embeddings = random_tensor(*shape, device=device)
    check(embeddings, random_indices(shape[0], 21, device), swap=True, reduction=reduction)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dim", [70_001, 300_000])
def test_errors_do_not_grow_with_the_row(device, dim, p):
    """Of values in whose sums roundings do not cancel."""
    embeddings = (4 * random_tensor(2, dim, device=device)).round() / 2
    indices = torch.tensor([[0], [1], [0]], device=device)
    settings = {"p": p, "eps": 1e-3, "reduction": "none"}
    loss = triplet_margin_loss_indexed(embeddings, *indices, **settings)
    exact = reference(embeddings.double(), *indices, **settings)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [2, 255, 256, 257, 2**16, 2**16 + 1])
def test_first_and_last_row_are_not_one(device, count):
    embeddings = random_tensor(count, 2, device=device)
    indices = random_indices(count, 500, device) % 2 * (count - 1)
    check(embeddings, indices, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_all_triplets_share(device, dtype):
    """16-bit gradients too are summed in float32, or they would stop to grow."""
    embeddings = random_tensor(50, 24, dtype=dtype, device=device)
    indices = random_indices(50, 20_000, device)
    indices[0] = 7
    indices[1, :15_000] = -3
    settings = {"p": 1, "reduction": "sum"}
    gradient = loss_and_gradient(triplet_margin_loss_indexed, embeddings, indices, **settings)[1]
    exact = loss_and_gradient(reference, embeddings.double(), indices, **settings)[1]
    allowed = torch.finfo(dtype).eps * exact.abs().max().item()
    torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=allowed)


@pytest.mark.cuda
@pytest.mark.parametrize("share", [1, 3, 16, 100, 10_000])
@pytest.mark.parametrize("dim", [7, 64, 1000])
def test_shares_of_every_size(dim, share):
    """Runs that begin, end and go on anywhere in them."""
    embeddings = random_tensor(30, dim, device="cuda").requires_grad_()
    indices = random_indices(30, 400, "cuda")
    indices[0, ::2] = 4
    settings = 1.0, 2.0, 1e-6, True, 1
    loss, state = forward_op(embeddings.detach(), indices, *settings, False, True)
    gradient = backward_op(
        torch.ones_like(loss), embeddings.detach(), indices, state, *settings, share
    )
    assert_as_exact_as_gathered([loss, gradient], embeddings, indices, swap=True)


def test_rows_that_no_triplet_names_and_inactive_triplets_have_no_gradient(device):
    """Also where an inactive triplet's row holds inf, of which torch's gradient is NaN."""
    embeddings = torch.zeros(6, 4, device=device)
    embeddings[3:] = torch.tensor([[1.0], [50.0], [math.inf]], device=device)
    indices = torch.tensor([[0, 0, 1], [0, 1, 2], [4, 5, 3]], device=device)
    loss, gradient = loss_and_gradient(
        triplet_margin_loss_indexed, embeddings, indices, margin=3.0, eps=0.0, reduction="none"
    )
    assert loss.tolist() == pytest.approx([0, 0, 1])
    assert not gradient[[0, 4, 5]].any()
    torch.testing.assert_close(gradient[3], torch.full((4,), -0.5, device=device))


def test_nan_reaches_the_loss_and_the_gradient(device):
    embeddings = random_tensor(5, 4, device=device)
    embeddings[2, 1] = math.nan
    indices = torch.tensor([[0, 2], [1, 3], [2, 4]], device=device)
    loss, gradient = loss_and_gradient(
        triplet_margin_loss_indexed, embeddings, indices, margin=9.0, reduction="none"
    )
    expected = loss_and_gradient(reference, embeddings, indices, margin=9.0, reduction="none")
    assert_same_bits([loss.isnan(), gradient.isnan()], [x.isnan() for x in expected])
    assert loss.isnan().all()


def test_indices_of_every_kind(device):
    embeddings = random_tensor(9, 5, device=device)
    indices = random_indices(9, 12, device)
    expected = loss_and_gradient(triplet_margin_loss_indexed, embeddings, indices)
    anchor, positive, negative = indices
    for others in (
        indices.int(),
        (anchor.int(), positive, negative),
        indices.view(3, 3, 4),
        indices % 9,
        indices.repeat_interleave(2, dim=1)[:, ::2],
    ):
        results = loss_and_gradient(triplet_margin_loss_indexed, embeddings, others)
        assert_same_bits(results, expected)
    check(embeddings, indices.view(3, 3, 4), swap=True, reduction="none")
    check(embeddings, indices[:, 3], margin=9.0, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_embeddings_of_every_layout(device, dtype):
    whole = random_tensor(20, 48, dtype=dtype, device=device)
    indices = random_indices(20, 30, device)
    for embeddings in (whole[:, 3:20], whole[::2].repeat(2, 1), whole.T, whole[:1].expand(20, 48)):
        settings = {"reduction": "none", "swap": True, "margin": 9.0}
        indices_of = indices % len(embeddings)
        results = loss_and_gradient(triplet_margin_loss_indexed, embeddings, indices_of, **settings)
        expected = loss_and_gradient(
            triplet_margin_loss_indexed, embeddings.contiguous(), indices_of, **settings
        )
        torch.testing.assert_close(results, expected)
        assert_as_exact_as_gathered(results, embeddings, indices_of, **settings)


def test_nothing_is_gathered(device):
    embeddings = random_tensor(30, 16, device=device)
    indices = random_indices(30, 200, device)
    with recorded_ops() as names:
        loss_and_gradient(triplet_margin_loss_indexed, embeddings, indices)
    ours = {"fused_ops::triplet_indexed_forward", "fused_ops::triplet_indexed_backward"}
    assert ours <= names
    assert not any("index" in name or "gather" in name for name in names - ours)


@pytest.mark.cuda
def test_memory_is_that_of_triplets_and_embeddings():
    embeddings = random_tensor(1000, 1024, device="cuda").requires_grad_()
    indices = random_indices(1000, 300_000, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    triplet_margin_loss_indexed(embeddings, *indices).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 200e6, used  # gathered, the inputs alone would be 3.7e9


def test_same_bits_from_run_to_run(device, two_threads):
    embeddings = random_tensor(64, 256, device=device)
    indices = random_indices(64, 4000, device)
    settings = {"swap": True, "reduction": "sum"}
    results = loss_and_gradient(triplet_margin_loss_indexed, embeddings, indices, **settings)
    torch.set_num_threads(1)
    again = loss_and_gradient(triplet_margin_loss_indexed, embeddings, indices, **settings)
    assert_same_bits(results, again)


BAD_CALLS = {
    "too large": {"negative_index": torch.tensor([1, 5])},
    "too small": {"anchor_index": torch.tensor([-6, 1])},
    "no embeddings": {"embeddings": torch.ones(0, 3)},
    "shapes": {"positive_index": torch.tensor([0, 1, 2])},
    "floating point": {"positive_index": torch.tensor([0.0, 1.0])},
    "a number": {"anchor_index": 1.5},
    "no embedding": {"embeddings": None},
    "integers": {"embeddings": torch.ones(5, 3, dtype=torch.bool)},
    "p": {"p": "2"},
    "swap": {"swap": "yes"},
    "margin": {"margin": -1.0},
    "reduction": {"reduction": "abc"},
    "meta": {"embeddings": torch.ones(5, 3, device="meta"), "margin": None},
}


@pytest.mark.parametrize("fallback", ["allow", "error"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_are_those_of_the_gathered_call(name, fallback):
    index = torch.tensor([0, 1])
    arguments = {"embeddings": torch.ones(5, 3)}
    arguments |= {f"{place}_index": index for place in ("anchor", "positive", "negative")}
    arguments |= BAD_CALLS[name]

    def gathered(embeddings, anchor_index, positive_index, negative_index, **settings):
        indices = anchor_index, positive_index, negative_index
        return fused_ops.triplet_margin_loss(*(embeddings[i] for i in indices), **settings)

    with set_fallback(fallback):
        error = error_of(triplet_margin_loss_indexed, **arguments)
    with set_fallback("allow"):
        assert error == error_of(gathered, **arguments)


@pytest.mark.cuda
def test_an_index_out_of_range_stops_the_device():
    """In a process of its own, which cannot use the device afterwards."""
    code = """
import torch, fused_ops
embeddings = torch.ones(5, 3, device="cuda")
index = torch.tensor([0, 5], device="cuda")
fused_ops.triplet_margin_loss_indexed(embeddings, index, index, index)
torch.cuda.synchronize()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode != 0
    assert "index out of range" in process.stderr
    assert "device-side assert" in process.stderr


EMPTY = torch.empty(0, dtype=torch.int64)
FALLBACKS = {
    "no triplets": ((torch.ones(4, 3), EMPTY, EMPTY, EMPTY), {}, "no embeddings or no triplets"),
    "p": ((torch.ones(4, 3), *[torch.tensor([0, 1])] * 3), {"p": 3}, "p=3"),
    "a mask": (
        (torch.ones(4, 3), *[torch.tensor([True, False] * 2)] * 3),
        {},
        "dtype torch.bool of an",
    ),
    "a list": ((torch.ones(4, 3), [0, 1], [1, 2], [3, 3]), {}, "list is not a plain"),
    "broadcast": (
        (torch.ones(4, 3), torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3])),
        {},
        "shapes of the indices (2,), (1,), (1,) differ",
    ),
    "dimensions": ((torch.ones(4, 3, 2), *[torch.tensor([0])] * 3), {}, "3 dimensions"),
    "dtype": ((torch.ones(4, 3, dtype=torch.complex64), *[torch.tensor([0])] * 3), {}, "complex"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback(name):
    arguments, settings, reason = FALLBACKS[name]
    for reduction in REDUCTIONS:
        with set_fallback("allow"):
            result = triplet_margin_loss_indexed(*arguments, reduction=reduction, **settings)
        expected = reference(*arguments, reduction=reduction, **settings)
        torch.testing.assert_close(result, expected, equal_nan=True)
    dispatch = explain(triplet_margin_loss_indexed, *arguments, **settings)
    assert dispatch.path == "pytorch"
    assert reason in str(dispatch)
    with pytest.raises(fused_ops.FallbackError, match="triplet_margin_loss_indexed has no fused"):
        triplet_margin_loss_indexed(*arguments, **settings)


def test_explained(device):
    arguments = random_tensor(40, 64, device=device), *random_indices(40, 100, device)
    dispatch = explain(triplet_margin_loss_indexed, *arguments, swap=True)
    assert (dispatch.op, dispatch.path) == ("triplet_margin_loss_indexed", "fused")
    assert dispatch.details["dtype"] == "float32"
    assert (dispatch.details.get("share") == 16) == (device == "cuda")


def test_gradient_of_the_gradient(device):
    embeddings = random_tensor(6, 4, dtype=torch.float64, device=device).requires_grad_()
    indices = random_indices(6, 9, device)

    def penalty(function):
        loss = function(embeddings, *indices, margin=2.0, swap=True)
        (gradient,) = torch.autograd.grad(loss, embeddings, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), embeddings)[0]

    with pytest.raises(fused_ops.FallbackError, match="to be differentiated"):
        penalty(triplet_margin_loss_indexed)
    with set_fallback("allow"):
        torch.testing.assert_close(penalty(triplet_margin_loss_indexed), penalty(reference))


def test_batched_upstream_gradients(device):
    embeddings = random_tensor(6, 4, device=device).requires_grad_()
    indices = random_indices(6, 9, device)
    grad_losses = random_tensor(3, 9, device=device, seed=9)
    loss = triplet_margin_loss_indexed(embeddings, *indices, reduction="none")
    (batched,) = torch.autograd.grad(loss, embeddings, grad_losses, is_grads_batched=True)
    expected = [
        loss_and_gradient(
            triplet_margin_loss_indexed, embeddings, indices, grad_loss, reduction="none"
        )[1]
        for grad_loss in grad_losses
    ]
    torch.testing.assert_close(batched, torch.stack(expected))


def test_changing_the_embeddings_before_the_backward_is_an_error(device):
    embeddings = random_tensor(6, 4, device=device).requires_grad_() * 1
    loss = triplet_margin_loss_indexed(embeddings, *random_indices(6, 9, device))
    embeddings.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_changing_the_indices_before_the_backward_is_none(device):
    """They are copied, so a buffer that mining fills anew is free again."""
    embeddings = random_tensor(6, 4, device=device).requires_grad_()
    indices = random_indices(6, 9, device)
    (expected,) = torch.autograd.grad(triplet_margin_loss_indexed(embeddings, *indices), embeddings)
    loss = triplet_margin_loss_indexed(embeddings, *indices)
    indices.zero_()
    assert_same_bits(torch.autograd.grad(loss, embeddings), [expected])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast(device, dtype, reduction):
    embeddings = random_tensor(9, 8, dtype=dtype, device=device)
    indices = random_indices(9, 12, device)
    with torch.autocast(device, torch.bfloat16):
        loss, gradient = loss_and_gradient(
            triplet_margin_loss_indexed, embeddings, indices, reduction=reduction
        )
        gathered = fused_ops.triplet_margin_loss(*embeddings[indices], reduction=reduction)
    assert loss.dtype == gathered.dtype
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss, gathered)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_whole_and_once_more_for_every_number_of_triplets(device, reduction):
    function = partial(triplet_margin_loss_indexed, swap=True, reduction=reduction)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    embeddings = random_tensor(30, 16, device=device)
    for triplets in (7, 9, 400):
        indices = list(random_indices(30, triplets, device, seed=triplets))
        results = loss_and_gradient(compiled, embeddings, indices)
        assert_same_bits(results, loss_and_gradient(function, embeddings, indices))
    assert counter.frame_count == 2
    graphs = [m.graph for graph in counter.graphs for m in graph.modules() if hasattr(m, "graph")]
    targets = {node.target for graph in graphs for node in graph.nodes}
    assert {forward_op, backward_op} <= targets


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_finds_an_index_out_of_range():
    compiled = torch.compile(triplet_margin_loss_indexed, backend="aot_eager", fullgraph=True)
    index = torch.tensor([0, 5])
    with pytest.raises(RuntimeError, match="indices: expected -5 to 4, got 5"):
        compiled(torch.ones(5, 3), index, index, index)


@pytest.mark.cuda
def test_captured_into_a_cuda_graph():
    """Forward and backward; whatever waited for the device could not be captured."""
    embeddings = random_tensor(100, 64, device="cuda").requires_grad_()
    indices = random_indices(100, 3000, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        triplet_margin_loss_indexed(embeddings, *indices, swap=True).backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = triplet_margin_loss_indexed(embeddings, *indices, swap=True)
        (gradient,) = torch.autograd.grad(loss, embeddings)
    for seed in range(3):
        with torch.no_grad():
            embeddings.copy_(random_tensor(100, 64, device="cuda", seed=seed))
        indices.copy_(random_indices(100, 3000, "cuda", seed))
        graph.replay()
        expected = loss_and_gradient(triplet_margin_loss_indexed, embeddings, indices, swap=True)
        assert_same_bits([loss, gradient], expected)


def op_arguments(device, **changes):
    """Of backward_op; without the first and fourth those of forward_op."""
    arguments = {"grad_loss": torch.ones((), device=device)}
    arguments |= {"embeddings": random_tensor(5, 4, device=device)}
    arguments |= {"indices": random_indices(5, 6, device)}
    arguments |= {"state": torch.ones(4 + 2 * 6, device=device)}
    arguments |= {"margin": 1.0, "p": 2.0, "eps": 1e-6, "swap": False}
    arguments |= {"reduction": REDUCTION_NUMBERS["mean"]}
    return arguments | changes


def forward_arguments(arguments):
    forward = {name: arguments[name] for name in arguments if name not in BACKWARD_ONLY}
    return forward | {"float32_loss": False, "save_state": True}


BACKWARD_ONLY = ("grad_loss", "state")
BAD_INPUTS = {
    "embeddings": ({"embeddings": torch.ones(5)}, "embeddings: expected two dimensions"),
    "no embeddings": ({"embeddings": torch.ones(0, 4)}, "embeddings: expected .* one element"),
    "dtype": ({"embeddings": torch.ones(5, 4).int()}, "embeddings: expected float16"),
    "int32": ({"indices": torch.zeros(3, 6).int()}, "indices: expected a contiguous int64"),
    "strided": ({"indices": torch.zeros(6, 3).long().T}, "indices: expected a contiguous int64"),
    "two rows": ({"indices": torch.zeros(2, 6).long()}, r"indices: expected \(3, triplets\)"),
    "no triplets": ({"indices": torch.zeros(3, 0).long()}, r"indices: expected \(3, triplets\)"),
    "p": ({"p": 3.0}, "p: expected 1, 2 or inf, got 3"),
    "reduction": ({"reduction": 7}, "reduction: expected"),
}
BAD_GRADIENTS = {
    "state": ({"state": torch.ones(3)}, "state: expected"),
    "grad_loss": ({"grad_loss": torch.ones(6)}, "grad_loss: expected"),
}
OUT_OF_RANGE = {
    "index": ({"indices": torch.full((3, 6), 5)}, "indices: expected -5 to 4, got 5"),
    "negative index": ({"indices": torch.full((3, 6), -6)}, "indices: expected -5 to 4, got -6"),
}


def on(device, changes):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}


@pytest.mark.parametrize("name", BAD_INPUTS | BAD_GRADIENTS)
def test_ops_refuse_bad_arguments(device, name):
    changes, message = (BAD_INPUTS | BAD_GRADIENTS)[name]
    arguments = op_arguments(device, **on(device, changes))
    with pytest.raises(RuntimeError, match=message):
        backward_op(**arguments)
    if name in BAD_INPUTS:
        with pytest.raises(RuntimeError, match=message):
            forward_op(**forward_arguments(arguments))


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_ops_on_the_cpu_read_nothing_that_is_not_there(name):
    changes, message = OUT_OF_RANGE[name]
    arguments = op_arguments("cpu", **changes)
    with pytest.raises(RuntimeError, match=message):
        backward_op(**arguments)
    with pytest.raises(RuntimeError, match=message):
        forward_op(**forward_arguments(arguments))


def test_fake_kernels_tell_what_the_ops_return(device):
    arguments = op_arguments(device, swap=True)
    forward = forward_arguments(arguments)
    for changes in ({}, {"reduction": 0, "float32_loss": True}, {"p": math.inf}):
        torch.library.opcheck(forward_op, (), forward | changes, test_utils="test_faketensor")
    arguments["state"] = forward_op(**forward)[1]
    torch.library.opcheck(backward_op, (), arguments, test_utils="test_faketensor")
