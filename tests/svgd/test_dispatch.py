# SPDX-License-Identifier: BSD-3-Clause
"""Which calls leave the fused kernels, what is said about it, and that the reference takes them."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import fused_ops
from fused_ops import explain, median_bandwidth, set_fallback, svgd_phi, svgd_step

from .cases import DTYPES, assert_same_bits, error_of_norm, random_inputs, recorded_ops

FUNCTIONS = {
    "svgd_phi": (svgd_phi, lambda x, s: (x, s)),
    "svgd_step": (svgd_step, lambda x, s: (x, s, 0.1)),
    "median_bandwidth": (median_bandwidth, lambda x, s: (x,)),
}
OPS = {"fused_ops::svgd_update", "fused_ops::svgd_bandwidth"}
functions = pytest.mark.parametrize("name", FUNCTIONS)


class Subclass(torch.Tensor):
    """Has torch's default __torch_function__."""


class Watching(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def dual_level(inputs):
    with forward_ad.dual_level():
        inputs[0] = forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        yield


def changed(change):
    @contextlib.contextmanager
    def context(inputs):
        inputs[:] = [change(x) for x in inputs]
        yield

    return context


def with_watching(inputs):
    return Watching()


# name: (a context that may change the inputs, text of the reason)
FALLBACKS = {
    "requires grad": (changed(lambda x: x.requires_grad_()), "an input requires grad"),
    "no particles": (changed(lambda x: x[:0]), "no particles or no dimensions"),
    "no dimensions": (changed(lambda x: x[:, :0]), "no particles or no dimensions"),
    "subclass": (changed(lambda x: x.as_subclass(Subclass)), "Subclass is not a plain"),
    "float8": (changed(lambda x: x.to(torch.float8_e5m2)), "dtype torch.float8_e5m2 (kernels take"),
    "meta": (changed(lambda x: x.to("meta")), "device meta"),
    "forward mode": (dual_level, "forward-mode differentiation"),
    "function mode": (with_watching, "a __torch_function__ mode is active"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@functions
@pytest.mark.parametrize("fallback", FALLBACKS)
def test_fallback_is_explained_forbidden_and_the_reference(device, fallback, name):
    function, arguments = FUNCTIONS[name]
    context, text = FALLBACKS[fallback]
    inputs = random_inputs(12, 3, device=device)
    fused = function(*arguments(*inputs))
    with context(inputs):
        dispatch = explain(function, *arguments(*inputs))
        assert (dispatch.op, dispatch.path) == (name, "pytorch")
        assert any(text in reason for reason in dispatch.reasons)
        assert all(reason in str(dispatch) for reason in dispatch.reasons)
        with set_fallback("error"), pytest.raises(fused_ops.FallbackError) as error:
            function(*arguments(*inputs))
        assert all(reason in str(error.value) for reason in (name, *dispatch.reasons))
        with recorded_ops() as ops:
            result = function(*arguments(*inputs))
    assert not OPS & ops
    if name != "median_bandwidth":
        assert (result.shape, result.dtype) == (inputs[0].shape, inputs[0].dtype)
    if fallback not in ("no particles", "no dimensions", "float8", "meta"):
        assert error_of_norm(result.detach(), fused.double()) <= 1e-6


@functions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_call_is_explained_and_fused(device, dtype, name):
    function, arguments = FUNCTIONS[name]
    inputs = random_inputs(12, 3, dtype=dtype, device=device)
    with recorded_ops() as ops:
        dispatch = explain(function, *arguments(*inputs))
    assert not OPS & ops
    assert (dispatch.op, dispatch.path, dispatch.reasons) == (name, "fused", ())
    assert dispatch.details["device"] == device
    assert dispatch.details["dtype"] == str(dtype).removeprefix("torch.")
    assert str(dispatch).startswith(f"{name}: fused (device={device}, dtype=")
    with set_fallback("error"), recorded_ops() as ops:
        function(*arguments(*inputs))
    assert OPS & ops
    assert not {"aten::exp", "aten::sort", "aten::mm"} & ops
    parameters = [torch.nn.Parameter(x, requires_grad=False) for x in inputs]
    for others in (parameters, [x.T.contiguous().T for x in inputs], [x[:1] for x in inputs]):
        assert explain(function, *arguments(*others)).path == "fused"


@pytest.mark.parametrize("which", ["particles", "score", "bandwidth"])
def test_each_input_that_requires_grad_is_a_reason(device, which):
    particles, score = random_inputs(12, 3, device=device)
    inputs = {"particles": particles, "score": score, "bandwidth": particles.new_tensor(0.7)}
    inputs[which].requires_grad_()
    for function, more in ((svgd_phi, {}), (svgd_step, {"step_size": 0.1})):
        dispatch = explain(function, **inputs, **more)
        assert dispatch.reasons == ("an input requires grad",)
        assert function(**inputs, **more).requires_grad


@functions
@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_inputs_that_require_them_are_fused(device, context, name):
    function, arguments = FUNCTIONS[name]
    inputs = random_inputs(12, 3, device=device)
    expected = function(*arguments(*inputs))
    inputs = [x.requires_grad_() for x in inputs]
    with context():
        assert explain(function, *arguments(*inputs)).path == "fused"
        result = function(*arguments(*inputs))
    assert not result.requires_grad
    assert_same_bits(result, expected)


def test_score_function_is_not_called_by_explain(device):
    particles = random_inputs(12, 3, device=device)[0]

    def score(x):
        raise AssertionError("was called")

    for function, arguments in ((svgd_phi, ()), (svgd_step, (0.1,))):
        assert explain(function, particles, score, *arguments, kernel="imq").path == "fused"


@pytest.mark.parametrize("grad", [False, True], ids=["fused", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@functions
def test_autocast_changes_nothing(device, name, dtype, grad):
    """As with every op that no list of torch's names: the inputs' dtype, which sums in float32."""
    function, arguments = FUNCTIONS[name]
    inputs = [x.requires_grad_(grad) for x in random_inputs(50, 33, dtype=dtype, device=device)]
    expected = function(*arguments(*inputs))
    with torch.autocast(device, torch.bfloat16), recorded_ops() as ops:
        result = function(*arguments(*inputs))
    assert bool(OPS & ops) != grad
    assert_same_bits(result.detach(), expected.detach())


def test_profiler_shows_the_ops_with_their_shapes(device):
    inputs = random_inputs(12, 3, device=device)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        svgd_phi(*inputs)
        median_bandwidth(inputs[0])
    shapes = {event.name: event.input_shapes for event in profile.function_events}
    assert shapes["fused_ops::svgd_update"][:2] == [[12, 3], [12, 3]]
    assert shapes["fused_ops::svgd_bandwidth"][:1] == [[12, 3]]


@functions
def test_default_device_is_no_reason(device, name):
    function, arguments = FUNCTIONS[name]
    inputs = random_inputs(12, 3, device=device)
    with torch.device("meta"), set_fallback("error"):
        assert function(*arguments(*inputs)).device == inputs[0].device
