"""Log-probabilities over kept sets: every way of computing them against the plain definition, a state at a time."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rpg.kernels.logp  # noqa: F401
from kernels.logp_checks import H, N, V, compare_kept, inputs, kept_sets
from rpg.kernels import kept as kept_module
from rpg.kernels import linear_logp
from rpg.kernels.kept import Kept

module = sys.modules["rpg.kernels.logp"]
# tokens and bytes of a chunk (None: the definition itself), numbers gathered at once (None: the whole vocabulary)
WAYS = {
    "whole": (None, None),
    "gathered": ((N, 4 * N * V), 2**20),
    "gathered by threes": ((N, 4 * N * V), 3 * H),
    "one chunk": ((N, 4 * N * V), None),
    "chunks of seven": ((N, 4 * N * 7), None),
    "chunks of tokens too": ((5, 4 * 5 * 9), None),
}


@pytest.fixture(params=list(WAYS))
def way(request, monkeypatch):
    chunk, gathered = WAYS[request.param]
    if chunk is not None:
        monkeypatch.setattr(module, "WHOLE_ELEMENTS", 0)
        monkeypatch.setitem(module.CHUNK, "cpu", chunk)
        monkeypatch.setitem(kept_module.WORTH, "cpu", 0 if gathered else 10**9)
        monkeypatch.setitem(kept_module.CHUNK, "cpu", gathered or 1)
    return request.param


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("only", [None, 0, 1], ids=["both", "logp", "entropy"])
def test_values_and_gradients(way, only, temperature):
    compare_kept(inputs(), temperature, only)


def test_float64_to_the_last_digits(way):
    compare_kept(inputs(torch.float64), 0.7, None, near=1e-13)


def test_half_precision(way):
    compare_kept(inputs(torch.bfloat16), 1.0, 0, near=2e-2)


def test_of_the_whole_vocabulary_it_is_linear_logp(way):
    data = inputs(torch.float64)
    every = Kept(torch.arange(V, dtype=torch.int32).repeat(N), torch.full((N,), V))
    for found, want in zip(
        linear_logp(data.hidden, data.weight, data.target, 0.8, every),
        linear_logp(data.hidden, data.weight, data.target, 0.8),
        strict=True,
    ):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_a_set_of_one_token_leaves_nothing_to_learn(way):
    data = inputs(torch.float64)
    h, w = data.hidden.requires_grad_(), data.weight.requires_grad_()
    logp, entropy = linear_logp(h, w, data.target, 1.0, Kept(data.target.int(), torch.ones(N, dtype=torch.long)))
    (logp + entropy).sum().backward()
    for x in (logp, entropy, h.grad, w.grad):
        assert x.abs().max() < 1e-13


def test_gathered_passes_gradcheck(monkeypatch):
    monkeypatch.setattr(module, "WHOLE_ELEMENTS", 0)
    monkeypatch.setitem(kept_module.WORTH, "cpu", 0)
    data = inputs(torch.float64, n=5)
    kept = kept_sets(data)
    function = lambda h, w: linear_logp(h, w, data.target, 0.8, kept)  # noqa: E731
    assert torch.autograd.gradcheck(function, (data.hidden.requires_grad_(), data.weight.requires_grad_()))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_requires_a_gradient_gets_one(way, frozen):
    data = inputs()
    h, w = (getattr(data, x).requires_grad_(x != frozen) for x in ("hidden", "weight"))
    linear_logp(h, w, data.target, 1.0, kept_sets(data))[0].sum().backward()
    assert (h.grad is None, w.grad is None) == (frozen == "hidden", frozen == "weight")


def test_small_sets_are_gathered_and_large_ones_are_not():
    for mean, few in ((1, True), (V // 2, False)):
        kept = Kept(torch.zeros(mean * N, dtype=torch.int32), torch.full((N,), mean))
        assert kept.few(256 * 4) == few
        assert not kept.few(4)


def test_tokens_times_vocabulary_is_never_held(monkeypatch):
    monkeypatch.setattr(module, "WHOLE_ELEMENTS", 0)
    monkeypatch.setitem(kept_module.WORTH, "cpu", 0)
    monkeypatch.setitem(kept_module.CHUNK, "cpu", 16 * H)
    data, largest = inputs(), 0
    kept = Kept(data.target.int(), torch.ones(N, dtype=torch.long))

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x)]
            largest = max(largest, *sizes, 0)
            return out

    with Watch():
        linear_logp(data.hidden.requires_grad_(), data.weight.requires_grad_(), data.target, 1.0, kept)[0].sum()
    assert 0 < largest <= max(4 * V * H, 4 * N * H) < 4 * N * V


def test_states_apart_and_outside():
    kept = kept_sets(inputs())
    parts = kept.split(5)
    assert [part.size for part in parts] == [5] * (N // 5) + [N % 5] * (N % 5 > 0)
    assert torch.equal(torch.cat([part.outside(V) for part in parts]), kept.outside(V))
    assert int((~kept.outside(V)).sum()) == len(kept.ids_K)
