# SPDX-License-Identifier: BSD-3-Clause
"""Whole runs: beside loops by hand, on known posteriors, killed and resumed, and refused."""

import functools
import math
import sys

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal
from torch.utils.data import DataLoader, TensorDataset

import fused_ops
from fused_ops import SVGD, ksd, svgd_phi

from .cases import assert_same_bits, random_tensor

pytestmark = pytest.mark.usefixtures("fused_only")

Adam = functools.partial(torch.optim.Adam, lr=0.1)
SGD = functools.partial(torch.optim.SGD, lr=1.0)
cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50)


def normal(points):
    """The log density of N(0, I)."""
    return -points.square().sum(1) / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["log_density", "score"])
def test_run_is_the_loop_by_hand(device, way, dtype):
    start = random_tensor(30, 3, dtype=dtype, device=device) + 2
    settings = {"bandwidth": "paper", "kernel": "imq", "repulsion": 1.5, "precision": "highest"}

    particles = start.clone()
    optimizer = Adam([particles])
    scheduler = cosine(optimizer)
    for step in range(12):
        particles.grad = -svgd_phi(particles, -particles / (5 - step / 4), **settings)
        optimizer.step()
        scheduler.step()

    kept = start.clone()
    sampler = SVGD(
        start, **{way: normal if way == "log_density" else torch.neg},
        optimizer=Adam, scheduler=cosine, temperature=lambda step: 5 - step / 4, **settings,
    )  # fmt: skip
    result = sampler.run(12, progress=False, record=5)  # which changes nothing
    assert_same_bits(result, particles)
    assert_same_bits(sampler.particles, particles)
    assert sampler.steps_taken == 12
    assert_same_bits(start, kept)


def test_defaults():
    start = random_tensor(10, 2)
    particles = start.clone()
    optimizer = torch.optim.Adam([particles], lr=0.01)
    sampler = SVGD(start.clone().requires_grad_(), normal)
    for _ in range(3):
        particles.grad = -svgd_phi(particles, -particles)
        optimizer.step()
        sampler.step()
    assert_same_bits(sampler.particles, particles)
    assert not sampler.particles.requires_grad


def test_distribution_as_posterior(device):
    covariance = torch.tensor([[1.0, 0.6], [0.6, 2.0]], device=device)
    posterior = MultivariateNormal(torch.tensor([3.0, -1.0], device=device), covariance)
    start = random_tensor(200, 2, device=device)
    sampler = SVGD(start, posterior.log_prob, optimizer=SGD, bandwidth="paper")
    particles = sampler.run(500, progress=False)
    assert (particles.mean(0) - posterior.mean).abs().max() < 0.01
    assert (particles.T.cov() - covariance).norm() < 0.1 * covariance.norm()
    first, last = (sampler.history["ksd"][i] for i in (0, -1))
    assert last < 0.01 * ksd(start, -(start - posterior.mean) @ covariance.inverse())
    assert last < first


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_temperature_scales_the_variance(temperature):
    sampler = SVGD(
        random_tensor(150, 1), normal, temperature=temperature, optimizer=SGD, bandwidth="paper"
    )
    variance = sampler.run(800, progress=False).var().item()
    assert variance == pytest.approx(temperature, rel=0.05)


def test_infinite_temperature_leaves_repulsion():
    start = random_tensor(9, 2)
    sampler = SVGD(start, normal, temperature=math.inf, optimizer=SGD)
    sampler.step()
    torch.testing.assert_close(sampler.particles, start + svgd_phi(start, torch.zeros_like(start)))


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.noise = torch.nn.Parameter(torch.zeros(()))  # its logarithm

    def forward(self, x):
        return self.layers(x), self.noise.exp()


def network_posterior(network, batches):
    """Of (parameters, batch): the likelihood of the network and normal priors."""

    def log_density(parameters, batch):
        x, y = batch
        mean, noise = torch.vmap(lambda p: torch.func.functional_call(network, p, (x,)))(parameters)
        likelihood = Normal(mean, noise[:, None, None]).log_prob(y).sum((1, 2)) * batches
        priors = (Normal(0, 1).log_prob(p).reshape(len(p), -1).sum(1) for p in parameters.values())
        return likelihood + sum(priors)

    return log_density


def network_and_data(device="cpu", count=12):
    torch.manual_seed(0)
    network = Network().to(device)
    x = torch.linspace(-2, 2, 60, device=device)[:, None]
    data = TensorDataset(x, torch.sin(2 * x) + 0.05 * random_tensor(60, 1, device=device))
    start = {
        name: 0.7 * random_tensor(count, *p.shape, device=device, seed=seed)
        for seed, (name, p) in enumerate(network.named_parameters())
    }
    return network, data, start


def test_module_as_likelihood(device):
    """Its score is what autograd takes of one network at a time, and the networks learn."""
    network, data, start = network_and_data(device)
    x, y = data.tensors
    sampler = SVGD(start, network_posterior(network, 1), optimizer=SGD, temperature=7.0)
    sampler.step((x, y))

    rows = []
    for i in range(12):
        single = {name: p[i].clone().requires_grad_() for name, p in start.items()}
        mean, noise = torch.func.functional_call(network, single, (x,))
        value = Normal(mean, noise).log_prob(y).sum()
        value = value + sum(Normal(0, 1).log_prob(p).sum() for p in single.values())
        gradients = torch.autograd.grad(value, tuple(single.values()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    flat = torch.cat([p.reshape(12, -1) for p in start.values()], 1)
    moved = flat + svgd_phi(flat, torch.stack(rows) / 7)
    torch.testing.assert_close(
        torch.cat([p.reshape(12, -1) for p in sampler.particles.values()], 1), moved,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip

    loader = DataLoader(data, batch_size=20, shuffle=True)
    sampler = SVGD(start, network_posterior(network, len(loader)), optimizer=Adam)
    parameters = sampler.run(200, loader, progress=False)
    assert {n: p.shape for n, p in parameters.items()} == {n: p.shape for n, p in start.items()}
    means, _ = torch.vmap(lambda p: torch.func.functional_call(network, p, (x,)))(parameters)
    assert (means.mean(0) - y).square().mean().sqrt() < 0.15
    assert sampler.history["log_density"][-1] > sampler.history["log_density"][0]


def loader_of_its_own(data):
    return DataLoader(data, 9, shuffle=True, generator=torch.Generator().manual_seed(3))


def shuffled_loader(data):
    return DataLoader(data, 9, shuffle=True)


def batch_list(data):
    return [tuple(t[i : i + 9] for t in data.tensors) for i in range(0, 60, 9)]


@pytest.mark.parametrize("batches", [loader_of_its_own, shuffled_loader, batch_list])
@pytest.mark.parametrize(
    "optimizer", [Adam, functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)]
)
@pytest.mark.parametrize("killed_at", [20, 21])
def test_killed_run_resumes_bit_for_bit(tmp_path, killed_at, optimizer, batches):
    """Within and after the third pass over seven batches; the log density draws random numbers."""

    def new_sampler(scale=1.0):
        network, data, start = network_and_data()
        likelihood = network_posterior(network, 7)

        def log_density(parameters, batch):
            noisy = {name: p + 0.1 * torch.randn_like(p) for name, p in parameters.items()}
            return likelihood(noisy, batch)

        start = {name: scale * p for name, p in start.items()}
        settings = {"optimizer": optimizer, "scheduler": cosine}
        return SVGD(start, log_density, **settings, temperature=lambda n: 1 + 10 / (n + 1)), data

    sampler, data = new_sampler()
    torch.manual_seed(1)
    sampler.run(40, batches(data), progress=False, record=8)
    expected, random_number = sampler.state_dict(), torch.rand(())

    class Killed(Exception):
        pass

    def save_and_die(sampler):
        if sampler.steps_taken == killed_at:
            torch.save(sampler.state_dict(), tmp_path / "state.pt")
            raise Killed

    sampler, data = new_sampler()
    torch.manual_seed(1)
    with pytest.raises(Killed):
        sampler.run(40, batches(data), progress=False, record=8, callbacks=[save_and_die])
    torch.rand(17)

    sampler, data = new_sampler(scale=0.0)
    torch.manual_seed(99)
    sampler.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert sampler.steps_taken == killed_at
    again = sampler.state_dict()  # before any run, it is the loaded one
    sampler.load_state_dict(again)
    sampler.run(40 - killed_at, batches(data), progress=False, record=8)
    assert sampler.history["step"] == [8, 16, 24, 32, 40]
    assert_same_state(sampler.state_dict(), expected)
    assert torch.rand(()) == random_number


def assert_same_state(state, expected):
    if isinstance(expected, dict):
        assert state.keys() == expected.keys()
        for key in expected:
            assert_same_state(state[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(state) == len(expected)
        for part, expected_part in zip(state, expected, strict=True):
            assert_same_state(part, expected_part)
    elif isinstance(expected, torch.Tensor):
        assert_same_bits(state, expected)
    else:
        assert state == expected


def test_state_is_a_copy():
    sampler = SVGD(random_tensor(5, 2), normal)
    sampler.run(2, progress=False, record=1)
    state, same = sampler.state_dict(), sampler.state_dict()
    sampler.run(2, progress=False, record=1)
    assert_same_state(state, same)
    other = SVGD(torch.zeros(5, 2), normal)
    other.load_state_dict(state)
    other.run(2, progress=False, record=1)
    assert_same_state(state, same)
    assert_same_state(other.state_dict(), sampler.state_dict())


def recorded_batches(batches, *runs):
    """What runs of so many steps get."""
    seen = []

    def score(points, batch):
        seen.append(batch)
        return -points

    sampler = SVGD(random_tensor(4, 2), score=score)
    for steps in runs:
        sampler.run(steps, batches, progress=False)
    return seen


def test_batches_come_in_passes_over_runs():
    assert recorded_batches("abc", 7) == list("abcabca")
    assert recorded_batches("abc", 2, 2, 3) == list("abcabca")
    assert recorded_batches(iter("abc"), 2, 1) == list("abc")
    loader = DataLoader(torch.arange(10), batch_size=1, shuffle=True)
    seen = [batch.item() for batch in recorded_batches(loader, 8, 12)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_batches_that_end():
    for batches, steps in (([], 1), (iter("abc"), 4)):
        with pytest.raises(ValueError, match="batches: expected an iterable that yields at least"):
            recorded_batches(batches, steps)
    sampler = SVGD(random_tensor(4, 2), score=lambda points, batch: -points)
    sampler.run(3, "abcd", progress=False)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"batches: expected those of the saved run, .* 3 .* got 2"
    ):
        sampler.run(1, "ab", progress=False)
    sampler.load_state_dict(state)
    with pytest.raises(ValueError, match=r"batches: expected 0 generators, .* got 1"):
        sampler.run(1, DataLoader(torch.ones(4), generator=torch.Generator()), progress=False)


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
def test_history(device, kernel):
    path = [random_tensor(20, 3, device=device)]
    sampler = SVGD(path[0], normal, kernel=kernel, bandwidth="reference", temperature=3.0)
    sampler.run(7, progress=False, record=3, callbacks=[lambda s: path.append(s.particles.clone())])
    assert list(sampler.history) == ["step", "movement", "ksd", "log_density"]
    assert sampler.history["step"] == [3, 6]
    for row, step in enumerate((3, 6)):
        before, after = path[step - 1], path[step]
        expected = {
            "movement": (after - before).norm(dim=1).mean(),
            "ksd": ksd(before, -before, statistic="v", kernel=kernel, bandwidth="reference"),
            "log_density": normal(before).mean(),
        }
        for name, value in expected.items():
            assert isinstance(sampler.history[name][row], float)
            assert sampler.history[name][row] == pytest.approx(value.item(), rel=1e-5)
    sampler.run(20, progress=False, record=None)
    assert sampler.history["step"] == [3, 6]
    assert list(SVGD(path[0], score=torch.neg).history) == ["step", "movement", "ksd"]


def test_stop():
    def run(stop, record=10):
        sampler = SVGD(random_tensor(30, 2) + 1, normal, optimizer=SGD)
        sampler.run(2000, progress=False, stop=stop, record=record)
        assert sampler.steps_taken < 2000
        assert sampler.steps_taken % record == 0
        return sampler

    for name, tolerance in (("movement", 1e-3), ("ksd", 0.02)):
        *before, last = run({name: tolerance}).history[name]
        assert last <= tolerance < min(before)
    both = run({"movement": 1e-3, "ksd": 0.02}).steps_taken
    assert both == min(run({"movement": 1e-3}).steps_taken, run({"ksd": 0.02}).steps_taken)
    assert run(lambda sampler: len(sampler.history["step"]) == 4, record=5).steps_taken == 20


def test_progress_bar_is_optional(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    sampler = SVGD(random_tensor(5, 2), normal)
    sampler.run(3, record=1)
    shown = capsys.readouterr().err
    assert "SVGD: 100%" in shown
    assert "ksd=" in shown
    sampler.run(3, progress=False)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as where it is not installed
    sampler.run(3)
    assert sampler.steps_taken == 9
    assert capsys.readouterr() == ("", "")


def test_dict_of_scores_and_views():
    """Columns stay with their names, whatever the order of the score's."""
    start = {"a": random_tensor(6), "b": random_tensor(6, 2, 3), "c": random_tensor(6, 0)}
    sampler = SVGD(start, score=lambda p: {"c": p["c"], "b": -3 * p["b"], "a": 2 - p["a"]},
                   optimizer=SGD)  # fmt: skip
    view = sampler.particles
    sampler.step()
    flat = torch.cat([start["a"][:, None], start["b"].reshape(6, 6)], 1)
    score = torch.cat([2 - start["a"][:, None], -3 * start["b"].reshape(6, 6)], 1)
    moved = flat + svgd_phi(flat, score)
    torch.testing.assert_close(view["a"], moved[:, 0])
    torch.testing.assert_close(view["b"], moved[:, 1:].reshape(6, 2, 3))
    assert view["c"].shape == (6, 0)


def test_score_with_a_graph():
    """Of a module, say: its gradients are not SVGD's."""
    scale = torch.ones((), requires_grad=True)
    sampler = SVGD(random_tensor(9, 2), score=lambda x: -scale * x)
    expected = SVGD(random_tensor(9, 2), score=torch.neg)
    assert_same_bits(sampler.run(3, progress=False), expected.run(3, progress=False))


GOOD = torch.ones(4, 3)
BAD = {
    "neither": ({"log_density": None}, ValueError, "one of log_density and score"),
    "both": ({"score": torch.neg}, ValueError, "one of log_density and score"),
    "no function": ({"log_density": GOOD}, TypeError, "log_density: .* got Tensor"),
    "vector": ({"particles": GOOD[0]}, ValueError, r"particles: .*\(N, dim\), got \(3,\)"),
    "none": ({"particles": GOOD[:0]}, ValueError, "particles: expected at least one"),
    "integers": ({"particles": GOOD.int()}, TypeError, "particles: .* got torch.int32"),
    "list": ({"particles": [[1.0]]}, TypeError, "particles: expected a tensor, got list"),
    "empty": ({"particles": {}}, ValueError, "particles: .* got an empty dict"),
    "number": ({"particles": {"a": GOOD[0, 0]}}, ValueError, r"particles\['a'\]: .* got \(\)"),
    "counts": ({"particles": {"a": GOOD, "b": GOOD[1:]}}, ValueError, r"one N, .* got .*: \(3, "),
    "dtypes": ({"particles": {"a": GOOD, "b": GOOD.double()}}, ValueError, "one .* torch.float64"),
    "bandwidth": ({"bandwidth": "mean"}, ValueError, "bandwidth rule: .* got 'mean'"),
    "kernel": ({"kernel": "gauss"}, ValueError, "kernel: .* got 'gauss'"),
    "precision": ({"precision": "low"}, ValueError, "precision: .* got 'low'"),
    "repulsion": ({"repulsion": None}, TypeError, "repulsion: .* got NoneType"),
    "optimizer": ({"optimizer": torch.optim.Adam([GOOD])}, TypeError, "optimizer: .* got Adam"),
    "no optimizer": ({"optimizer": list}, TypeError, "optimizer: .* returns list"),
    "scheduler": ({"scheduler": 1}, TypeError, "scheduler: expected a function, got int"),
    "cold": ({"temperature": 0.0}, ValueError, "temperature: .* positive .* got 0.0"),
    "no temperature": ({"temperature": "1"}, TypeError, "temperature: expected a number, got str"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    changes, error, text = BAD[name]
    with pytest.raises(error, match=text):
        SVGD(**{"particles": GOOD, "log_density": normal} | changes)


AB = {"a": GOOD, "b": GOOD}
BAD_RESULTS = {
    "two values": (
        GOOD,
        {"log_density": Normal(0, 1).log_prob},
        ValueError,
        r"\(4,\), .* \(4, 3\)",
    ),
    "sum": (GOOD, {"log_density": torch.sum}, ValueError, r"log_density: .* got shape \(\)"),
    "float": (GOOD, {"log_density": lambda x: 1.0}, TypeError, "log_density: .* got float"),
    "detached": (GOOD, {"log_density": lambda x: GOOD[:, 0]}, ValueError, "autograd"),
    "score shape": (GOOD, {"score": torch.sum}, ValueError, r"score: .* \(4, 3\), got \(\)"),
    "score dtype": (GOOD, {"score": torch.Tensor.double}, TypeError, "score: .* got torch.float64"),
    "no dict": (AB, {"score": lambda p: GOOD}, ValueError, r"score: .* \['a', 'b'\], got Tensor"),
    "names": (AB, {"score": lambda p: {"a": GOOD}}, ValueError, r"score: .*, got \['a'\]"),
    "part": (
        AB,
        {"score": lambda p: p | {"b": GOOD[1:]}},
        ValueError,
        r"score\['b'\]: .* \(3, 3\)",
    ),
    "part dtype": (
        AB,
        {"score": lambda p: p | {"b": GOOD.double()}},
        TypeError,
        r"score\['b'\]: .* got torch.f",
    ),
    "cold": (GOOD, {"score": torch.neg, "temperature": lambda n: 1.0 - n}, ValueError, "got 0.0"),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_bad_results_of_functions(name):
    particles, arguments, error, text = BAD_RESULTS[name]
    sampler = SVGD(particles, **arguments)
    with pytest.raises(error, match=text):
        sampler.run(2, progress=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": -1}, "steps: .* got -1"),
        ({"steps": 1.5}, "steps: .* got 1.5"),
        ({"record": 0}, "record: .* got 0"),
        ({"stop": {"loss": 1.0}}, "stop: .* got {'loss'"),
        ({"stop": {}}, "stop: .* got {}"),
        ({"stop": 1e-3}, "stop: .* got 0.001"),
        ({"stop": {"ksd": 1e-3}, "record": None}, "stop: expected record .* got None"),
    ],
)
def test_bad_runs(arguments, text):
    with pytest.raises(ValueError, match=text):
        SVGD(GOOD, normal).run(**{"steps": 1, "progress": False} | arguments)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (SVGD(torch.ones(4, 2), normal), r"state\['particles'\]: .* \(4, 2\), got \(4, 3\)"),
        (SVGD({"a": GOOD}, lambda p: normal(p["a"])), r"state\['particles'\]: .* \['a'\]"),
        (SVGD(GOOD, normal, scheduler=cosine), "scheduler in both"),
    ],
)
def test_states_of_other_runs(other, text):
    state = SVGD(GOOD, normal).state_dict()
    before = other.state_dict()
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    assert_same_state(other.state_dict(), before)
    with pytest.raises(ValueError, match=r"state: .*'more'"):
        other.load_state_dict(before | {"more": 1})


def test_state_of_another_dtype():
    with pytest.raises(TypeError, match=r"state\['particles'\]: .*float32, got torch.float64"):
        SVGD(GOOD, normal).load_state_dict(SVGD(GOOD.double(), normal).state_dict())


@pytest.mark.parametrize("record", [None, 100, 5])
def test_only_recorded_steps_read_on_the_host(monkeypatch, record):
    """Of the device's tensors; Adam reads its count of steps, which is on the host."""
    sampler = SVGD(random_tensor(50, 3), normal, optimizer=SGD)
    reads = []
    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu"):
        method = getattr(torch.Tensor, name)

        def reading(*args, _method=method):
            reads.append(sampler.steps_taken)
            return _method(*args)

        monkeypatch.setattr(torch.Tensor, name, reading)
    sampler.run(10, progress=False, record=record)
    assert reads == ([5, 10] if record == 5 else [])


@pytest.mark.cuda
def test_nothing_waits_for_the_device():
    sampler = SVGD(random_tensor(500, 3, device="cuda"), normal, scheduler=cosine)
    sampler.run(1, progress=False, record=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.run(10, progress=False, record=None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_state_moves_between_devices():
    sampler = SVGD(random_tensor(10, 3, device="cuda"), normal)
    sampler.run(3, progress=False)
    other = SVGD(torch.zeros(10, 3), normal)
    other.load_state_dict(sampler.state_dict())
    assert_same_bits(other.particles, sampler.particles.cpu())
    other.run(3, progress=False)


def test_a_fallback_is_an_error_to_whoever_wants_none():
    with pytest.raises(fused_ops.FallbackError):
        SVGD(torch.ones(4, 0), normal).step()
