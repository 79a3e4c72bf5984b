"""pass@k by brute force, the coverage of the intervals by simulation, and an evaluation with a known policy."""

import itertools
import math

import numpy as np
import pytest

from rpg.models.policy import Policy
from rpg.rollout import NativeEngine, Rollout
from rpg.run.auto import settled
from rpg.run.config import Config, EvalConfig
from rpg.tasks import Problem, Scorer, load_task
from rpg.training.evaluate import estimate, evaluate, pass_at_k
from rpg.training.samples.collect import Sampler

# ---- pass@k ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_solved_one(samples):
    for solved, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        row = [i < solved for i in range(samples)]
        subsets = list(itertools.combinations(row, k))
        assert pass_at_k(solved, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased():
    p, n = 0.15, 8
    for k in (1, 2, 4, 8):
        chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        expected = sum(w * pass_at_k(c, n, k) for c, w in enumerate(chance))
        assert expected == pytest.approx(1 - (1 - p) ** k)


# ---- intervals -------------------------------------------------------------------------------------------------------

SETTINGS = {
    "one chance, one sample": (lambda rng, n: np.full(n, 0.3), 1),
    "one chance, eight samples": (lambda rng, n: np.full(n, 0.3), 8),
    "easy": (lambda rng, n: np.full(n, 0.97), 8),
    "hard": (lambda rng, n: np.full(n, 0.01), 8),
    "problems differ": (lambda rng, n: rng.beta(0.5, 0.5, n), 8),
    "solved always or never": (lambda rng, n: (rng.random(n) < 0.4).astype(float), 8),
    "nearly all solved": (lambda rng, n: np.where(rng.random(n) < 0.97, 1.0, 0.2), 8),
}
TRUTH = {
    "one chance, one sample": 0.3,
    "one chance, eight samples": 0.3,
    "easy": 0.97,
    "hard": 0.01,
    "problems differ": 0.5,
    "solved always or never": 0.4,
    "nearly all solved": 0.97 + 0.03 * 0.2,
}


@pytest.mark.parametrize("n", [32, 128])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_interval_covers_the_truth(setting, n):
    """95 % nominally; problems are drawn anew each time, as they are what an evaluation generalises over."""
    chances, k = SETTINGS[setting]
    rng = np.random.default_rng(n)
    runs = 1000
    covered = 0
    for _ in range(runs):
        found = estimate((rng.binomial(k, chances(rng, n)) / k).tolist())
        assert 0 <= found.low <= found.mean <= found.high <= 1
        covered += found.low <= TRUTH[setting] <= found.high
    assert covered / runs >= 0.92


def test_where_all_agree_the_interval_is_wilsons():
    z2 = 1.959963984540054**2
    for n in (1, 8, 128):
        every, none = estimate([1.0] * n), estimate([0.0] * n)
        assert (every.mean, every.high) == (1.0, pytest.approx(1.0))
        assert every.low == pytest.approx(n / (n + z2))
        assert (none.low, none.high) == (pytest.approx(0.0, abs=1e-12), pytest.approx(z2 / (n + z2)))


def test_the_interval_narrows_with_problems_and_not_with_copies_of_one_answer():
    wide, narrow = estimate([0.0, 1.0] * 8), estimate([0.0, 1.0] * 128)
    assert narrow.high - narrow.low < 0.35 * (wide.high - wide.low)
    steady = estimate([0.5, 0.375, 0.625] * 10)  # eight samples each, little spread between problems
    assert steady.high - steady.low < 0.5 * (estimate([0.0, 1.0] * 15).high - estimate([0.0, 1.0] * 15).low)


# ---- an evaluation ---------------------------------------------------------------------------------------------------


class Scripted:
    """An engine that solves problem i with its first solved[i] samples."""

    def __init__(self, policy, texts):
        self.policy, self.texts = policy, texts

    def generate(self, prompt_ids, n=1, max_new_tokens=256, temperature=1.0, seed=0, **how):
        self.seen = {"n": n, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, **how}
        return [
            [Rollout(ids := self.policy.encode(text), [0.0] * len(ids), text.startswith("answer")) for text in group]
            for group in self.texts
        ]


@pytest.fixture(scope="module")
def policy():
    return Policy.load("builtin")


def test_mean_pass_levels_lengths_and_samples(policy):
    k, solved, levels = 5, [5, 2, 0], [1, 1, 2]
    problems = [Problem(f"{i}+{i}\n", str(2 * i), level) for i, level in zip((1, 2, 3), levels, strict=True)]
    texts = [
        [f"answer {p.answer}" if j < c else "1 answer" for j in range(k)] for p, c in zip(problems, solved, strict=True)
    ]
    engine = Scripted(policy, texts)
    config = settled(Config(eval=EvalConfig(k=k, temperature=0.6, top_p=0.9)))
    with Scorer(load_task("arithmetic").reward, trusted=True) as scorer:
        (found,) = evaluate(Sampler(policy, engine, scorer, config), {"arithmetic": problems}, keep=2)
    metrics = found.metrics()
    assert metrics["eval/arithmetic/mean@5"] == pytest.approx(7 / 15)
    assert metrics["eval/arithmetic/mean@5_low"] < 7 / 15 < metrics["eval/arithmetic/mean@5_high"]
    for size in (1, 2, 4, 5):
        expected = np.mean([pass_at_k(c, k, size) for c in solved])
        assert metrics[f"eval/arithmetic/pass@{size}"] == pytest.approx(expected)
    assert "eval/arithmetic/pass@3" not in metrics
    assert metrics["eval/arithmetic/pass@1"] == pytest.approx(metrics["eval/arithmetic/mean@5"])
    assert metrics["eval/arithmetic/level1"] == pytest.approx(0.7)
    assert metrics["eval/arithmetic/level2"] == 0
    assert metrics["eval/arithmetic/length"] == 3
    assert metrics["eval/arithmetic/truncated"] == pytest.approx(8 / 15)
    assert engine.seen["n"] == 5
    assert (engine.seen["temperature"], engine.seen["top_p"]) == (0.6, 0.9)
    assert [(s["group"], s["reward"], s["finished"]) for s in found.samples] == [
        (i, float(j < solved[i]), j < solved[i]) for i in range(2) for j in range(k)
    ]
    assert found.samples[0] | {"step": 0} == {
        "step": 0,
        "split": "eval",
        "task": "arithmetic",
        "group": 0,
        "prompt": "1+1\n",
        "answer": "2",
        "level": 1,
        "response": "answer 2",
        "reward": 1.0,
        "solved": True,
        "length": 3,
        "finished": True,
    }


def test_two_evaluations_of_one_policy_are_the_same_whatever_the_run(policy):
    task = load_task("arithmetic")
    results = []
    with Scorer(task.reward, trusted=True) as scorer:
        for seed, slots in ((0, 64), (5, 7)):
            config = settled(Config(seed=seed, eval=EvalConfig(k=2)))
            engine = NativeEngine(policy.model, policy.tokenizer, slots)
            results += evaluate(Sampler(policy, engine, scorer, config), {"arithmetic": task.test[:12]})
    assert results[0].metrics() == results[1].metrics()
    assert results[0].samples == results[1].samples


def test_sets_are_sampled_at_once_and_judged_apart(policy):
    sets = {"easy": [Problem("1+1\n", "2"), Problem("1+2\n", "3")], "hard": [Problem("9+9\n", "18")]}
    texts = [["answer 2", "answer 2"], ["answer 3", "answer 4"], ["answer 1", "answer 18"]]
    with Scorer(load_task("arithmetic").reward, trusted=True) as scorer:
        engine = Scripted(policy, texts)
        easy, hard = evaluate(Sampler(policy, engine, scorer, settled(Config(eval=EvalConfig(k=2)))), sets)
    assert (easy.task, easy.problems, easy.mean.mean) == ("easy", 2, 0.75)
    assert (hard.task, hard.problems, hard.mean.mean) == ("hard", 1, 0.5)
    assert [s["answer"] for s in hard.samples] == ["18", "18"]
    assert {s["task"] for s in easy.samples} == {"easy"}
