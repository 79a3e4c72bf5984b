"""linear_logp against log_softmax in float64."""

import pytest
import torch

from rpg.kernels import linear_logp

module = __import__("rpg.kernels.linear_logp", fromlist=["CHUNK_ELEMENTS"])
N, V, H = 37, 53, 16


@pytest.fixture(params=[None, 1, 5 * V, 36 * V, 37 * V], ids=["whole", "by-one", "by-five", "36+1", "just-whole"])
def chunked(request, monkeypatch):
    """Rows in a chunk: the last one may be shorter."""
    if request.param is not None:
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)


def inputs(dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g) * scale, torch.randn(V, H, generator=g) * scale
    target, up_logp, up_entropy = (
        torch.randint(V, (N,), generator=g),
        torch.randn(N, generator=g),
        torch.randn(N, generator=g),
    )
    return hidden.to(dtype), weight.to(dtype), target, up_logp, up_entropy


def reference(hidden, weight, target, temperature):
    logp = torch.log_softmax(hidden.double() @ weight.double().T / temperature, -1)
    return logp[torch.arange(len(target)), target], torch.distributions.Categorical(logits=logp).entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_values_and_gradients(chunked, temperature):
    hidden, weight, target, up_logp, up_entropy = inputs()
    found, expected = [], []
    for function, out in ((linear_logp, found), (reference, expected)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = function(h, w, target, temperature)
        ((logp * up_logp).sum() + (entropy * up_entropy).sum()).backward()
        out += [logp, entropy, h.grad, w.grad]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("which", [0, 1], ids=["logp", "entropy"])
def test_each_output_has_its_own_gradient(chunked, which):
    hidden, weight, target, up, _ = inputs()
    grads = []
    for function in (linear_logp, reference):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        (function(h, w, target, 0.8)[which] * up).sum().backward()
        grads.append((h.grad, w.grad))
    for a, b in zip(*grads, strict=True):
        assert float(b.abs().max()) > 0.1
        assert torch.allclose(a, b.float(), rtol=1e-4, atol=2e-5)


def test_chunks_change_no_bit_of_the_values(monkeypatch):
    hidden, weight, target, *_ = inputs()
    whole = linear_logp(hidden, weight, target)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * V)
    parts = linear_logp(hidden, weight, target)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, parts, strict=True))
    assert parts[0].shape == parts[1].shape == (N,)


def test_large_logits_neither_overflow_nor_lose_their_gradient():
    hidden, weight, target, *_ = inputs(scale=20.0)
    h = hidden.requires_grad_()
    logp, entropy = linear_logp(h, weight, target)
    expected = reference(hidden, weight, target, 1.0)
    assert torch.allclose(logp.double(), expected[0], rtol=1e-4, atol=1e-2)
    assert torch.allclose(entropy.double(), expected[1], atol=1e-2)
    logp.sum().backward()
    assert h.grad.isfinite().all()


def test_half_precision_softmax_is_in_float32():
    hidden, weight, target, *_ = inputs(torch.bfloat16)
    logp, entropy = linear_logp(hidden, weight, target)
    assert logp.dtype == entropy.dtype == torch.float32
    logits = (hidden @ weight.T).double()
    assert torch.allclose(logp.double(), logits.log_softmax(-1)[torch.arange(N), target], atol=1e-5)


def test_no_tokens():
    hidden, weight, target, *_ = inputs()
    logp, entropy = linear_logp(hidden[:0], weight, target[:0])
    assert logp.shape == entropy.shape == (0,)


def test_extremes_of_the_distribution():
    weight = torch.eye(4) * 200
    logp, entropy = linear_logp(torch.tensor([[1.0, 0, 0, 0], [0.0, 0, 0, 0]]), weight, torch.tensor([0, 2]))
    assert logp.tolist() == pytest.approx([0.0, -1.3862944])
    assert entropy.tolist() == pytest.approx([0.0, 1.3862944])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_means_nothing_is_refused(temperature):
    hidden, weight, target, *_ = inputs()
    with pytest.raises(ValueError, match=r"^temperature must be positive[^\n]*$"):
        linear_logp(hidden, weight, target, temperature)
