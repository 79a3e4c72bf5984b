"""mean@k and unbiased pass@k on held-out problems, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..models.policy import Policy
from ..rewards.failing import FailureWatch, added
from ..rewards.scoring import Calls
from ..rollout import Rollout
from ..run.auto import settled
from ..run.config import Config
from ..run.seeds import stream
from ..tasks import Problem, load_task, load_tests
from .oom_retry import pick_layout
from .samples.collect import Sampler, encode_prompt
from .setup import check_fit, check_rewards, held_out, make_engine, make_scorer, pick_device, pick_dtype

Z = 1.959963984540054  # of a 95 % interval


def pass_at_k(solved: int, samples: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a solved one: 1 − C(n−c, k)/C(n, k)."""
    return 1.0 if samples - solved < k else 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


@dataclass(frozen=True)
class Estimate:
    mean: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Mean over problems and its 95 % interval (Wilson's, with the number of problems that their spread amounts to).

    The problems are the sample: k responses to one problem are not k problems. Where all agree, their number counts.
    """
    n = len(values)
    mean = sum(values) / n
    variance = sum((x - mean) ** 2 for x in values) / max(1, n - 1) / n
    size = n if variance <= 0 else max(n, mean * (1 - mean) / variance)
    centre = (mean + Z**2 / (2 * size)) / (1 + Z**2 / size)
    half = Z / (1 + Z**2 / size) * math.sqrt(max(0.0, mean * (1 - mean) / size + Z**2 / (4 * size**2)))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


@dataclass(frozen=True, repr=False)
class Evaluation:
    task: str
    problems: int
    k: int
    solved: list[int]  # responses to each problem that are right
    mean: Estimate
    passed: dict[int, Estimate]  # pass@k for k = 1, 2, 4, …
    by_level: dict[int, float]
    length: float
    truncated: float
    failures: dict[str, int]
    messages: list[str]  # of those failures, one line each
    calls: dict[str, Calls]  # of the reward functions, by name
    samples: list[dict[str, Any]]  # rows of samples.jsonl

    def __repr__(self) -> str:
        values = {f"mean@{self.k}": self.mean} | {f"pass@{self.k}": self.passed[max(self.passed)]}
        texts = (f"{name} {x.mean:.1%} [{x.low:.1%}, {x.high:.1%}]" for name, x in values.items())
        return f"Evaluation({self.task}, {self.problems} problems: {', '.join(texts)})"

    def metrics(self) -> dict[str, Any]:
        at = f"eval/{self.task}"
        metrics: dict[str, Any] = {
            f"{at}/mean@{self.k}": self.mean.mean,
            f"{at}/mean@{self.k}_low": self.mean.low,
            f"{at}/mean@{self.k}_high": self.mean.high,
        }
        metrics |= {f"{at}/pass@{k}": estimate.mean for k, estimate in self.passed.items()}
        if len(self.by_level) > 1:
            metrics |= {f"{at}/level{level}": mean for level, mean in self.by_level.items()}
        return metrics | {f"{at}/length": self.length, f"{at}/truncated": self.truncated, f"{at}/solved": self.solved}


def evaluate(sampler: Sampler, sets: Mapping[str, Sequence[Problem]], keep: int = 4) -> list[Evaluation]:
    """k responses to every problem of every set, all sampled at once. The samples of ``keep`` problems a set are kept.

    With the same random numbers every time: evaluations differ by the policy alone.
    """
    settings = sampler.config.eval
    prompts = [encode_prompt(sampler.policy, problem, sampler.config) for chosen in sets.values() for problem in chosen]
    seed = stream(0, "eval")
    rollouts = sampler.sample(prompts, settings.k, settings.temperature, seed, "evaluating", top_p=settings.top_p)
    evaluations, begin = [], 0
    for name, chosen in sets.items():
        sampler.context.stage(f"scoring {name}")
        evaluations.append(_judge(sampler, name, chosen, rollouts[begin : begin + len(chosen)], settings.k, keep))
        begin += len(chosen)
    return evaluations


def _judge(
    sampler: Sampler, name: str, problems: Sequence[Problem], rollouts: Sequence[Sequence[Rollout]], k: int, keep: int
) -> Evaluation:
    repeated = [problem for problem in problems for _ in range(k)]
    responses, scores = sampler.score(repeated, [rollout for group in rollouts for rollout in group])
    total = len(responses)
    solved = [sum(response.solved for response in responses[i : i + k]) for i in range(0, total, k)]
    levels: dict[int, list[float]] = {}
    for problem, number in zip(problems, solved, strict=True):
        levels.setdefault(problem.level, []).append(number / k)
    ks = sorted({1, k} | {2**i for i in range(20) if 2**i <= k})
    return Evaluation(
        task=name,
        problems=len(problems),
        k=k,
        solved=solved,
        mean=estimate([number / k for number in solved]),
        passed={n: estimate([pass_at_k(number, k, n) for number in solved]) for n in ks},
        by_level={level: sum(values) / len(values) for level, values in sorted(levels.items())},
        length=sum(len(response.rollout.tokens) for response in responses) / total,
        truncated=sum(not response.rollout.finished for response in responses) / total,
        failures=scores.failures,
        messages=scores.messages,
        calls=scores.calls,
        samples=[
            {"split": "eval", "task": name, **response.row(repeated[i], i // k)}
            for i, response in enumerate(responses[: keep * k])
        ],
    )


def evaluate_model(config: Config) -> list[Evaluation]:
    """``rpg eval``: a model on the held-out problems of a task."""
    config = settled(config)
    named = config.task
    check_rewards(config)
    if named.test is not None:
        task = load_tests(named.test, config.seed, named.prompt_key, named.answer_key)
    else:
        task = load_task(named.name, config.seed, None, named.prompt_key, named.answer_key, look=False)
    device = pick_device(config.device)
    policy = Policy.load(
        config.model, device=device, dtype=pick_dtype(config.dtype, device), options=config.model_options
    )
    engine = make_engine(policy, config, pick_layout(policy, config, held=False, trained=False))
    sets = held_out(task, config)
    engine.expect(max(check_fit(policy, problems, config) for problems in sets.values()))
    with make_scorer(config, task) as scorer:
        evaluations = evaluate(Sampler(policy, engine, scorer, config), sets)
    FailureWatch().note(added(one.calls for one in evaluations))
    return evaluations
