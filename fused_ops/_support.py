# SPDX-License-Identifier: BSD-3-Clause
"""Which path a call takes, fused kernels or plain PyTorch, and why.

The reasons against the kernels are data: an op collects them, `explain` shows them and
`set_fallback` can turn them into an error. No reasons means that the kernels run.
"""

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from fused_ops._library import native, why_not

DTYPES = frozenset(getattr(torch, name) for name in native.DTYPES) if native else frozenset()

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


class FallbackError(NotImplementedError):
    """A call would have left the fused kernels while `set_fallback("error")` is in force."""


@dataclass(frozen=True)
class Dispatch:
    """How a call runs.

    Attributes:
        op: name of the function.
        path: "fused" for this library's kernels, "pytorch" for plain PyTorch.
        details: what the fused kernels are launched with.
        reasons: why the fused kernels do not take the call; empty where they do.
    """

    op: str
    path: str
    details: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = ", because " + "; ".join(self.reasons) if self.reasons else ""
        details = ", ".join(f"{name}={value}" for name, value in self.details.items())
        return f"{self.op}: {self.path}{why}{f' ({details})' if details else ''}"


_explainers: dict[Callable, Callable[..., Dispatch]] = {}


def explains(function: Callable) -> Callable:
    """Decorates the function that answers `explain(function, ...)`."""

    def register(explainer):
        _explainers[function] = explainer
        return explainer

    return register


def explain(function: Callable, *args, **kwargs) -> Dispatch:
    """Tells which path `function(*args, **kwargs)` would take, and why, without running it.

    Args:
        function: a function of this library, such as `fused_ops.triplet_margin_loss`.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        A `Dispatch`; `str()` of it is one readable line.

    Raises:
        TypeError: `function` is not a function of this library that has kernels.
    """
    if function not in _explainers:
        known = ", ".join(sorted(f"fused_ops.{known.__name__}" for known in _explainers))
        raise TypeError(f"explain: expected one of {known}, got {function!r}")
    return _explainers[function](*args, **kwargs)


class set_fallback:
    """Sets what happens to a call that the fused kernels do not take, in the whole process.

    Call it for good, or use it as a context manager that restores the former mode. At start the
    mode is that of the environment variable FUSED_OPS_FALLBACK, by default "allow".

    Args:
        mode: "allow" runs the call in plain PyTorch; "error" raises `FallbackError` with the
            reasons, or PyTorch's own error where that would refuse the call as well.

    Raises:
        ValueError: `mode` is neither.
    """

    mode = "allow"

    def __init__(self, mode: str) -> None:
        if mode not in ("allow", "error"):
            raise ValueError(f'set_fallback: expected "allow" or "error", got {mode!r}')
        self.former = set_fallback.mode
        set_fallback.mode = mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        set_fallback.mode = self.former


set_fallback(os.environ.get("FUSED_OPS_FALLBACK", "allow"))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernels accumulate in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_floating(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")


def check_fallback(op: str, reasons: list[str]) -> None:
    """Raises `FallbackError` where the user wants no fallback."""
    if set_fallback.mode == "error":
        raise FallbackError(f"{op} has no fused kernel for this call: {'; '.join(reasons)}")


def tensor_reasons(*tensors: torch.Tensor) -> list[str]:
    """The reasons against any kernel of ours on these tensors; none where kernels may run."""
    if native is None:
        return [why_not]
    # This runs before every call: plain comparisons first, texts only where one fails.
    for tensor in tensors:
        if why := unplain_reason(tensor):
            return [why]
    reasons = []
    dtype, device = tensors[0].dtype, tensors[0].device
    for tensor in tensors:
        if tensor.dtype != dtype:
            reasons.append(f"mixed dtypes {dtype} and {tensor.dtype}")
        if tensor.device != device:
            reasons.append(f"mixed devices {device} and {tensor.device}")
    if dtype not in DTYPES:
        reasons.append(f"dtype {dtype} (kernels take {', '.join(native.DTYPES)})")
    if device.type == "cuda":
        reasons += cuda_reasons(device.index)
    elif device.type != "cpu":
        reasons.append(f"device {device} (kernels run on cpu and cuda)")
    if torch._C._are_functorch_transforms_active():
        reasons.append("a torch.func transform is active")
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        reasons.append("forward-mode differentiation")
    # The length of the stack, which the compiler of every torch can trace.
    if torch._C._len_torch_function_stack() > 0 and _mode_intervenes():
        reasons.append("a __torch_function__ mode is active")
    return reasons


def unplain_reason(tensor: torch.Tensor) -> str | None:
    """Why a tensor is not a plain, strided one."""
    if type(tensor) not in _PLAIN_TENSORS and _overrides_torch(tensor):
        return f"{type(tensor).__name__} is not a plain torch.Tensor"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
    return None


def needs_grad(*tensors: torch.Tensor) -> bool:
    """Whether autograd would want the gradient of one of them."""
    for tensor in tensors:  # any() of a generator would take three times as long
        if tensor.requires_grad:
            return torch.is_grad_enabled()
    return False


def gradient_reasons(*tensors: torch.Tensor) -> list[str]:
    """Why an autograd function of ours cannot have a gradient that is wanted of them."""
    reasons = []
    if needs_grad(*tensors):
        # The compiler has no inference tensors, and cannot trace the question.
        if not torch.compiler.is_compiling() and any(tensor.is_inference() for tensor in tensors):
            reasons.append("an inference tensor, which autograd cannot keep for the backward")
        if is_exporting():
            reasons.append("torch.export keeps no gradients of custom ops: try it in no_grad")
    return reasons


def _overrides_torch(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return True
    return (
        type(tensor).__torch_function__ is not torch._C._disabled_torch_function_impl
        or type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    )


def is_exporting() -> bool:
    """Whether torch.export runs; torch.compiler.is_exporting is compiled as True by torch 2.10."""
    return torch.compiler._is_exporting_flag


def _mode_intervenes() -> bool:
    """Whether a mode is active that wants to see calls of torch's functions.

    torch.set_default_device's does not, nor do those of torch.export, whose graphs hold our ops.
    """
    if is_exporting():
        return False
    # torch 2.10 cannot compile this question.
    if not torch.compiler.is_compiling() and not torch._C._is_torch_function_mode_enabled():
        return False
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def cuda_reasons(index: int) -> tuple[str, ...]:
    """The reasons against the CUDA kernels on a device; warns of them once."""
    if index not in _known_cuda_reasons:
        _known_cuda_reasons[index] = reasons = _find_cuda_reasons(index)
        for reason in reasons:
            message = f"fused_ops runs in plain PyTorch, because {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
    return _known_cuda_reasons[index]


# As torch.compiler.assume_constant_result does, which would import the compiler, for a second.
cuda_reasons._dynamo_marked_constant = True

_known_cuda_reasons: dict[int, tuple[str, ...]] = {}


def _find_cuda_reasons(index: int) -> tuple[str, ...]:
    info = native.build_info()
    if not info["cuda"]:
        return (
            "this build has no CUDA kernels, for no nvcc was found when it was compiled. "
            "Fix: install a wheel, or build with CUDA_HOME set",
        )
    needed, driver = int(info["cuda"].split(".")[0]), native.driver_cuda_version()
    if driver[0] < needed:
        return (
            f"the NVIDIA driver runs CUDA up to {driver[0]}.{driver[1]}, and this build needs "
            f"{needed}.0. Fix: update the driver",
        )
    capability = torch.cuda.get_device_capability(index)
    if runs_on(info["architectures"], capability):
        return ()
    return (
        f"this build has no kernels for compute capability {capability[0]}.{capability[1]}, "
        f"only for {info['architectures']}. Fix: build with TORCH_CUDA_ARCH_LIST set",
    )


def runs_on(architectures: str, capability: tuple[int, int]) -> bool:
    """Whether code built for `architectures`, such as "8.0 9.0+PTX", runs on a device.

    Machine code runs on its own major version from its minor version up, PTX on everything newer.
    """
    for major, minor, ptx in re.findall(r"(\d+)\.(\d+)[a-z]?(\+PTX)?", architectures):
        built = (int(major), int(minor))
        if built <= capability and (ptx or built[0] == capability[0]):
            return True
    return False
