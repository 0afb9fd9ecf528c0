# SPDX-License-Identifier: BSD-3-Clause
"""patch_torch: where our function comes to stand, and that it goes again."""

import copy
import io
import pickle
import sys
from types import ModuleType

import pytest
import torch
from torch.nn.functional import triplet_margin_loss as imported_before

import fused_ops
from fused_ops import patch_torch, set_fallback, triplet

from .cases import assert_same_bits, loss_and_gradients, random_inputs

F = torch.nn.functional  # triplet.reference is torch's, unlike a name of this module, always


def by_name(*inputs, **settings):
    return imported_before(*inputs, **settings)


def by_module(*inputs, **settings):
    return F.triplet_margin_loss(*inputs, **settings)


def by_class(*inputs, **settings):
    return torch.nn.TripletMarginLoss(**settings)(*inputs)


WAYS = {"name": by_name, "module": by_module, "class": by_class}


def is_ours(function, *inputs):
    """Told by its gradient, which only ours forms in one step."""
    return "TripletMarginLoss" in type(function(*inputs).grad_fn).__name__


def is_patched():
    inputs = [x.requires_grad_() for x in random_inputs(3, 4)]
    (ours,) = {is_ours(way, *inputs) for way in WAYS.values()}
    return ours


@pytest.fixture(autouse=True)
def unpatched():
    yield
    patch_torch(False)
    assert imported_before is F.triplet_margin_loss is triplet.reference


@pytest.mark.parametrize("way", WAYS)
def test_patched_torch_computes_as_we_do(device, way):
    inputs = random_inputs(20, 33, device=device)
    settings = {"margin": 0.3, "p": 1, "eps": 1e-3, "swap": True, "reduction": "sum"}
    expected = loss_and_gradients(fused_ops.triplet_margin_loss, inputs, **settings)
    with patch_torch(), set_fallback("error"):
        assert_same_bits(loss_and_gradients(WAYS[way], inputs, **settings), expected)


def test_every_argument_is_passed_on():
    inputs = random_inputs(6, 5)
    arguments = (0.5, 1, 0.1, True, None, None, "none")
    with patch_torch():
        assert_same_bits(
            [F.triplet_margin_loss(*inputs, *arguments)],
            [fused_ops.triplet_margin_loss(*inputs, *arguments)],
        )
        with pytest.warns(UserWarning, match="size_average and reduce args"):
            assert F.triplet_margin_loss(*inputs, size_average=True, reduce=False).shape == (6,)


def test_a_call_lasts_until_it_is_taken_back():
    assert not is_patched()
    for _ in range(2):
        patch_torch()
        assert is_patched()
    patch_torch(False)
    assert not is_patched()
    patch_torch(False)
    assert not is_patched()


def test_blocks_may_end_in_any_order_and_by_an_exception():
    first, second = patch_torch(), patch_torch()
    with pytest.raises(KeyError), first, patch_torch():
        raise KeyError
    assert is_patched()
    second.__exit__()
    assert not is_patched()
    second.__exit__()
    assert not is_patched()


def test_block_within_a_call_for_good():
    patch_torch()
    with patch_torch():
        pass
    assert is_patched()
    with patch_torch():
        patch_torch(False)
        assert not is_patched()
    assert not is_patched()


def test_modules_loaded_meanwhile_get_torch_s_back(monkeypatch):
    """And keep ours where they imported it as ours."""
    late = ModuleType("late")
    monkeypatch.setitem(sys.modules, "late", late)
    monkeypatch.setitem(sys.modules, "no module", None)
    with patch_torch():
        exec("from torch.nn.functional import triplet_margin_loss as theirs", vars(late))
        exec("from fused_ops import triplet_margin_loss as ours", vars(late))
        assert late.theirs is not triplet.reference
    assert late.theirs is triplet.reference
    assert late.ours is fused_ops.triplet_margin_loss


def test_what_someone_else_put_there_stays(monkeypatch):
    with patch_torch():
        monkeypatch.setattr(F, "triplet_margin_loss", fused_ops.triplet_margin_loss)
    assert F.triplet_margin_loss is fused_ops.triplet_margin_loss


def test_fallbacks_reach_torch_s_own(device):
    """No recursion, from the function or from either module."""
    inputs = random_inputs(6, 7, device=device)
    expected = triplet.reference(*inputs, p=3)
    with patch_torch():
        for function in (
            F.triplet_margin_loss,
            fused_ops.triplet_margin_loss,
            torch.nn.TripletMarginLoss(p=3),
            fused_ops.TripletMarginLoss(p=3),
        ):
            settings = {} if isinstance(function, torch.nn.Module) else {"p": 3}
            assert torch.equal(function(*inputs, **settings), expected)


def test_subclasses_are_handed_torch_s_function():
    """By which those that override it know it, whatever stands under its name."""
    handled = {F.triplet_margin_loss: "theirs"}

    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return handled.get(function, NotImplemented)

    inputs = [x.as_subclass(Overriding) for x in random_inputs(3, 4)]
    with patch_torch():
        assert F.triplet_margin_loss(*inputs) == "theirs"


def test_modules_stay_what_they_are():
    """Of either time, in isinstance, copies and pickles."""
    before = torch.nn.TripletMarginLoss(swap=True)
    inputs = [x.requires_grad_() for x in random_inputs(3, 4)]
    with patch_torch():
        during = pickle.loads(pickle.dumps(before))
        for module in (before, during, copy.deepcopy(during)):
            assert type(module) is torch.nn.TripletMarginLoss
            assert module.swap
            assert is_ours(module, *inputs)
        function = pickle.dumps(F.triplet_margin_loss)
        assert pickle.loads(function) is F.triplet_margin_loss
    assert pickle.loads(function) is triplet.reference
    assert not is_ours(during, *inputs)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_follows():
    compiled = torch.compile(by_module, backend="eager", fullgraph=True)
    inputs = [x.requires_grad_() for x in random_inputs(3, 4)]
    expected = [triplet.reference(*inputs), fused_ops.triplet_margin_loss(*inputs)]
    assert_same_bits([compiled(*inputs)], expected[:1])
    with patch_torch(), set_fallback("error"):
        compiled(*inputs)
        with pytest.raises(Exception, match="no fused kernel for this call: p=3"):
            compiled(*inputs, p=3)
    assert_same_bits([compiled(*inputs)], expected[:1])


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
def test_torchscript_gets_torch_s():
    inputs = random_inputs(3, 4)
    expected = torch.nn.TripletMarginLoss(swap=True)(*inputs)
    with patch_torch():
        scripted = torch.jit.script(torch.nn.TripletMarginLoss(swap=True))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(*inputs), expected)
