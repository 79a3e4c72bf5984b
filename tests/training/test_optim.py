"""Optimisers against their references, and state that comes back bit for bit."""

import contextlib
import inspect
import math
import textwrap

import pytest
import schedulefree
import torch
from torch import nn

import tiny
from rpg.run import checkpoint
from rpg.run.config import OptimConfig
from rpg.training import optim
from rpg.training.optim import (
    ScheduleFreeAdamW,
    averaged_weights,
    clip_gradients,
    learning_rate,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
)


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.unused = nn.Linear(2, 2)  # never has a gradient
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, ids):
        return self.head(self.norm(torch.tanh(self.layer(self.embed_tokens(ids)))))


def train(model, optimizer, steps, config=None, start=0):
    for step in range(start, start + steps):
        ids = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), (ids * 3 + 1) % 11).backward()
        if config is not None:
            optimizer.clip(config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, 20)
        optimizer.step()


def bits(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- schedule-free

STEPS, LR, DECAY, WARMUP, DROP, BETAS = 50, 0.05, 0.1, 7, 30, (0.8, 0.95)


def quadratic(x):
    """A loss with gradients of every size, the same for both implementations."""
    return sum(
        ((p - i) * torch.logspace(-2, 1, p.numel(), dtype=p.dtype).view_as(p)).square().sum() + p.sin().sum()
        for i, p in enumerate(x)
    )


def start():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 3), (5,), ())]


def reference():
    params, path = start(), []
    optimizer = schedulefree.AdamWScheduleFree(params, lr=LR, betas=BETAS, weight_decay=DECAY, warmup_steps=WARMUP)
    for step in range(STEPS):
        optimizer.train()
        optimizer.param_groups[0]["lr"] = LR if step < DROP else LR / 2
        optimizer.zero_grad()
        quadratic(params).backward()
        optimizer.step()
        y = [p.detach().clone() for p in params]
        optimizer.eval()
        path.append((y, [p.detach().clone() for p in params]))
    return path


def ours(kind):
    params, path = start(), []
    optimizer = kind(params, lr=LR, betas=BETAS, weight_decay=DECAY)
    config = OptimConfig(lr=LR, warmup=WARMUP, schedule="constant")
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = learning_rate(config, step, STEPS) / (1 if step < DROP else 2)
        optimizer.zero_grad()
        quadratic(params).backward()
        optimizer.step()
        path.append(([p.detach().clone() for p in params], optimizer.averaged(params)))
    return path


def distance(a, b):
    """The largest difference of any y and any x at any step."""
    pairs = [(p, q) for one, two in zip(a, b, strict=True) for i in (0, 1) for p, q in zip(one[i], two[i], strict=True)]
    return max(float((p - q).abs().max()) for p, q in pairs)


def test_schedule_free_is_the_authors():
    assert distance(ours(ScheduleFreeAdamW), reference()) < 1e-12


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('group["largest_lr"] ** 2', 'group["largest_lr"]'),
        ('weight / group["total_weight"]', '1 / group["step"]'),
        ("1 - beta * (1 - c)", "1 - beta * (1 + c)"),
        ("1 - beta * (1 - c)", "1 - beta"),
        ("1 - beta * (1 - c)", "beta * (1 - c)"),
        ("_foreach_lerp_(params, z, c)", "_foreach_lerp_(params, z, 1 - c)"),
        ("_foreach_add_(z, direction, alpha=-lr)", "_foreach_add_(z, direction, alpha=-lr * beta)"),
        ('1 - beta2 ** group["step"]', "1"),
        ("1 - beta2)", "beta2)"),
        ("1 - 1 / beta)", "1 - beta)"),
        ('_foreach_add_(scale, group["eps"])', "_foreach_add_(scale, 1e-6)"),
        ('direction, params, alpha=group["weight_decay"]', 'direction, z, alpha=group["weight_decay"]'),
        ('max(lr, group["largest_lr"])', "0.05"),
        ('max(lr, group["largest_lr"])', "lr"),
    ],
)
def test_a_wrong_coefficient_shows(right, wrong):
    source = textwrap.dedent(inspect.getsource(ScheduleFreeAdamW))
    assert source.count(right) == 1
    names = dict(vars(optim))
    exec(source.replace(right, wrong).replace("super()", "super(ScheduleFreeAdamW, self)"), names)
    assert not distance(ours(names["ScheduleFreeAdamW"]), reference()) < 1e-8


def test_averaging_does_not_touch_the_parameters():
    model = Model()
    optimizer = make_optimizer(model.named_parameters(), OptimConfig(name="schedule-free", lr=0.1))
    train(model, optimizer, 5)
    before = bits(model)
    averages = dict(zip(optimizer.masters, optimizer.optimizer.averaged(optimizer.masters.values()), strict=True))
    x = {name: averages.get(p, p) for name, p in model.named_parameters()}
    assert same(bits(model), before)
    with averaged_weights(optimizer):
        assert same(bits(model), x)
        assert not same(bits(model), before)
    assert same(bits(model), before)
    with contextlib.suppress(KeyboardInterrupt), averaged_weights(optimizer):
        raise KeyboardInterrupt
    assert same(bits(model), before)


def test_averaged_weights_of_adamw_are_the_weights():
    model = Model()
    optimizer = make_optimizer(model.named_parameters(), OptimConfig(lr=1e-3))
    train(model, optimizer, 2)
    before = bits(model)
    with averaged_weights(optimizer):
        assert same(bits(model), before)


def test_schedule_free_learns_and_refuses():
    model = Model()
    optimizer = make_optimizer(model.named_parameters(), OptimConfig(name="schedule-free", lr=0.02))
    train(model, optimizer, 150)
    ids = torch.arange(11)
    with averaged_weights(optimizer):
        assert torch.equal(model(ids).argmax(-1), (ids * 3 + 1) % 11)
    with pytest.raises(ValueError, match="betas must start between 0 and 1"):
        ScheduleFreeAdamW(model.parameters(), betas=(0.0, 0.9))


# ---- AdamW and the groups


def test_adamw_is_torchs_with_decay_on_matrices():
    a, b = Model(), Model()
    optimizer = make_optimizer(a.named_parameters(), OptimConfig(lr=0.01, weight_decay=0.3, betas=(0.8, 0.9)))
    decayed = [b.layer.weight, b.head.weight, b.unused.weight]
    others = [b.embed_tokens.weight, b.layer.bias, *b.norm.parameters(), b.head.bias, b.unused.bias]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), foreach=False, fused=False)
    train(a, optimizer, 10)
    train(b, plain, 10)
    for name, p in a.named_parameters():
        torch.testing.assert_close(p, dict(b.named_parameters())[name], rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_left_out():
    model = Model()
    optimizer = make_optimizer(model.named_parameters(), OptimConfig(lr=1e-3))
    assert not any(
        p is q for q in model.frozen.parameters() for group in optimizer.param_groups for p in group["params"]
    )
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        make_optimizer(model.frozen.named_parameters(), OptimConfig(lr=1e-3))


# ---- learning rate


def test_learning_rate():
    config = OptimConfig(lr=2.0, warmup=4, schedule="constant")
    assert [learning_rate(config, step, 20) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert learning_rate(config, 19, 20) == 2.0
    linear = [learning_rate(OptimConfig(lr=1.0, warmup=1, schedule="linear"), step, 11) for step in range(12)]
    assert linear == pytest.approx([1 - 0.09 * step for step in range(11)] + [0.1])
    cosine = [learning_rate(OptimConfig(lr=1.0, warmup=0, schedule="cosine"), step, 5) for step in range(5)]
    half = 0.9 * math.cos(math.pi / 4) / 2
    assert cosine == pytest.approx([1.0, 0.55 + half, 0.55, 0.55 - half, 0.1])


def test_learning_rate_with_more_warmup_than_steps():
    config = OptimConfig(lr=1.0, warmup=10, schedule="cosine")
    assert [learning_rate(config, step, 3) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert learning_rate(OptimConfig(lr=1.0, warmup=0, schedule="linear"), 0, 1) == 1.0
    assert learning_rate(OptimConfig(lr=1.0, warmup=0), 10, 11) == pytest.approx(0.1)  # auto
    assert learning_rate(OptimConfig(name="schedule-free", lr=1.0, warmup=0), 10, 11) == 1.0


# ---- clipping


def test_clipping():
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    params[0].grad, params[1].grad = torch.full((3,), 2.0), torch.full((4,), -1.0)
    assert clip_gradients(iter(params), 0.5) == pytest.approx(4.0)
    assert clip_gradients(params, 10.0) == pytest.approx(0.5, rel=1e-5)
    grads = [p.grad.clone() for p in params[:2]]
    assert clip_gradients(params, float("inf")) == pytest.approx(0.5, rel=1e-5)
    assert clip_gradients(params, 0.6) == pytest.approx(0.5, rel=1e-5)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, grads, strict=False))
    assert clip_gradients([params[2]], 1.0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(bad):
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    params[0].grad, params[1].grad = torch.tensor([3.0, bad]), torch.tensor([4.0, 5.0])
    assert not math.isfinite(clip_gradients(params, 1.0))
    assert params[0].grad[0] == 3.0
    assert torch.equal(params[1].grad, torch.tensor([4.0, 5.0]))


# ---- half precision


def drift(dtype, make, steps=200):
    """Weights of size 0.02 to 1 after many small steps, by gradients that are the same for every dtype."""
    g = torch.Generator().manual_seed(0)
    start = torch.linspace(0.02, 1, 64).bfloat16()
    p, lean = nn.Parameter(start.to(dtype)), torch.randn(64, generator=g)
    optimizer = make([p])
    for _ in range(steps):
        p.grad = (lean + 0.1 * torch.randn(64, generator=g)).bfloat16().to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    return start, p.detach(), optimizer


def test_plain_bfloat16_loses_small_updates_and_masters_keep_them():
    def plain(params):
        return torch.optim.AdamW(params, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)

    def ours(params):
        return make_optimizer([("weight", params[0])], OptimConfig(lr=1e-6, warmup=0))

    start, lost, _ = drift(torch.bfloat16, plain)
    assert torch.equal(lost, start)  # 200 steps, and nothing has moved
    _, full, _ = drift(torch.float32, ours)
    assert ((full - start.float()).abs() > 1e-4).sum() > 50
    _, kept, optimizer = drift(torch.bfloat16, ours)
    assert torch.equal(next(iter(optimizer.masters.values())), full)  # the float32 run itself
    assert torch.equal(kept, full.bfloat16())
    assert not torch.equal(kept, start)


def test_masters_of_some_parameters_are_not_those_of_all():
    """What a checkpoint of schedule-free has to hold besides the masters: every parameter without one."""
    for dtypes, whole in (("hh", True), ("hf", False), ("ff", False)):
        kinds = {"h": torch.bfloat16, "f": torch.float32}
        named = [(f"p{i}", torch.nn.Parameter(torch.ones(2, dtype=kinds[kind]))) for i, kind in enumerate(dtypes)]
        assert make_optimizer(named, OptimConfig(name="schedule-free", lr=1e-3)).needs_parameters != whole


def test_micro_batches_are_summed_in_float32():
    x_NF = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact_F, size_F = x_NF.double().sum(0), x_NF.double().abs().sum(0)
    errors = []
    for masters in (True, False):
        p = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
        optimizer = make_optimizer([("weight", p)], OptimConfig(lr=1e-3))
        for x_F in x_NF:
            (p * x_F).sum().backward()
            if masters:
                optimizer.accumulate()
                assert p.grad is None
        grad = optimizer.masters[p].grad if masters else p.grad
        errors.append(float(((grad.double() - exact_F).abs() / size_F).max()))
    assert errors[0] < 1e-6
    assert errors[1] > 1e-3
    assert optimizer.clip(math.inf) > 0  # what was not accumulated is, before it is looked at
    assert optimizer.masters[p].grad.dtype == torch.float32


def test_tied_weights_have_one_master_and_both_gradients():
    half, full = tiny.make("llama-tied", dtype=torch.bfloat16), tiny.make("llama-tied", dtype=torch.bfloat16).float()
    optimizer = make_optimizer(half.named_parameters(), OptimConfig(lr=1e-3))
    assert (
        len(optimizer.masters) == len(list(half.parameters())) == sum(len(g["params"]) for g in optimizer.param_groups)
    )
    for model in (half, full):
        model(input_ids=torch.arange(2, 20)[None]).logits.float().square().mean().backward()
    optimizer.accumulate()
    got, want = optimizer.masters[half.lm_head.weight].grad, full.lm_head.weight.grad.clone()
    assert float((got - want).norm() / want.norm()) < 0.05  # bfloat16's rounding
    full.zero_grad()
    hidden = full.base_model(input_ids=torch.arange(2, 20)[None]).last_hidden_state.detach()
    full.lm_head(hidden).square().mean().backward()  # the head's use alone
    assert float((got - full.lm_head.weight.grad).norm() / want.norm()) > 0.2


@pytest.mark.parametrize("name", ["adamw", "schedule-free"])
def test_parameters_stay_where_they_are(name):
    model = Model().bfloat16()
    optimizer = make_optimizer(model.named_parameters(), OptimConfig(name=name, lr=0.1))
    places = [p.data_ptr() for p in model.parameters()]
    before = bits(model)
    train(model, optimizer, 3)
    with averaged_weights(optimizer):
        pass
    load_optimizer(optimizer, model.named_parameters(), optimizer_tensors(optimizer, model.named_parameters()))
    assert [p.data_ptr() for p in model.parameters()] == places
    assert not same(bits(model), before)
    assert all(torch.equal(p, master.bfloat16()) for p, master in optimizer.masters.items())


def test_the_average_is_the_masters():
    model = Model().bfloat16()
    optimizer = make_optimizer(model.named_parameters(), OptimConfig(name="schedule-free", lr=0.1))
    train(model, optimizer, 5)
    before, masters = bits(model), list(optimizer.masters.values())
    assert {x.dtype for x in optimizer_tensors(optimizer, model.named_parameters()).values()} == {
        torch.float32,
        torch.float64,
    }
    x = optimizer.optimizer.averaged(masters)
    with averaged_weights(optimizer):
        assert all(torch.equal(p, average.bfloat16()) for p, average in zip(optimizer.masters, x, strict=True))
        assert not same(bits(model), before)
    assert same(bits(model), before)


# ---- state

KINDS = [
    OptimConfig(name="adamw", lr=0.01, weight_decay=0.1, schedule="cosine"),
    OptimConfig(name="schedule-free", lr=0.01, weight_decay=0.1, warmup=7),
]


@pytest.mark.parametrize("config", KINDS, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_bit_identical(config, dtype, tmp_path):
    whole = Model().to(dtype)
    optimizer = make_optimizer(whole.named_parameters(), config)
    train(whole, optimizer, 10, config)
    expected = optimizer_tensors(optimizer, whole.named_parameters())

    first = Model().to(dtype)
    optimizer = make_optimizer(first.named_parameters(), config)
    train(first, optimizer, 5, config)
    groups = {"policy": bits(first), "optimizer": optimizer_tensors(optimizer, first.named_parameters())}
    checkpoint.save(tmp_path, 5, lambda folder: None, groups, {})

    second = Model(seed=1).to(dtype)
    saved = checkpoint.load(tmp_path)
    optimizer = make_optimizer(second.named_parameters(), config)
    second.load_state_dict(saved.tensors("policy"))
    loaded = saved.tensors("optimizer")
    load_optimizer(optimizer, second.named_parameters(), loaded)
    kept = {name: x.clone() for name, x in loaded.items()}
    train(second, optimizer, 5, config, start=5)
    assert same(bits(second), bits(whole))
    assert same(optimizer_tensors(optimizer, second.named_parameters()), expected)
    assert same(loaded, kept)  # what was loaded is not trained on
    assert dtype == torch.float32 or loaded["layer.weight/master"].dtype == torch.float32

    third = Model(seed=1).to(dtype)  # without the state the bits differ: the comparison can fail
    third.load_state_dict(saved.tensors("policy"))
    train(third, make_optimizer(third.named_parameters(), config), 5, config, start=5)
    assert not same(bits(third), bits(whole))


@pytest.mark.parametrize("config", KINDS, ids=lambda c: c.name)
def test_state_before_the_first_step(config):
    model = Model()
    optimizer = make_optimizer(model.named_parameters(), config)
    tensors = optimizer_tensors(optimizer, model.named_parameters())
    train(model, optimizer, 2)
    load_optimizer(optimizer, model.named_parameters(), tensors)
    assert same(optimizer_tensors(optimizer, model.named_parameters()), tensors)


@pytest.mark.parametrize("config", KINDS, ids=lambda c: c.name)
def test_settings_of_the_new_run_win(config):
    model = Model()
    optimizer = make_optimizer(model.named_parameters(), config)
    train(model, optimizer, 2)
    tensors = optimizer_tensors(optimizer, model.named_parameters())
    other = make_optimizer(model.named_parameters(), OptimConfig(name=config.name, lr=0.5, weight_decay=0.7))
    load_optimizer(other, model.named_parameters(), tensors)
    assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [(0.5, 0.7), (0.5, 0.0)]


def test_a_state_that_does_not_fit_is_refused():
    model = Model()
    adamw, free = (make_optimizer(model.named_parameters(), config) for config in KINDS)
    train(model, adamw, 1)
    tensors = optimizer_tensors(adamw, model.named_parameters())

    def refused(optimizer, changed):
        with pytest.raises(ValueError) as error:
            load_optimizer(optimizer, model.named_parameters(), changed)
        return str(error.value)

    assert "it has no 'embed_tokens.weight/z'" in refused(free, tensors)
    assert "it has 'x/step'" in refused(adamw, tensors | {"x/step": torch.tensor(0)})
    short = {name: x for name, x in tensors.items() if name != "head.weight/exp_avg"}
    assert "it has no 'head.weight/exp_avg'" in refused(adamw, short)
    assert "'head.bias/exp_avg' is [3], not [11]" in refused(adamw, tensors | {"head.bias/exp_avg": torch.zeros(3)})
    assert same(optimizer_tensors(adamw, model.named_parameters()), tensors)
