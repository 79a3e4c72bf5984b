"""What test_linear_logp.py compares, and the checks of the Triton kernels, run under Triton's interpreter."""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import rpg.kernels.logp  # noqa: F401
from rpg.kernels import kept as kept_module
from rpg.kernels.kept import Kept

module = sys.modules["rpg.kernels.logp"]
N, V, H = 37, 53, 16


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    up: Tensor  # the gradients that come in, of logp, entropy and KL


def inputs(dtype: torch.dtype = torch.float32, scale: float = 1.0, n: int = N, v: int = V, h: int = H) -> Inputs:
    g = torch.Generator().manual_seed(0)
    hidden, weight, ref_hidden, ref_weight = (
        (torch.randn(size, h, generator=g) * scale).to(dtype) for size in (n, v, n, v)
    )
    return Inputs(
        hidden, weight, torch.randint(v, (n,), generator=g), ref_hidden, ref_weight, torch.randn(3, n, generator=g)
    )


def run(data: Inputs, temperature: float, kl: bool, only: int | None = None, frozen: str = "") -> list[Tensor | None]:
    """Values, then the gradients for the hidden states and the weight, of linear_logp or linear_logp_kl."""
    h, w = (
        data.hidden.detach().requires_grad_(frozen != "hidden"),
        data.weight.detach().requires_grad_(frozen != "weight"),
    )
    ref = (data.ref_hidden, data.ref_weight) if kl else ()
    out = (module.linear_logp_kl if kl else module.linear_logp)(h, w, data.target, *ref, temperature)
    _loss(out, data.up, only).backward()
    return [*out, h.grad, w.grad]


def exact(data: Inputs, temperature: float, kl: bool, only: int | None = None) -> list[Tensor]:
    """The same by autograd through log_softmax in float64."""
    h, w = data.hidden.double().detach().requires_grad_(), data.weight.double().detach().requires_grad_()
    logp = torch.log_softmax(h @ w.T / temperature, -1)
    out = [logp[torch.arange(len(h)), data.target], torch.distributions.Categorical(logits=logp).entropy()]
    if kl:
        logq = torch.log_softmax(data.ref_hidden.double() @ data.ref_weight.double().T / temperature, -1)
        out.append((logp.exp() * (logp - logq)).sum(-1))
    _loss(out, data.up, only).backward()
    return [*out, h.grad, w.grad]  # type: ignore[list-item]


def _loss(out: list[Tensor], up: Tensor, only: int | None) -> Tensor:
    terms = [(x * u.to(x.dtype)).sum() for x, u in zip(out, up[: len(out)], strict=True)]
    return sum(terms[1:], terms[0]) if only is None else terms[only]


def compare(data: Inputs, temperature: float, kl: bool, only: int | None = None, near: float = 2e-5) -> None:
    found, expected = run(data, temperature, kl, only), exact(data, temperature, kl, only)
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=near * max(1.0, float(b.detach().abs().max())))


def kept_sets(data: Inputs) -> Kept:
    """A random set of each state, the target in it; some of one token, one of all."""
    n, v = len(data.hidden), len(data.weight)
    kept_NV = torch.rand(n, v, generator=torch.Generator().manual_seed(3)) < 0.2
    kept_NV[::4], kept_NV[1] = False, True
    kept_NV[torch.arange(n), data.target] = True
    return Kept(kept_NV.nonzero()[:, 1].int(), kept_NV.sum(-1))


def exact_kept(data: Inputs, kept: Kept, temperature: float, only: int | None) -> list[Tensor]:
    """A state at a time, from the logits of its own tokens alone, in float64."""
    h, w = data.hidden.double().detach().requires_grad_(), data.weight.double().detach().requires_grad_()
    logp, entropy = [], []
    for n, ids in enumerate(torch.split(kept.ids_K.long(), kept.count_N.tolist())):
        p = torch.distributions.Categorical(logits=(w[ids] @ h[n]) / temperature)
        logp.append(p.log_prob((ids == data.target[n]).nonzero()[0, 0]))
        entropy.append(p.entropy())
    out = [torch.stack(logp), torch.stack(entropy)]
    _loss(out, data.up, only).backward()
    return [*out, h.grad, w.grad]  # type: ignore[list-item]


def compare_kept(data: Inputs, temperature: float, only: int | None, near: float = 2e-5) -> None:
    kept = kept_sets(data)
    h, w = data.hidden.detach().requires_grad_(), data.weight.detach().requires_grad_()
    out = module.linear_logp(h, w, data.target, temperature, kept)
    _loss(out, data.up, only).backward()
    for a, b in zip([*out, h.grad, w.grad], exact_kept(data, kept, temperature, only), strict=True):
        assert a.dtype in (data.hidden.dtype, torch.float32)
        error = (a.double() - b).abs().max()
        assert error <= near * max(1.0, float(b.detach().abs().max())), error


def triton(rows: int, columns: int, block: int) -> None:
    """From here on linear_logp runs the kernels, in chunks of rows × columns."""
    from rpg.kernels.triton import logp as linear_logp_triton

    module._kernels = lambda *_: linear_logp_triton
    module.CHUNK["cpu"] = (rows, 4 * rows * columns)
    module._tile = lambda tokens, vocabulary, *_: (min(rows, tokens), min(columns, vocabulary))
    linear_logp_triton.BLOCK = block


def check_values_and_gradients() -> None:
    for (rows, columns, block), kl in itertools.product([(37, 53, 64), (37, 20, 8), (10, 53, 16)], (False, True)):
        triton(rows, columns, block)
        compare(inputs(), 0.7, kl)


def check_kept() -> None:
    """Chunks in which all but the kept sets is hidden."""
    with patch.dict(kept_module.WORTH, cpu=10**9):
        for rows, columns, block in ((37, 53, 64), (37, 20, 8), (10, 53, 16), (10, 9, 16)):
            triton(rows, columns, block)
            compare_kept(inputs(), 0.7, None)


def check_each_output_alone() -> None:
    triton(37, 24, 16)
    for only in range(3):
        compare(inputs(), 1.0, True, only)


def check_one_word_and_one_token_at_a_time() -> None:
    triton(1, 1, 16)
    compare(inputs(n=3, v=5), 1.3, True)


def check_half_types() -> None:
    """The kernels see what linear_logp_torch sees, so they give what it gives."""
    from rpg.kernels import logp_torch as linear_logp_torch

    for dtype in (torch.bfloat16, torch.float16):
        data = inputs(dtype)
        triton(20, 24, 16)
        found = run(data, 0.9, True)
        module._kernels = lambda *_: linear_logp_torch
        for a, b in zip(found, run(data, 0.9, True), strict=True):
            assert a is not None
            assert b is not None
            assert a.dtype == b.dtype
            half = a.dtype == dtype  # of a chunk's gradient, where a rounding may fall to the other side
            torch.testing.assert_close(a, b, rtol=2**-6 if half else 1e-5, atol=2e-2 if half else 1e-5)


def check_gradient_lies_where_the_logits_were() -> None:
    from rpg.kernels import logp_torch as linear_logp_torch
    from rpg.kernels.triton import logp as linear_logp_triton

    g = torch.Generator().manual_seed(1)
    buffer = torch.full((5, 40), float("nan"))
    logits = torch.randn(5, 29, generator=g) * 3
    target, first = torch.tensor([7, 35, 8, 36, 20]), 7
    norm, entropy, up, up_entropy = (torch.randn(5, generator=g) for _ in range(4))
    by = linear_logp_torch.Slope(norm + 6, entropy, up, up_entropy)
    for dtype in (torch.float32, torch.bfloat16):
        for block in (8, 64):
            linear_logp_triton.BLOCK = block
            buffer.fill_(float("nan"))
            buffer[:, :29] = logits
            out = linear_logp_triton.slope(by, buffer[:, :29], None, target, first, 0.5, dtype)
            want = linear_logp_torch.slope(by, logits.clone(), None, target, first, 0.5, dtype)
            torch.testing.assert_close(out, want)
            assert out.data_ptr() == buffer.data_ptr()
            assert buffer[:, 29:].isnan().all()


def check_extreme_logits() -> None:
    triton(5, 3, 16)
    weight = torch.tensor([[1e4], [-1e4], [0.0], [1e4 - 1]])
    h, w = torch.tensor([[1.0], [-1.0], [0.0], [1.0], [1e-4]]).requires_grad_(), weight.clone().requires_grad_()
    ref = torch.tensor([[1.0], [1.0], [1e-4], [-1.0], [0.0]])
    data = Inputs(h.detach(), weight, torch.tensor([0, 0, 2, 3, 1]), ref, weight, torch.ones(3, 5))
    found = module.linear_logp_kl(h, w, data.target, ref, weight)
    for a, b in zip(found, exact(data, 1.0, True)[:3], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=4e-3)
    sum(x.sum() for x in found).backward()
    assert h.grad is not None
    assert w.grad is not None
    assert h.grad.isfinite().all()
    assert w.grad.isfinite().all()


def check_kernels_are_launched_on_the_device_of_the_logits() -> None:
    """Which need not be the current one."""
    from rpg.kernels import logp_torch as linear_logp_torch
    from rpg.kernels.triton import logp as kernels

    current: list[Tensor] = []
    launched = []

    @contextmanager
    def device_of(tensor: Tensor):
        current.append(tensor)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda logits, *_, **__: launched.append(bool(current) and current[-1] is logits)

    logits_NC, row_N = torch.zeros(2, 4), torch.zeros(2)
    target_N, by = torch.zeros(2, dtype=torch.long), linear_logp_torch.Slope(row_N, row_N, row_N, None)
    with (
        patch("torch.cuda.device_of", device_of),
        patch.object(kernels, "_observe", Kernel()),
        patch.object(kernels, "_slope", Kernel()),
    ):
        kernels.observe(torch.zeros(4, 2), logits_NC, None, target_N, 0, 1.0)
        kernels.slope(by, logits_NC, None, target_N, 0, 1.0, torch.float32)
    assert launched == [True, True]
