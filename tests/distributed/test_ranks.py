"""How work is dealt to ranks, and what is refused, without a second process. The runs: test_ranks_runs.py."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from rpg import cli
from rpg.distributed import ranks, split_work
from rpg.distributed.ranks import ALONE, World, deal, joined, named_device, own_device
from rpg.distributed.shards import refuse_experts
from rpg.models.policy import Policy
from rpg.run.signals import Stop
from rpg.training.batch import Batch, micro_batches, rank_micro_batches
from rpg.training.loop import Trainer
from rpg.training.setup import pick_device


def test_prompts_are_dealt_once_and_the_same_prompt_to_one_rank() -> None:
    prompts = [[1], [2], [1], [3], [4], [2, 2], [1], [4]]
    hands = deal(prompts, 3)
    assert sorted(itertools.chain(*hands)) == list(range(len(prompts)))
    for prompt in ([1], [4]):
        holders = [hand for hand in hands if any(prompts[i] == prompt for i in hand)]
        assert len(holders) == 1
    assert all(hand == sorted(hand) for hand in hands)  # as the engine counts them in one process
    assert [len({tuple(prompts[i]) for i in hand}) for hand in hands] == [2, 2, 1]
    assert deal(prompts, 1) == [list(range(8))]


@pytest.mark.parametrize("kept", [True, False])
def test_responses_travel_whole_with_their_kept_sets(kept: bool) -> None:
    policy = Policy(tiny.make("llama-tied"), tiny.tokenizer())
    groups = [[r.rollout for r in group.responses] for group in tiny.groups(policy, kept=kept)]
    assert all((rollout.kept is not None) == kept for rollout in itertools.chain(*groups))
    assert split_work._unpacked(split_work._packed(groups)) == [*itertools.chain(*groups)]
    assert split_work._unpacked(split_work._packed([])) == []  # of a rank that was dealt nothing


def make_batch(groups: int, samples: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    start_B = torch.randint(2, 9, (groups,), generator=generator).repeat_interleave(samples)
    length_B = torch.randint(1, 12, (groups * samples,), generator=generator)
    mask_BT = torch.arange(12) < length_B[:, None]
    return Batch(
        ids_BL=torch.zeros(len(start_B), 24, dtype=torch.long),
        start_B=start_B,
        mask_BT=mask_BT,
        old_logp_BT=torch.zeros(mask_BT.shape),
        reward_B=torch.zeros(len(start_B)),
        group_B=torch.arange(groups).repeat_interleave(samples),
    )


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("size", "tokens"), [(2, 40), (3, 1000), (8, 25)])
def test_micro_batches_are_dealt_evenly(size: int, tokens: int, packs: bool) -> None:
    batch = make_batch(6, 8)
    hands = [[i for i, _ in rank_micro_batches(batch, tokens, packs, World(rank, size))] for rank in range(size)]
    rows = [[int(i) for part in hand if part is not None for i in part] for hand in hands]
    assert sorted(itertools.chain(*rows)) == list(range(48))  # each row once
    assert len({len(hand) for hand in hands}) == 1  # all make as many passes
    longest = int(batch.lengths_B.max())
    loads = [int(batch.lengths_B[share].sum()) for share in rows]
    assert max(loads) - min(loads) <= 2 * longest
    for hand in hands:  # no pass is larger than it would be in one process
        for part in (part for part in hand if part is not None):
            cuts = list(micro_batches(batch.rows(part), tokens, packs))
            assert len(cuts) == 1


def test_fewer_rows_than_ranks() -> None:
    batch = make_batch(1, 2)
    hands = [rank_micro_batches(batch, 100, True, World(rank, 4)) for rank in range(4)]
    idle = [row for ((index, row),) in hands if index is None]
    assert len(idle) == 2
    for row in idle:
        assert len(row) == 1
        assert int(row.lengths_B) == int(batch.lengths_B.min())


def test_alone_nothing_is_exchanged() -> None:
    assert ALONE.gather(3) == [3]
    assert ALONE.from_rank0("x") == "x"
    x = torch.ones(2)
    ALONE.add(x)
    assert ALONE.cat(x) is x
    assert ALONE.norm(x[0]).item() == 1
    with joined("cpu") as world:
        assert world is ALONE


def launched(monkeypatch: pytest.MonkeyPatch, **env: str) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", **env}.items():
        monkeypatch.setenv(name, value)


def test_more_than_one_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, WORLD_SIZE="16", LOCAL_WORLD_SIZE="8")
    with pytest.raises(ValueError, match=r"one machine, not on 2.*docs/engines\.md"), joined("cpu"):
        pass


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_device("cpu", 1, 2) == torch.device("cpu")
    with pytest.raises(ValueError, match="device=cuda:3 with several processes: give cuda"):
        own_device("cuda:3", 0, 2)
    with pytest.raises(ValueError, match="device=cpu:0 with several processes: give cpu"):
        own_device("cpu:0", 0, 2)
    with pytest.raises(ValueError, match=r"^device 'foo' is not to be had: Expected one of [^\n]*$"):
        own_device("foo", 0, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device 'cuda' is not to be had: torch finds no GPU here"):
        own_device("cuda", 0, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("gpu", "cuda", "gpu:1"):
        with pytest.raises(ValueError, match=f"^device '{name}' is not to be had: torch finds no GPU"):
            pick_device(name)
    if not torch.backends.mps.is_available():
        with pytest.raises(ValueError, match=r"^device 'mps' is not to be had: torch finds no GPU here; [^\n]{,40}$"):
            pick_device("mps")
    assert pick_device("auto") == torch.device("cpu")
    assert (named_device("gpu"), named_device("gpu:1")) == (torch.device("cuda"), torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device("cuda", 1, 2) == own_device("gpu", 1, 2) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="8 processes and 2 GPUs: torchrun --nproc-per-node 2"):
        own_device("cuda", 0, 8)


def test_one_process_of_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    assert ranks.launched()
    with joined("cpu") as world:
        assert world is ALONE


def test_a_torch_without_distributed_can_import_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", None)
    spec = importlib.util.spec_from_file_location("rpg.distributed.ranks_again", ranks.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.ALONE.first


@pytest.mark.parametrize("rank", ["0", "1"])
def test_arguments_are_refused_by_one_rank(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, WORLD_SIZE="2", RANK=rank)
    waited: list[float] = []
    monkeypatch.setattr("rpg.cli.time.sleep", waited.append)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--optim.lr", "x"])
    told = "rpg train: argument --optim.lr: must be a number or auto; got 'x' (rpg train --help)\n"
    assert capsys.readouterr().err == (told if rank == "0" else "")
    assert bool(waited) == (rank == "1")  # torchrun would end the first before it has spoken


def test_what_one_rank_warns_of_is_told_by_the_first() -> None:
    shown: list[str] = []
    everybody: list[Any] = [(None, ["both"]), ("SIGINT", ["both", "few slots"]), (None, [])]
    run = SimpleNamespace(warnings=["both"], stop=Stop())
    run.world = SimpleNamespace(gather=lambda mine: [mine, *everybody[1:]])
    run.view = SimpleNamespace(message=lambda text, style: shown.append(f"{style}: {text}"))
    assert Trainer._told_to_stop(run)  # type: ignore[arg-type]
    assert shown == ["warning: rank 1: few slots"]
    assert (run.stop.by, run.warnings) == ("SIGINT", [])


def test_experts_that_are_modules_are_refused() -> None:
    model = tiny.make("llama")
    refuse_experts(model)
    mlp = model.model.layers[1].mlp
    mlp.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM keeps its experts as modules of their own \(mlp\.experts\)"
    ):
        refuse_experts(model)
    mlp.experts.requires_grad_(False)  # none has a gradient
    refuse_experts(model)
