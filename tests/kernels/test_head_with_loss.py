"""head_with_loss against log_softmax in float64 and against linear_logp, in blocks and columns of every size."""

import sys

import pytest
import torch

from kernels import head_with_loss_checks
from kernels.head_with_loss_checks import blocks, compare, extreme, run
from kernels.interpreted import interpreted
from kernels.logp_checks import H, N, V, inputs
from rpg.kernels import linear_logp, logp_torch

module = sys.modules["rpg.kernels.head_with_loss"]


@pytest.fixture(autouse=True, params=[64, 16, 1], ids=lambda width: f"width-{width}")
def width(request, monkeypatch):
    """Columns that have a maximum in common."""
    monkeypatch.setattr(logp_torch, "WIDTH", request.param)
    monkeypatch.setattr(module, "WIDTH", request.param)
    return request.param


@pytest.mark.parametrize("only", [None, 0, 1], ids=["both", "logp", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("most", [N, 10, 1])
def test_values_and_gradients(most, temperature, only, width):
    compare(inputs(torch.float64), temperature, most, columns=width, only=only, near=1e-12)
    compare(inputs(), temperature, most, columns=2 * width, only=only)


@pytest.mark.parametrize("name", [name for name in vars(head_with_loss_checks) if name.startswith("check_")])
def test_triton(name, width):
    if width == 16:
        assert interpreted("head_with_loss_checks", name) == ""


def test_extreme_logits(width):
    if 16 % width == 0:
        extreme()


def test_half_types_lose_what_rounding_loses(width):
    data = inputs(torch.bfloat16)
    found, exact = (
        run(data, 1.0, 10, width),
        run(data._replace(hidden=data.hidden.double(), weight=data.weight.double()), 1.0, N, 64),
    )
    assert found.d_hidden.dtype == torch.bfloat16
    assert found.d_weight.dtype == torch.float32
    for a, b in zip(found[2:], exact[2:], strict=True):
        assert (a.double() - b).norm() < 2**-7 * b.norm()


def test_a_sure_policy_has_a_small_gradient_and_not_a_rounded_one():
    """1 − p at the target would be lost in a half type if it were taken from a rounded p."""
    hidden, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.bfloat16)
    weight[2] = 8.0
    total, target = torch.zeros(4, 1), torch.tensor([2])
    one = torch.ones(1)
    module.head_with_loss(hidden, weight, target, [slice(0, 1)], lambda *_: (one, None), total, columns=64)
    logp, _ = linear_logp(hidden.double(), weight.double(), target)
    torch.testing.assert_close(total[2].double(), -torch.expm1(logp), rtol=2**-8, atol=0)


def test_the_weight_is_left_alone_where_it_needs_no_gradient_and_sums_go_on():
    data, up = inputs(), lambda i, logp, entropy: (torch.ones_like(logp), None)
    cut, total = blocks(N, 10), torch.ones(V, H)
    module.head_with_loss(data.hidden, data.weight, data.target, cut, up, total, columns=64)
    other = torch.zeros(V, H)
    done = module.head_with_loss(data.hidden, data.weight, data.target, cut, up, other, columns=64)
    torch.testing.assert_close(total, other + 1)
    without = module.head_with_loss(data.hidden, data.weight, data.target, cut, up, columns=64)
    assert torch.equal(without.d_hidden_NH, done.d_hidden_NH)


def test_no_tokens_and_settings_that_make_no_sense():
    data, up = inputs(), lambda i, logp, entropy: (logp, None)
    done = module.head_with_loss(data.hidden[:0], data.weight, data.target[:0], [], up, columns=64)
    assert done.d_hidden_NH.shape == (0, H)
    with pytest.raises(ValueError, match="temperature"):
        module.head_with_loss(data.hidden, data.weight, data.target, [], up, temperature=0.0)
    if module.WIDTH > 1:
        with pytest.raises(ValueError, match="multiple of"):
            module.head_with_loss(data.hidden, data.weight, data.target, [], up, columns=module.WIDTH + 1)


def test_what_a_block_takes(monkeypatch):
    monkeypatch.setattr(module, "COLUMNS", 8192)
    rows = module.rows_at_once(151_936, 2)
    assert rows % 128 == 0
    assert module.block_bytes(rows, 151_936, 2) <= module.MOST_BYTES < module.block_bytes(rows + 128, 151_936, 2)
    assert 0 < module.rows_at_once(10**8, 4) < 128
