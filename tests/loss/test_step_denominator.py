"""Two processes with DDP and uneven micro-batches: the gradient of one large batch, whatever the reduction."""

import os
import socket

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rpg import PolicyLoss, clip

VOCABULARY, WIDTH, T = 11, 6, 7
LOSSES = {
    "token-mean": PolicyLoss("urkl", 0.1, "reinforce", clip.RPGClip(), reduction="token-mean"),
    "seq-mean-token-mean": PolicyLoss("k3", 0.1, "differentiable", clip.Box(), reduction="seq-mean-token-mean"),
    "seq-mean-token-sum": PolicyLoss("rkl", 0.1, "differentiable", clip.DualClip(), reduction="seq-mean-token-sum"),
    "constant": PolicyLoss("ufkl", 0.1, "reinforce", reduction="constant", constant=20.0),
    "sequence-level": PolicyLoss("none", 0.0, "differentiable", clip.Box(), "sequence-mean", "seq-mean-token-sum"),
}
# rank -> the rows of each of its micro-batches; row 5 has no tokens at all
SHARDS = {0: [[0, 1, 2], [3]], 1: [[4, 5], [6], [7, 8, 9, 10]]}


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, token_BT):
        """log π of each token given the one before."""
        logits = self.head(self.embedding(token_BT[:, :-1]).cumsum(1).tanh())
        return torch.log_softmax(logits, -1).gather(-1, token_BT[:, 1:, None]).squeeze(-1)


def data():
    g = torch.Generator().manual_seed(1)
    token = torch.randint(VOCABULARY, (11, T + 1), generator=g)
    mask = torch.arange(T) < torch.randint(1, T + 1, (11, 1), generator=g)
    mask[5] = False
    old = Policy()(token).detach() + 0.3 * torch.randn(11, T, generator=g)
    ref = old + 0.3 * torch.randn(11, T, generator=g)
    return token, old, ref, torch.randn(11, generator=g), mask


def step(model, loss, rows, denominator=None):
    token, old, ref, a, mask = (x[rows] for x in data())
    return loss(model(token), old, a, mask, ref_logp=ref, denominator=denominator).loss


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def worker(rank, port, out):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        found = {}
        for name, loss in LOSSES.items():
            mask = data()[-1]
            shards = SHARDS[rank]
            masks = [mask[rows] for rows in shards]
            # gradients averaged, by DDP
            model = DistributedDataParallel(Policy())
            total = loss.step_denominator(*masks)
            for rows in shards[:-1]:
                with model.no_sync():
                    step(model, loss, rows, total).backward()
            step(model, loss, shards[-1], total).backward()
            found[name, "mean"] = gradients(model.module)
            # gradients added, by hand
            model = Policy()
            total = loss.step_denominator(*masks, average_over_ranks=False)
            for rows in shards:
                step(model, loss, rows, total).backward()
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
            found[name, "sum"] = gradients(model)
        torch.save(found, f"{out}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(out)), nprocs=2)
    return [torch.load(out / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("combined", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_two_ranks_are_one_large_batch(found, name, combined):
    model = Policy()
    step(model, LOSSES[name], list(range(11))).backward()
    whole = gradients(model)
    assert max(float(g.abs().max()) for g in whole) > 1e-3
    for rank in found:
        for got, want in zip(rank[name, combined], whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_averaging_the_micro_batches_own_means_is_something_else(name):
    """What goes wrong without step_denominator: so the test above can fail."""
    loss = LOSSES[name]
    whole, naive = Policy(), Policy()
    step(whole, loss, list(range(11))).backward()
    batches = [rows for shards in SHARDS.values() for rows in shards]
    for rows in batches:
        (step(naive, loss, rows) / len(batches)).backward()
    worst = max(float((a - b).abs().max()) for a, b in zip(gradients(whole), gradients(naive), strict=True))
    assert worst > 1e-3


def test_one_process_needs_no_process_group():
    masks = [data()[-1][rows] for rows in SHARDS[0]]
    for loss in LOSSES.values():
        expected = sum(float(loss.count(m)) for m in masks)
        assert float(loss.step_denominator(*masks)) == expected
        assert float(loss.step_denominator(*masks, average_over_ranks=False)) == expected
