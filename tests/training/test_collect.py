"""Groups that are worth training on, and steps that came out short of them."""

from dataclasses import replace

import pytest
import torch

import rpg
import tiny
from rpg.models.policy import Policy
from rpg.rollout import Rollout
from rpg.run.auto import settled
from rpg.run.config import Config, OptimConfig, RolloutConfig, TaskConfig
from rpg.run.folder import RunFolder
from rpg.tasks import Problem, Scores
from rpg.training.batch import make_batch, with_advantages
from rpg.training.old_logp import with_logp
from rpg.training.optim import make_optimizer
from rpg.training.progress import SamplingPosition
from rpg.training.samples.collect import Collector, Experience, Group, Response, signal_of
from rpg.training.setup import method_of, rewards_of, warnings_about
from rpg.training.update import Updater


def group(scores, penalties=None, solved=None, parts=None, source=""):
    penalties, solved = penalties or [0.0] * len(scores), solved or [score > 0.5 for score in scores]
    responses = [
        Response(Rollout([5, 6], [-1.0, -2.0], True), "text", score, penalties[i], solved[i], parts[i] if parts else {})
        for i, score in enumerate(scores)
    ]
    return Group(Problem("1+1", "2", source=source), [3], responses)


def test_a_penalty_on_length_alone_is_no_signal():
    assert group([0.0, 1.0]).informative()
    assert not group([0.0, 0.0], [0.0, -0.5]).informative()
    assert not group([1.0, 1.0], [0.0, -0.5]).informative()
    assert group([0.2, 0.4]).informative()


def test_format_alone_is_no_signal_where_the_task_says_what_is_correct():
    formatted = group([0.0, 0.2, 0.0], solved=[False, False, False])
    assert formatted.informative("reward")
    assert not formatted.informative("correct")
    assert not group([1.0, 1.2], solved=[True, True]).informative("correct")
    assert group([0.2, 1.0], solved=[False, True]).informative("correct")


@pytest.mark.parametrize(
    ("task", "by", "signal"),
    [
        ({}, "auto", "correct"),
        ({"name": "gym:chain_sum"}, "auto", "correct"),
        ({"rewards": {"correct": 1.0, "format": 0.2}}, "auto", "correct"),
        ({"rewards": {"correct": 1.0, "mine.py:style": 0.2}}, "auto", "correct"),
        ({"rewards": {"format": 1.0}}, "auto", "reward"),
        ({"reward": "mine.py:score"}, "auto", "reward"),
        ({"name": "mine.py:make"}, "auto", "reward"),
        ({"name": "0.5*gsm8k + 0.5*mine.py:make"}, "auto", "reward"),
        ({"name": "mine.py:make", "rewards": {"correct": 1.0}}, "auto", "correct"),
        ({"rewards": {"correct": 1.0, "format": 0.2}}, "reward", "reward"),
        ({"reward": "mine.py:score"}, "correct", "correct"),
    ],
)
def test_what_tells_groups_with_signal(task, by, signal):
    assert signal_of(Config(task=TaskConfig(**task), rollout=RolloutConfig(dynamic_by=by))) == signal


@pytest.mark.parametrize(
    ("task", "known"),
    [
        ({}, (0, 1)),
        ({"rewards": {"correct": 2.0}}, (0, 2)),
        ({"rewards": {"correct": 1.0, "format": -0.5}}, (-0.5, 1)),
        ({"rewards": {"format": 1.0}, "name": "mine.py:make"}, (0, 1)),
        ({"rewards": {"correct": 1.0, "mine.py:style": 0.2}}, None),
        ({"reward": "mine.py:score"}, None),
        ({"name": "mine.py:make"}, None),
    ],
)
def test_where_rewards_lie(task, known):
    assert rewards_of(Config(task=TaskConfig(**task))) == known


class Fixed(Collector):
    """Groups by rounds: the number of each round's that have signal."""

    def __init__(self, config, method, rounds):
        self.config, self.method, self.rounds, self.asked = config, method, rounds, []
        self.position, self.signal = SamplingPosition(), signal_of(config)

    def _sample(self, count, seed, seconds):
        self.asked.append(count)
        with_signal = self.rounds[len(self.asked) - 1]
        return [group([0.0, float(i < with_signal)]) for i in range(count)], Scores([], {}, [], [])


@pytest.mark.parametrize(
    ("share", "rounds", "asked", "with_signal"),
    [
        (None, [1], [4], 1),
        (0.0, [0], [4], 0),
        (0.5, [2], [4], 2),
        (0.5, [1, 1], [4, 2], 2),
        (0.5, [1, 2], [4, 2], 3),
        (0.5, [0, 0, 0], [4, 3, 3], 0),  # max_rounds
        (1.0, [1, 4], [4, 4], 4),
    ],
)
def test_more_is_sampled_while_too_few_groups_have_signal(share, rounds, asked, with_signal):
    """GPG: those with signal first, the rest of the step's groups are those without."""
    config = Config(rollout=RolloutConfig(prompts=4, samples=2, max_rounds=3, min_signal=share))
    method = rpg.algorithm("reinforce").resolve(min_signal=share)
    collector = Fixed(config, method, rounds)
    found = collector.collect(1)
    assert collector.asked == asked
    assert len(found.groups) == 4
    assert sum(g.informative() for g in found.groups) == with_signal
    assert len(found.sampled) == sum(asked)


def test_metrics_and_samples_of_a_step():
    kept, dropped = group([0.0, 1.0], [0.0, -0.25]), group([1.0, 1.0])
    found = Experience([kept], [kept, dropped], 1, {"raised": 1, "timed_out": 0, "not_finite": 2}, [], {})
    metrics = found.metrics()
    assert metrics["reward/mean"] == pytest.approx(2.75 / 4)
    assert metrics["reward/solved"] == 0.75
    assert metrics["reward/overlong"] == -0.0625
    assert metrics["reward/failed"] == 3
    assert (metrics["groups/kept"], metrics["groups/sampled"], metrics["groups/all_solved"]) == (1, 2, 0.5)
    assert metrics["tokens"] == 8
    rows = found.samples(1, [-0.5, 0.5])
    assert [(row["reward"], row["advantage"], row["group"]) for row in rows] == [(0.0, -0.5, 0), (0.75, 0.5, 0)]
    assert found.samples(0, None) == []


def test_solved_is_not_read_off_the_reward():
    bonus = group([0.7, 1.5], solved=[False, True])
    assert bonus.share_solved() == 0.5
    found = Experience([bonus], [bonus], 1, {}, [], {})
    assert found.metrics()["reward/solved"] == 0.5
    assert [row["solved"] for row in found.samples(1, None)] == [False, True]
    assert not any(key.startswith(("reward/part", "reward/solved/")) for key in found.metrics())


def test_metrics_of_parts_and_of_sources():
    one = group([0.5, 1.5], parts=[{"correct": 0.0, "format": 1.0}, {"correct": 1.0, "format": 1.0}], source="gsm8k")
    two = group([0.0, 0.5], parts=[{"correct": 0.0, "format": 0.0}, {"correct": 0.0, "format": 1.0}], source="math")
    two = replace(two, responses=[replace(r, solved=False) for r in two.responses])
    one = replace(one, responses=[replace(r, solved=r.parts["correct"] > 0) for r in one.responses])
    metrics = Experience([one], [one, two], 1, {}, [], {}).metrics()
    assert (metrics["reward/part/correct"], metrics["reward/part/format"]) == (0.25, 0.75)
    assert (metrics["reward/solved/gsm8k"], metrics["reward/solved/math"]) == (0.5, 0.0)
    assert metrics["reward/solved"] == 0.25
    alone = Experience([one], [one, one], 1, {}, [], {}).metrics()
    assert not any(key.startswith("reward/solved/") for key in alone)


@pytest.fixture(scope="module")
def policy():
    return Policy(tiny.make("llama"), tiny.tokenizer())


def updater(policy, algorithm, folder, prompts=3, **optim):
    config = settled(Config(rollout=RolloutConfig(prompts=prompts, samples=4), optim=OptimConfig(**optim)))
    return Updater(config, algorithm, policy, make_optimizer(policy.parameters(), config.optim), RunFolder(folder))


def data(policy, algorithm, **how):
    batch = with_logp(make_batch(tiny.groups(policy, **how), 0, policy.device), None, None, needs_reference=True)
    return with_advantages(batch, algorithm.advantage, [0.0] * 3)


@pytest.mark.parametrize(("prompts", "steps"), [(3, 4), (6, 2), (12, 1), (96, 1)])
def test_a_short_batch_is_not_stretched_over_all_optimiser_steps(prompts, steps, policy, tmp_path, monkeypatch):
    algorithm = rpg.algorithm("reinforce")
    run = updater(policy, algorithm, tmp_path, prompts, minibatches=4, lr=0.0)
    taken = []
    monkeypatch.setattr(run.optimizer, "step", lambda: taken.append(1))
    run.update(data(policy, algorithm), 1)
    assert len(taken) == steps  # of 12 responses


@pytest.mark.parametrize("name", ["topr", "gspo", "rpg-reinforce-urkl", "grpo"])
def test_metrics_do_not_depend_on_the_micro_batches(name, policy, tmp_path):
    algorithm, found = rpg.algorithm(name), []
    for tokens in (10**6, 30, 1):
        run = updater(policy, algorithm, tmp_path, minibatches=1, lr=0.0, micro_tokens=tokens)
        found.append(run.update(data(policy, algorithm), 1))
    assert found[0]["ess"] < 0.999
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_a_control_variate_sees_the_whole_optimiser_step(policy, tmp_path):
    algorithm = rpg.algorithm("rpg-reinforce-urkl", control_variate=True)
    gradients = []
    for tokens in (10**6, 20):
        run = updater(policy, algorithm, tmp_path, minibatches=1, micro_tokens=tokens)
        seen = []
        run.optimizer.clip = lambda *_: (seen.extend(p.grad.flatten() for _, p in policy.parameters()), 0.0)[1]
        run.optimizer.step = lambda: None
        run.update(data(policy, algorithm), 1)
        gradients.append(torch.cat(seen))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)


def test_what_is_allowed_but_seldom_meant_is_said():
    config = Config()
    assert list(warnings_about(rpg.algorithm("rpg-reinforce-urkl").resolve(), config)) == []
    assert "importance weights" in next(warnings_about(rpg.algorithm("remax").resolve(), config))
    once = replace(config, optim=replace(config.optim, minibatches=1))
    assert list(warnings_about(rpg.algorithm("remax").resolve(), once)) == []
    stale = replace(config, offpolicy=replace(config.offpolicy, reuse=2), algorithm="reinforce")
    assert "only the first of 4 optimiser steps on a batch is unbiased" in next(warnings_about(method_of(stale), stale))
    frozen = replace(config, reference=replace(config.reference, update="frozen"))
    assert "no KL term" in next(warnings_about(rpg.algorithm("dapo").resolve(), frozen))
    assert list(warnings_about(rpg.algorithm("grpo").resolve(), frozen)) == []
    assert list(warnings_about(rpg.algorithm("dapo").resolve(), replace(config, dtype="bfloat16"))) == []
