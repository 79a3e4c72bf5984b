"""Weights in 4 bits: the table, the rounding error, the product and its gradient, and the kernels."""

import pytest
import torch

from kernels.interpreted import interpreted
from rpg.kernels import nf4

DTYPES = (torch.float32, torch.bfloat16)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_table_is_that_of_the_paper():
    """arXiv 2305.14314, appendix E: quantiles of a normal distribution, scaled to 1, 8 below and 9 above zero."""
    quantile = torch.distributions.Normal(0, 1).icdf
    offset = 0.9677083
    above = quantile(torch.linspace(offset, 0.5, 9)[:-1])
    below = -quantile(torch.linspace(offset, 0.5, 8)[:-1])
    values = torch.cat([above, below, torch.zeros(1)]).sort().values
    table = torch.tensor(nf4.TABLE)
    assert torch.allclose(values / values.max(), table, atol=1e-4)
    assert float(table[7]) == 0.0
    assert (float(table[0]), float(table[15])) == (-1.0, 1.0)


def test_a_byte_holds_two_weights_of_a_block():
    row = torch.zeros(1, 64)
    row[0, 0], row[0, 1], row[0, 32] = 1.0, -1.0, 0.7229568362236023
    packed, scale = nf4.quantise(row)
    assert packed.dtype == torch.uint8
    assert packed.shape == (1, 32)
    assert packed[0, :3].tolist() == [15 | 14 << 4, 0 | 7 << 4, 7 | 7 << 4]
    assert scale.tolist() == [[1.0]]
    assert torch.equal(nf4.dequantise(packed, scale, torch.float32), row)


def test_what_the_table_holds_comes_back_exactly():
    code = torch.randint(0, 16, (6, 128), generator=torch.Generator().manual_seed(0))
    code[:, ::64] = 15  # each block has its largest
    scale = torch.tensor([0.5, 3.0, 2**-20, 7e4, 1.0, 0.0])[:, None].bfloat16().float()
    weight = torch.tensor(nf4.TABLE)[code] * scale
    assert torch.equal(nf4.dequantise(*nf4.quantise(weight), torch.float32), weight)


def test_each_weight_goes_to_the_nearest():
    weight = random(8, 256)
    packed, scale = nf4.quantise(weight)
    multiples = torch.tensor(nf4.TABLE) * scale.float().view(-1, 1)
    blocks = weight.view(-1, 1, 64)
    nearest = (blocks.transpose(1, 2) - multiples[:, None]).abs().amin(-1)
    error = (nf4.dequantise(packed, scale, torch.float32) - weight).view(-1, 64).abs()
    assert torch.allclose(error, nearest, atol=1e-6)
    assert (error <= scale.float().view(-1, 1) * 0.153).all()  # half of the widest gap, and the scale's own rounding


def test_the_error_of_a_normal_matrix_and_its_bits():
    weight = random(256, 1024) * 0.02
    packed, scale = nf4.quantise(weight)
    error = nf4.dequantise(packed, scale, torch.float32) - weight
    assert 0.085 < float(error.norm() / weight.norm()) < 0.105
    assert abs(float(error.mean())) < 1e-4 * 0.02 * 100
    assert (packed.nbytes + scale.nbytes) * 8 / weight.numel() == 4.25 == 8 * nf4.BYTES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_that_with_the_dense_matrix_and_so_is_its_gradient(dtype, with_bias):
    packed, scale = nf4.quantise(random(48, 128).to(dtype))
    dense, x = nf4.dequantise(packed, scale, dtype), random(3, 5, 128, seed=1).to(dtype)
    bias = random(48, seed=2).to(dtype) if with_bias else None
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    biases = [None if bias is None else bias.clone().requires_grad_() for _ in range(2)]
    out, expected = nf4.linear(ours, packed, scale, biases[0]), torch.nn.functional.linear(theirs, dense, biases[1])
    assert torch.equal(out, expected)
    assert torch.equal(nf4.linear(x, packed, scale, bias), expected)  # without gradients the same bits
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    if with_bias:
        assert torch.allclose(biases[0].grad, biases[1].grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_nothing_dense_is_kept_for_the_backward_pass():
    packed, scale = nf4.quantise(random(64, 256))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        nf4.linear(random(4, 256).requires_grad_(), packed, scale, None)
    assert {x.data_ptr() for x in kept} == {packed.data_ptr(), scale.data_ptr()}


def test_shapes_without_weights():
    meta = torch.empty(48, 128, device="meta", dtype=torch.bfloat16)
    packed, scale = nf4.quantise(meta)
    real = nf4.quantise(random(48, 128))
    assert [(x.shape, x.dtype) for x in (packed, scale)] == [(x.shape, x.dtype) for x in real]
    assert nf4.dequantise(packed, scale, torch.bfloat16).shape == meta.shape
    assert not nf4.fits(torch.empty(4, 96))
    assert not nf4.fits(torch.empty(2, 4, 64))


@pytest.mark.parametrize("check", ["check_dequantise", "check_product", "check_a_decoding_step_takes_it"])
def test_as_kernels(check):
    assert interpreted("nf4_checks", check) == ""
