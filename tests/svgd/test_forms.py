# SPDX-License-Identifier: BSD-3-Clause
"""Which CUDA kernels form a call, and that all of them form the same."""

import math

import pytest
import torch

from fused_ops import _C, explain, median_bandwidth, svgd_phi
from fused_ops.svgd.function import KERNELS, PRECISIONS, RULES

from .cases import (
    KERNEL_NUMBERS,
    RULE_NUMBERS,
    assert_same_bits,
    bandwidth_by_sorting,
    bandwidth_op,
    check_phi,
    distances_op,
    random_inputs,
    random_tensor,
    update_op,
)

needs_kernels = pytest.mark.skipif(not hasattr(_C, "SVGD_FORMS"), reason="built without CUDA")

H200 = {"multiprocessors": 132, "shared_memory": 232_448, "capability": 90}
A100 = {"multiprocessors": 108, "shared_memory": 166_912, "capability": 80}
RTX_5090 = {"multiprocessors": 170, "shared_memory": 101_376, "capability": 120}
T4 = {"multiprocessors": 40, "shared_memory": 65_536, "capability": 75}


def forms(count, dim, device, dtype="float32", kernel="rbf", precision="high", problems=1):
    chosen = _C.svgd_forms(
        problems=problems,
        count=count,
        dim=dim,
        dtype=_C.DTYPES.index(dtype),
        kernel=KERNELS.index(kernel),
        precision=PRECISIONS.index(precision),
        **device,
    )
    return chosen["median"], chosen["update"]


@needs_kernels
class TestChoice:
    """Needs no GPU."""

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_few_particles(self, dtype):
        for count, dim in ((2, 1), (100, 2), (1024, 32), (2048, 64), (2000, 4096)):
            assert forms(count, dim, H200, dtype) == ("small", "small")
        for device, most in ((T4, 512), (A100, 1024), (RTX_5090, 1024)):
            assert forms(most, 64, device, dtype) == ("small", "small")
            assert forms(2048, 64, device, dtype) == ("tiles", "tiles")
        assert forms(2048, 5000, H200, dtype) == ("tiles", "tiles")
        assert forms(1, 3, H200, dtype) == ("tiles", "tiles")

    def test_float64_takes_tiles(self):
        for count in (100, 2048, 100_000):
            assert forms(count, 64, H200, "float64") == ("tiles", "tiles")

    @pytest.mark.parametrize("dim", [16, 33, 64, 256])
    def test_many_particles_on_tensor_cores(self, dim):
        if "9.0a" not in _C.build_info()["architectures"]:
            pytest.skip("built without 9.0a")
        assert forms(2049, dim, H200) == ("products", "products")
        assert forms(50_000, dim, H200, kernel="imq") == ("products", "direct")
        assert forms(50_000, dim, H200, precision="highest") == ("products", "direct")
        assert forms(50_000, dim, H200, precision="medium") == ("products", "products")

    def test_very_many_particles(self):
        for count in (131_072, 262_144):
            assert forms(count, 64, H200)[0] != "tiles"
            assert forms(count, 64, A100)[0] == "direct"

    @pytest.mark.parametrize("device", [A100, RTX_5090], ids=["A100", "5090"])
    def test_many_particles_elsewhere(self, device):
        for dim in (3, 64, 1000):
            assert forms(2049, dim, device) == ("direct", "direct")
        assert forms(50_000, 32, T4) == ("direct", "direct")
        assert forms(50_000, 64, T4) == ("tiles", "direct")

    @pytest.mark.parametrize("dim", [1, 15, 257])
    def test_dimensions_that_tensor_cores_do_not_take(self, dim):
        assert forms(2049, dim, H200) == ("direct", "direct")

    def test_several_problems(self):
        for dtype in ("float16", "float32", "float64"):
            assert forms(64, 32, T4, dtype, problems=1000) == ("batch", "batch")
            assert forms(64, 32, T4, dtype) != ("batch", "batch")
        assert forms(256, 32, H200, problems=2) == ("batch", "batch")
        assert forms(256, 32, T4, problems=2) == ("small", "small")
        assert forms(257, 2, H200, problems=2) == ("small", "small")
        assert forms(64, 5000, H200, problems=2) == ("tiles", "tiles")

    def test_lists_that_would_be_too_long(self):
        """Then the median takes passes over all pairs, in little memory."""
        for count, dim in ((262_144, 16), (1_000_000, 3)):
            assert forms(count, dim, H200)[0] == "tiles"


LARGE = [(2049, 3), (2500, 16), (4096, 64), (3000, 100), (2113, 256), (2100, 300)]
FORMS = ["tiles", "direct", "products", "missed"]


def kinds(count, dim):
    """Particles by name: distances without, with some and with many ties, and none at all."""
    x = random_tensor(count, dim, device="cuda")
    few = x.clone()
    few[count // 5 :] = 1
    spoilt = x.clone()
    spoilt[7, 0] = math.nan
    tail = x / random_tensor(count, 3, device="cuda", seed=5).square().mean(1, keepdim=True).sqrt()
    return {
        "gaussian": x,
        "far": x + 1e3,
        "heavy tail": tail,
        "lattice": (2 * x).round(),
        "mostly equal": few,
        "equal": torch.ones_like(x),
        "two values": (x[:, :1] > 0).float().expand_as(x).contiguous(),
        "NaN": spoilt,
        "tiny": 1e-18 * x,
    }


@pytest.mark.cuda
@pytest.mark.usefixtures("fused_only")
class TestOnCuda:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("shape", LARGE, ids=str)
    def test_median_of_many(self, shape, form):
        """The bits of a sorted matrix of distances, whatever finds them."""
        number = _C.SVGD_FORMS.index(form)
        for name, particles in kinds(*shape).items():
            distances = distances_op(particles)
            for rule, rule_number in RULE_NUMBERS.items():
                try:
                    h = bandwidth_op(particles, rule_number, number)
                except RuntimeError as error:
                    assert form == "products", name
                    assert "form: products does not take" in str(error)
                    assert not 16 <= shape[1] <= 256 or torch.cuda.get_device_capability()[0] != 9
                    continue
                if name == "NaN":
                    assert h.isnan()
                elif h != bandwidth_by_sorting(distances, rule):
                    # A zero median's place is taken by a mean, which is rounded.
                    assert name in ("mostly equal", "two values"), (name, rule)
                    torch.testing.assert_close(
                        h, bandwidth_by_sorting(distances, rule), rtol=2e-7, atol=0
                    )

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("shape", [(100, 2), (1024, 32), (2048, 70)], ids=str)
    def test_few_particles_by_tiles(self, shape, kernel):
        """As a device does that cannot hold them in one launch."""
        inputs = random_inputs(*shape, device="cuda")
        tiles = _C.SVGD_FORMS.index("tiles")
        settings = (None, 0, 0.0, KERNEL_NUMBERS[kernel], 1.0, None, 1, tiles)
        check_phi(update_op(*inputs, *settings), *inputs, kernel=kernel)
        for rule in RULES:
            h = bandwidth_op(inputs[0], RULE_NUMBERS[rule], tiles)
            assert_same_bits(h, median_bandwidth(inputs[0], rule))

    def test_forced_form_that_does_not_fit(self):
        particles = random_tensor(100, 3, device="cuda")
        for form in ("direct", "products", "missed"):
            with pytest.raises(RuntimeError, match=f"form: {form} does not take"):
                bandwidth_op(particles, 0, _C.SVGD_FORMS.index(form))
        with pytest.raises(RuntimeError, match="form: small does not take"):
            bandwidth_op(particles.double(), 0, _C.SVGD_FORMS.index("small"))
        with pytest.raises(RuntimeError, match="form: expected -1 to 4, got 5"):
            bandwidth_op(particles, 0, 5)

    def test_explained(self):
        few, many = (random_inputs(count, 64, device="cuda") for count in (300, 3000))
        assert explain(svgd_phi, *few).details["update"] == "small"
        assert explain(median_bandwidth, few[0]).details["median"] == "small"
        details = explain(svgd_phi, *many, bandwidth=2.0, precision="highest").details
        assert "median" not in details
        assert details["update"] == "direct"
