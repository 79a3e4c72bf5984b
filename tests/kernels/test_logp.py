"""linear_logp and linear_logp_kl against log_softmax in float64, in every implementation and shape of chunk."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rpg.kernels.logp  # noqa: F401
from kernels import logp_checks
from kernels.interpreted import interpreted
from kernels.logp_checks import H, N, V, compare, exact, inputs, run
from rpg.kernels import linear_logp
from rpg.kernels import logp_torch as linear_logp_torch

module = sys.modules["rpg.kernels.logp"]
CHUNKS = {
    "whole": None,
    "one-chunk": (N, 4 * N * V),
    "by-word": (N, 4 * N),
    "by-seven": (N, 4 * N * 7),
    "by-52-and-1": (N, 4 * N * 52),
    "and-tokens": (5, 4 * 5 * 9),
    "one-by-one": (1, 4),
}


@pytest.fixture(params=list(CHUNKS))
def chunked(request, monkeypatch):
    """Tokens and bytes in a chunk; the last one may be smaller."""
    if CHUNKS[request.param] is not None:
        monkeypatch.setattr(module, "WHOLE_ELEMENTS", 0)
        monkeypatch.setitem(module.CHUNK, "cpu", CHUNKS[request.param])


@pytest.fixture
def seven(monkeypatch):
    monkeypatch.setattr(module, "WHOLE_ELEMENTS", 0)
    monkeypatch.setitem(module.CHUNK, "cpu", CHUNKS["by-seven"])


@pytest.mark.parametrize("kl", [False, True], ids=["plain", "kl"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_values_and_gradients(chunked, temperature, kl):
    compare(inputs(), temperature, kl)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["logp", "entropy", "kl"])
def test_each_output_has_its_own_gradient(chunked, which):
    compare(inputs(), 0.8, True, only=which)


@pytest.mark.parametrize("name", [name for name in vars(logp_checks) if name.startswith("check_")])
def test_triton(name):
    assert interpreted("logp_checks", name) == ""


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float64_stays_float64_and_passes_gradcheck(seven, temperature):
    data = inputs(torch.float64)
    h, w = data.hidden[:6].requires_grad_(), data.weight.requires_grad_()
    ref = (data.ref_hidden[:6], data.ref_weight)
    out = module.linear_logp_kl(h, w, data.target[:6], *ref, temperature)
    assert all(x.dtype == torch.float64 for x in out)
    function = lambda h, w: module.linear_logp_kl(h, w, data.target[:6], *ref, temperature)  # noqa: E731
    assert torch.autograd.gradcheck(function, (h, w))


def test_the_kl_of_a_policy_with_itself_is_zero_and_so_is_its_gradient(chunked):
    data = inputs()
    h, w = data.hidden.requires_grad_(), data.weight.requires_grad_()
    kl = module.linear_logp_kl(h, w, data.target, h, w)[2]
    assert kl.abs().max() < 1e-6
    kl.sum().backward()
    assert h.grad.abs().max() < 1e-5
    assert w.grad.abs().max() < 1e-5


def test_nothing_reaches_the_reference(chunked):
    data = inputs()
    h, rh, rw = (x.requires_grad_() for x in (data.hidden, data.ref_hidden, data.ref_weight))
    sum(x.sum() for x in module.linear_logp_kl(h, data.weight, data.target, rh, rw)).backward()
    assert h.grad is not None
    assert rh.grad is None
    assert rw.grad is None


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_requires_a_gradient_gets_one(chunked, frozen):
    data = inputs()
    both = run(data, 1.0, False)
    one = run(data, 1.0, False, frozen=frozen)
    missing, kept = (2, 3) if frozen == "hidden" else (3, 2)
    assert one[missing] is None
    assert torch.equal(one[kept], both[kept])


def test_of_a_frozen_weight_no_gradient_is_computed(seven):
    data = inputs()
    seen = sizes_of_products(lambda: run(data, 1.0, False, frozen="weight"))
    assert not any(rows != N for rows, _ in seen), seen  # a chunk of the weight's gradient has 7 or 4 rows


def sizes_of_products(function):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            if op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                seen.append(tuple(out.shape))
            return out

    with Watch():
        function()
    assert seen
    return seen


@pytest.mark.parametrize("kl", [False, True], ids=["plain", "kl"])
def test_tokens_times_vocabulary_is_never_held(monkeypatch, kl):
    monkeypatch.setattr(module, "WHOLE_ELEMENTS", 0)
    monkeypatch.setitem(module.CHUNK, "cpu", (N, 4 * N * 16))
    largest, data = 0, inputs()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes())
            return out

    with Watch():
        run(data, 0.8, kl)
    assert 0 < largest <= max(4 * N * 16, 4 * V * H)  # a chunk, or an argument
    assert largest < 4 * N * V


def test_without_gradients_nothing_is_kept(seven):
    data = inputs()
    with torch.no_grad():
        assert all(x.grad_fn is None for x in linear_logp(data.hidden, data.weight, data.target))


def test_the_graph_keeps_the_arguments_and_vectors_only(seven):
    data, kept = inputs(), []
    h, w = data.hidden.requires_grad_(), data.weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        linear_logp(h, w, data.target)
    assert sorted(kept) == sorted([(N, H), (V, H), (N,), (N,), (N,)])


def test_entropy_that_nobody_differentiates_costs_its_gradient_nothing(seven, monkeypatch):
    data, seen = inputs(), []
    slope = linear_logp_torch.slope
    monkeypatch.setattr(linear_logp_torch, "slope", lambda by, *rest: seen.append(by.d_entropy_N) or slope(by, *rest))
    run(data, 1.0, False, only=0)
    assert seen
    assert all(x is None for x in seen)


def test_backward_twice(chunked):
    data = inputs()
    h, w = data.hidden.requires_grad_(), data.weight.requires_grad_()
    logp, entropy = linear_logp(h, w, data.target, 0.9)
    loss = (logp * data.up[0] + entropy * data.up[1]).sum()
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    second = torch.autograd.grad(loss, (h, w))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_hidden_states_and_targets_with_gaps(chunked):
    data = inputs()
    spread = torch.zeros(H, 2 * N)
    spread[:, ::2] = data.hidden.T
    target = torch.zeros(N, 2, dtype=torch.long)
    target[:, 0] = data.target
    compare(data._replace(hidden=spread[:, ::2].T, target=target[:, 0]), 1.0, True)


@pytest.mark.parametrize("word", [0, 48, 49, V - 1])
def test_targets_at_the_edges_of_chunks(seven, word):
    data = inputs()
    compare(data._replace(target=torch.full((N,), word)), 1.0, False)


def test_extreme_logits(chunked):
    weight = torch.tensor([[1e4], [-1e4], [0.0], [1e4 - 1]])
    data = inputs()._replace(
        hidden=torch.tensor([[1.0], [-1.0], [0.0], [1.0], [1e-4]]),
        weight=weight,
        target=torch.tensor([0, 0, 2, 3, 1]),
        ref_hidden=torch.tensor([[1.0], [1.0], [1e-4], [-1.0], [0.0]]),
        ref_weight=weight,
        up=torch.ones(3, 5),
    )
    h, w = data.hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = module.linear_logp_kl(h, w, data.target, data.ref_hidden, weight)
    for a, b in zip(found, exact(data, 1.0, True)[:3], strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-6, atol=4e-3)  # half a unit of float32 at 2e4 is 1e-3
    sum(x.sum() for x in found).backward()
    assert h.grad.isfinite().all()
    assert w.grad.isfinite().all()


def test_half_precision_softmax_is_in_float32(chunked):
    data = inputs(torch.bfloat16)
    logp, entropy = linear_logp(data.hidden, data.weight, data.target)
    assert logp.dtype == entropy.dtype == torch.float32
    logits = (data.hidden @ data.weight.T).double()
    assert torch.allclose(logp.double(), logits.log_softmax(-1)[torch.arange(N), data.target], atol=1e-5)


def test_half_precision_gradients(chunked):
    data = inputs(torch.bfloat16)
    found, expected = run(data, 1.0, True), exact(data, 1.0, True)
    for a, b in zip(found[3:], expected[3:], strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_no_tokens(chunked):
    data = inputs()
    h, w = data.hidden[:0].requires_grad_(), data.weight.requires_grad_()
    out = module.linear_logp_kl(h, w, data.target[:0], h, w)
    assert all(x.shape == (0,) for x in out)
    sum(x.sum() for x in out).backward()
    assert h.grad.shape == (0, H)
    assert not w.grad.any()


def test_extremes_of_the_distribution():
    weight = torch.eye(4) * 200
    logp, entropy = linear_logp(torch.tensor([[1.0, 0, 0, 0], [0.0, 0, 0, 0]]), weight, torch.tensor([0, 2]))
    assert logp.tolist() == pytest.approx([0.0, -1.3862944])
    assert entropy.tolist() == pytest.approx([0.0, 1.3862944])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_means_nothing_is_refused(temperature):
    data = inputs()
    with pytest.raises(ValueError, match=r"^temperature must be positive[^\n]*$"):
        linear_logp(data.hidden, data.weight, data.target, temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_logits(dtype):
    data = inputs(dtype)
    logits = module.head_logits(data.hidden, data.weight)
    assert logits.dtype == torch.float32
    exactly = data.hidden.double() @ data.weight.double().T
    assert torch.allclose(logits.double(), exactly, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
    h = data.hidden.requires_grad_()
    module.head_logits(h, data.weight).sum().backward()
    assert torch.allclose(h.grad.double(), data.weight.double().sum(0).expand(N, H), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "most", "size", "tile"),
    [
        (16384, 151936, 16384, 2**28, (16384, 4096)),
        (16385, 151936, 16384, 2**28, (8193, 8064)),
        (100, 1000, 16384, 2**28, (100, 1000)),
        (1, 10, 4, 1, (1, 1)),
    ],
)
def test_tile(tokens, vocabulary, most, size, tile):
    assert module._tile(tokens, vocabulary, most, size) == tile
