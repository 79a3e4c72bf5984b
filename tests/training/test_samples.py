"""What a step trains on, where sampling runs ahead: which groups, which weights, what is dropped, what serves again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

import rpg
from rpg.loss.mismatch import TIS, Mismatch
from rpg.loss.objective import k3
from rpg.rollout import KeptIds, Rollout
from rpg.rollout.flight import Partial, Underway
from rpg.run.config import Config, OffPolicyConfig, OptimConfig, RolloutConfig
from rpg.tasks import Problem
from rpg.training.batch import make_batch
from rpg.training.old_logp import OldLogp
from rpg.training.progress import SamplingPosition
from rpg.training.samples import stored
from rpg.training.samples.choice import FLOOR, HALF_LIFE, PromptChoice
from rpg.training.samples.collect import Experience, Group, Response
from rpg.training.samples.replay import Replay
from rpg.training.samples.worth import SLOWEST, keep_pace, without, worth_of
from rpg.training.setup import about_sampler, check_ahead, method_of, warnings_about

SMALL = {
    "rollout": {"prompts": 6, "samples": 4, "max_new_tokens": 24, "slots": 16},
    "eval": {"problems": 4, "k": 2},
    "log": {"view": "none", "tensorboard": False, "report": False},
    "device": "cpu",
}


def group(number=0, step=1, uses=0, solved=(True, False), versions=None, kept=None, index=0):
    responses = [
        Response(Rollout([5 + i, 6, 1], [-1.0, -0.5 - i, -0.1], True, kept, versions), "text", float(s), solved=s)
        for i, s in enumerate(solved)
    ]
    return Group(Problem("1+1", "2"), [3, 4], responses, None, index, number, step, uses)


def train(tmp_path, name="run", **settings):
    merged = dict(SMALL)
    for key, value in settings.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return rpg.train(output=tmp_path / name, **merged)


# ---- ahead -----------------------------------------------------------------------------------------------------------


def test_every_group_is_trained_on_once_and_tokens_say_their_version(tmp_path, monkeypatch):
    """None is lost between steps, and a response that went on with new weights has tokens of both."""
    from rpg.training import loop

    trained, mixed = Counter(), 0
    make = loop.make_batch

    def spy(groups, *args):
        nonlocal mixed
        trained.update(g.number for g in groups)
        mixed += sum(len(set(r.rollout.versions)) > 1 for g in groups for r in g.responses)
        return make(groups, *args)

    monkeypatch.setattr(loop, "make_batch", spy)
    run = train(tmp_path, algorithm="grpo", steps=6, rollout={"ahead": 1.0}, eval={"every": 0})
    assert set(trained.values()) == {1}
    rows = run.metrics[1:]
    assert sum(trained.values()) == 6 * 6
    state = json.loads((run.checkpoint("last") / "trainer" / "state.json").read_text())
    held = {g["number"] for g in (*state["samples"]["ready"], *state["samples"]["under_way"])}
    assert not held & set(trained)
    assert held | set(trained) == set(range(state["cursor"]["number"]))
    assert mixed > 0
    assert rows[0]["lag/max"] == 0
    assert max(row["lag/max"] for row in rows) >= 1
    assert all(row["old_logp/recomputed"] == 0 for row in rows)
    assert all(row["groups/under_way"] <= 2 * 6 for row in rows)  # those of a step, and ahead times as many
    assert all(row["groups/ready"] <= 6 for row in rows)


def test_with_no_learning_rate_what_is_ahead_changes_no_ratio(tmp_path):
    """The policy never moves: whatever the lag, each token's ratio is 1, with keys computed anew or kept."""
    for cache in ("recomputed", "kept"):
        run = train(tmp_path, cache, steps=4, rollout={"ahead": 2.0, "cache": cache}, optim={"lr": 0.0})
        for row in run.metrics[1:]:
            assert row["ratio/max"] == pytest.approx(1, abs=1e-4)
            assert row["ess"] == pytest.approx(1, abs=1e-5)
        assert run.metrics[-1]["lag/max"] >= 1


def test_a_group_counts_by_what_its_tokens_were_drawn_with(tmp_path):
    """The first optimiser step of a stale batch has ratios that are not 1: they are those of the behaviour policy."""
    run = train(tmp_path, steps=5, rollout={"ahead": 1.0}, optim={"lr": 2e-3, "warmup": 0}, eval={"every": 0})
    assert all("mismatch/kl" not in row for row in run.metrics)
    assert any(row["ess"] < 0.999 and row["lag/mean"] > 0 for row in run.metrics[2:])


def test_the_rewards_of_a_slow_function_change_nothing(tmp_path, monkeypatch):
    """When they are looked at does not depend on how long they took."""
    (tmp_path / "fast.py").write_text("def score(response, answer, prompt):\n    return float(len(response) % 3)\n")
    slow = "import time\ndef score(response, answer, prompt):\n    time.sleep(0.002 * (len(response) % 7))\n"
    (tmp_path / "slow.py").write_text(slow + "    return float(len(response) % 3)\n")
    rows = []
    for name in ("fast", "slow"):
        run = train(tmp_path, name, steps=3, rollout={"ahead": 1.0}, task={"reward": f"{tmp_path}/{name}.py:score"})
        rows.append(
            [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in run.metrics]
        )
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("settings", "algorithm", "ranks", "says"),
    [
        ({"ahead": 1.0}, "grpo", 2, "torchrun"),
        ({"ahead": 1.0}, "remax", 1, "greedy"),
        ({"ahead": 1.0}, "gpg", 1, "min_signal 0"),
    ],
)
def test_what_cannot_run_ahead_is_refused(settings, algorithm, ranks, says):
    config = Config(algorithm=algorithm, rollout=RolloutConfig(**settings))
    with pytest.raises(ValueError, match=says):
        check_ahead(config, method_of(config), ranks)
    check_ahead(replace(config, rollout=RolloutConfig()), method_of(config), ranks)


@pytest.mark.parametrize("settings", [{"engine": "vllm"}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}])
def test_an_engine_that_cannot_stop_is_refused(settings):
    with pytest.raises(ValueError, match=r"rollout\.ahead needs"):
        Config(rollout=RolloutConfig(ahead=0.5, **settings))


def test_settings_without_effect_are_told():
    config = Config(rollout=RolloutConfig(cache="kept"), offpolicy=OffPolicyConfig(max_age=3, min_ess=0.5, max_kl=0.1))
    told = " ".join(warnings_about(method_of(config), config))
    for name in ("rollout.cache=kept", "offpolicy.max_age=3", "offpolicy.min_ess=0.5", "offpolicy.max_kl=0.1"):
        assert f"{name} has no effect" in told
    stale = replace(config, rollout=RolloutConfig(cache="kept", ahead=1.0), offpolicy=OffPolicyConfig(min_ess=0.5))
    assert "no effect" not in " ".join(warnings_about(method_of(stale), stale))


@pytest.mark.parametrize("name", ["reinforce", "rloo", "gpg"])
def test_a_method_without_a_ratio_has_the_weight_of_old_over_behaviour(name):
    """Its own gradient has none, so what is stale would bias it; the run is told, and told if it is turned off."""
    for settings in ({"rollout": RolloutConfig(ahead=1.0, min_signal=0.0)}, {"offpolicy": OffPolicyConfig(reuse=2)}):
        config = Config(algorithm=name, **settings)
        method = method_of(config)
        assert method.loss.mismatch == Mismatch()
        assert OldLogp(config, method.loss, torch.float32).recompute
        assert "exact weight" in " ".join(about_sampler(method, config))
        assert "unbiased" in " ".join(warnings_about(method, config))
        off = replace(config, loss={"mismatch": "none"})
        assert method_of(off).loss.mismatch is None
        assert "no weight corrects" in " ".join(about_sampler(method_of(off), off))
    fresh = Config(algorithm=name)
    assert method_of(fresh).loss.mismatch is None
    assert "on-policy" in " ".join(warnings_about(method_of(fresh), fresh))
    with_ratios = Config(algorithm="grpo", rollout=RolloutConfig(ahead=1.0))
    assert not list(about_sampler(method_of(with_ratios), with_ratios))


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.ahead must be .*at most 100"):
        Config(rollout=RolloutConfig(ahead=1000.0))
    with pytest.raises(ValueError, match=r"needs rollout\.samples of at least 2"):
        Config(rollout=RolloutConfig(choose="signal", samples=1))


def test_a_run_whose_groups_are_all_dropped_says_so(tmp_path):
    run = train(
        tmp_path,
        algorithm="grpo",
        steps=12,
        rollout={"ahead": 2.0},
        offpolicy={"max_kl": 1e-30},
        optim={"lr": 2e-3, "warmup": 0},
        eval={"every": 0},
    )
    assert run.summary["step"] < 12
    assert "dropped" in run.summary["message"]
    assert "unequal" not in run.summary["message"]
    assert "right and wrong" not in run.summary["message"]


# ---- which policy is which -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["token", "sequence-mean"])
def test_old_is_the_behaviour_policy_where_samples_may_be_stale(dtype, level):
    loss = rpg.algorithm("grpo", level=level).loss
    for settings in ({"rollout": RolloutConfig(ahead=1.0)}, {"offpolicy": OffPolicyConfig(reuse=2)}):
        assert not OldLogp(Config(**settings), loss, dtype).recompute


def test_recomputed_old_has_the_weight_of_old_over_behaviour():
    """Exact unless the run says otherwise, which it is told."""
    config = Config(rollout=RolloutConfig(ahead=1.0, old_logp="recompute"))
    rules = {None: Mismatch(), "exact": Mismatch(), "tis": TIS(), "none": None}
    for rule, expected in rules.items():
        settings = config if rule is None else replace(config, loss={"mismatch": rule})
        method = method_of(settings)
        assert method.loss.mismatch == expected
        assert OldLogp(settings, method.loss, torch.float32).recompute
        told = " ".join(about_sampler(method, settings))
        assert ("exact weight" in told) == (rule is None)
        assert ("no weight corrects" in told) == (rule == "none")
    assert method_of(replace(config, rollout=RolloutConfig(ahead=1.0))).loss.mismatch is None


# ---- worth -----------------------------------------------------------------------------------------------------------


def test_worth_is_the_effective_sample_size_and_the_kl_of_each_group():
    batch = make_batch([group(0), group(1, solved=(True, False, True))], 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    now_BT = batch.old_logp_BT + 0.7 * torch.randn(batch.old_logp_BT.shape, generator=generator)
    found = worth_of(batch, batch.old_logp_BT, now_BT, "token", 20.0)
    by_response = worth_of(batch, batch.old_logp_BT, now_BT, "sequence", 20.0)
    for k, rows in enumerate((slice(0, 2), slice(2, 5))):
        log_w = (now_BT - batch.old_logp_BT)[rows].double()
        w, whole = log_w.exp().flatten(), log_w.sum(-1).exp()
        assert float(found.ess_K[k]) == pytest.approx(float(w.sum() ** 2 / (len(w) * (w * w).sum())))
        assert float(by_response.ess_K[k]) == pytest.approx(float(whole.sum() ** 2 / (len(whole) * (whole**2).sum())))
        assert float(found.kl_K[k]) == pytest.approx(float(k3(log_w).mean()))
    middle = float(found.ess_K.mean())
    assert found.enough(OffPolicyConfig(min_ess=middle)).sum() == 1
    assert found.enough(OffPolicyConfig(max_kl=float(found.kl_K.mean()))).sum() == 1
    assert found.enough(OffPolicyConfig()).all()


def test_a_batch_without_some_groups_is_that_of_the_others():
    groups = [group(0), group(1, solved=(True, False, True)), group(2)]
    batch = make_batch(groups, 0, torch.device("cpu"))
    now_BT = torch.arange(float(batch.mask_BT.numel())).view(batch.mask_BT.shape)
    kept, (rows, nothing) = without(batch, [now_BT, None], torch.tensor([True, False, True]))
    expected = make_batch([groups[0], groups[2]], 0, torch.device("cpu"))
    for name in ("ids_BL", "mask_BT", "old_logp_BT", "reward_B", "group_B", "start_B"):
        assert torch.equal(getattr(kept, name), getattr(expected, name)), name
    assert torch.equal(rows, now_BT[[0, 1, 5, 6]])
    assert nothing is None


def test_sampling_is_paced_where_too_much_is_dropped():
    position = SamplingPosition()
    keep_pace(position, 1, 20)
    assert position.pace == 1.0
    for _ in range(9):
        keep_pace(position, 5, 20)
    assert position.pace == SLOWEST
    for _ in range(12):
        keep_pace(position, 0, 20)
    assert position.pace == 1.0


def test_groups_that_the_policy_has_left_are_dropped_and_counted(tmp_path):
    run = train(
        tmp_path,
        algorithm="grpo",
        steps=5,
        rollout={"ahead": 2.0},
        optim={"lr": 2e-3, "warmup": 0},
        offpolicy={"min_ess": 0.97},
        eval={"every": 0},
    )
    rows = run.metrics[1:]
    assert sum(row["worth/dropped"] for row in rows) > 0
    assert min(row["worth/pace"] for row in rows) < 1
    assert all(row["groups/kept"] + row["worth/dropped"] == 6 for row in rows)
    assert all(row["worth/ess_min"] <= row["worth/ess"] <= 1 + 1e-9 for row in rows if "worth/ess" in row)


# ---- groups that serve again -----------------------------------------------------------------------------------------


def experience(groups):
    return Experience(list(groups), list(groups), 1, {}, [], {})


def test_a_group_serves_so_often_and_so_long_and_no_more():
    replay, made, served = Replay(OffPolicyConfig(reuse=3, max_age=4), prompts=6), 0, Counter()
    for step in range(1, 20):
        fresh = replay.fresh(step)
        new = [group(made + i, step) for i in range(fresh)]
        made += fresh
        joined = replay.join(experience(new), step)
        assert len(joined.groups) == 6
        assert len({g.number for g in joined.groups}) == 6
        assert all(step - g.step <= 4 for g in joined.groups)
        served.update(g.number for g in joined.groups)
        replay.served(joined.groups, [])
        if step > 4:
            assert fresh == 2
    assert max(served.values()) == 3
    assert sum(served[i] == 3 for i in range(made - 20)) > 0.8 * (made - 20)


def test_what_is_too_old_or_was_dropped_is_gone():
    replay = Replay(OffPolicyConfig(reuse=2, max_age=2), prompts=4)
    groups = [group(i, 1) for i in range(4)]
    replay.served(groups, [])
    assert replay.fresh(2) == 2
    replay.served([], groups[:3])
    assert [g.number for g in replay.groups] == [3]
    assert replay.fresh(4) == 4
    assert replay.groups == []
    twice = Replay(OffPolicyConfig(reuse=2), prompts=4)
    twice.served(groups, [])
    assert [g.uses for g in twice.groups] == [1] * 4
    twice.served(twice.groups, [])
    assert twice.groups == []  # however few new ones a step has
    once = Replay(OffPolicyConfig(), prompts=4)
    once.served(groups, [])
    assert once.groups == []


def test_a_reuse_is_in_the_metrics_and_costs_no_sampling(tmp_path):
    plain, again = (
        train(tmp_path, f"reuse{n}", algorithm="grpo", steps=5, offpolicy={"reuse": n}, eval={"every": 0})
        for n in (1, 2)
    )
    assert again.metrics[-1]["tokens_total"] < 0.75 * plain.metrics[-1]["tokens_total"]
    assert [row["replay/groups"] for row in again.metrics[1:]] == [0, 3, 3, 3, 3]
    assert all(row["groups/kept"] == 6 and row["groups/sampled"] == 3 for row in again.metrics[2:])
    assert again.metrics[-1]["replay/age"] >= 1
    assert "replay/groups" not in plain.metrics[-1]


# ---- prompts worth sampling ------------------------------------------------------------------------------------------


PROBLEM = Problem("1+1", "2")


def choice(samples=8, again=True):
    return PromptChoice(SamplingPosition(), 0, samples, again)


def test_the_chance_of_a_signal_is_that_of_the_beta_distribution():
    made = choice(samples=4)
    made.note([group(solved=(True, True, True, False), index=7)], 1)
    rates = torch.distributions.Beta(torch.tensor(3.5).double(), torch.tensor(1.5).double()).sample((400_000,))
    expected = float((1 - rates**4 - (1 - rates) ** 4).mean())
    assert made.signal("7", 1) == pytest.approx(expected, abs=0.005)


def test_what_is_solved_always_or_never_is_sampled_rarely_and_never_not_at_all():
    made = choice()
    for solved in (True, False):
        index = int(solved)
        for step in range(1, 6):
            made.note([group(solved=[solved] * 8, index=index)], step)
        taken = sum(made.takes(place, index, PROBLEM, 5) for place in range(4000)) / 4000
        assert FLOOR - 0.02 < taken < 0.35
    made.note([group(solved=[True, False] * 4, index=2)], 5)
    assert all(made.takes(place, 2, PROBLEM, 5) for place in range(200))
    assert all(made.takes(place, 3, PROBLEM, 5) for place in range(200))  # not seen yet
    assert all(choice(samples=2).takes(place, 3, PROBLEM, 5) for place in range(200))  # of two responses neither


def test_the_record_fades():
    made = choice()
    made.note([group(solved=[True] * 8, index=0)], 1)
    soon, later = made.signal("0", 2), made.signal("0", 1 + 6 * HALF_LIFE)
    assert soon < 0.5 * later
    assert later == pytest.approx(made.signal("unseen", 1), rel=0.1)


def test_problems_that_never_come_again_are_known_by_the_signal_of_their_level():
    made = choice(again=False)
    easy = Group(Problem("1", "1", level=1), [3], group(solved=[True] * 8).responses, index=0)
    for step in range(1, 6):
        made.note([easy], step)
    assert set(made.position.record) == {"level 1"}
    assert made.signal("level 1", 5) < made.signal("level 2", 5)
    mixed = replace(easy, responses=group(solved=[True, False] * 4).responses, problem=replace(easy.problem, level=3))
    for step in range(1, 5):
        made.note([mixed, replace(easy, problem=mixed.problem)], step)
    assert made.signal("level 3", 4) == pytest.approx(0.5)  # of half of its groups, whatever the solve rate


def test_prompts_are_chosen_and_the_record_is_in_the_checkpoint(tmp_path):
    rows = [{"prompt": f"{a}+{a}\n", "answer": 2 * a if a % 2 else "none"} for a in range(1, 25)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train(
        tmp_path, algorithm="dapo", steps=6, task={"name": f"{tmp_path}/data.jsonl"}, rollout={"choose": "signal"}
    )
    state = json.loads((run.checkpoint("last") / "trainer" / "state.json").read_text())
    assert state["cursor"]["record"]
    assert all(key.isdigit() for key in state["cursor"]["record"])
    assert run.metrics[-1]["groups/sampled_for_one"] >= 1 or run.metrics[-1]["groups/kept"] == 0


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_groups_and_responses_under_way_come_back_as_they_were():
    kept = KeptIds(torch.arange(5).int().numpy(), torch.tensor([2, 1, 2]).int().numpy())
    groups = [group(3, 2, 1, versions=[0, 0, 1], index=1), group(4, 2, kept=kept, index=0), group(5, 2)]
    task = type("T", (), {"train": [groups[0].problem] * 2})
    values, tensors = stored.write_groups("ready", groups)
    back = stored.read_groups("ready", json.loads(json.dumps(values)), tensors, task)
    assert back == groups
    parts = [
        Partial([4, 5], [-0.1, -1 / 3], [1, 2], cache=[torch.rand(2, 3)]),
        Partial(),
        Partial([1], [-2.0], [0], True, True),
    ]
    under_way = [Underway(9, [3, 3, 4], 2**63 + 5, parts, [torch.rand(1)])]
    values, tensors = stored.write_underway("under_way", under_way)
    (found,) = stored.read_underway("under_way", json.loads(json.dumps(values)), tensors)
    assert (found.number, found.prompt, found.seed) == (9, [3, 3, 4], 2**63 + 5)
    for one, other in zip(found.parts, parts, strict=True):
        assert (one.tokens, one.logp, one.versions) == (other.tokens, other.logp, other.versions)
        assert (one.ended, one.over) == (other.ended, other.over)
        assert all(torch.equal(a, b) for a, b in zip(one.cache, other.cache, strict=True))
    assert torch.equal(found.cache[0], under_way[0].cache[0])


def test_settings_of_a_step_are_checked():
    for settings in ({"reuse": 0}, {"min_ess": 1.5}, {"max_kl": 0.0}, {"max_age": 0}):
        with pytest.raises(ValueError, match="offpolicy"):
            Config(offpolicy=OffPolicyConfig(**settings), optim=OptimConfig())
