"""mean@k and unbiased pass@k on held-out problems, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..distributed.ranks import ALONE, World
from ..distributed.split_work import generate, score
from ..models.policy import Policy
from ..rollout import Engine, Rollout
from ..run.config import Config
from ..run.seeds import stream
from ..tasks import Problem, Scorer, load_task, load_tests
from .collect import encode_prompt
from .engines import make_engine
from .oom_retry import pick_slots
from .setup import check_fit, held_out, make_scorer, pick_device, pick_dtype

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


@dataclass(frozen=True)
class Evaluation:
    task: str
    problems: int
    k: int
    mean: Estimate
    passed: dict[int, Estimate]  # pass@k for k = 1, 2, 4, …
    by_level: dict[int, float]
    length: float
    truncated: float
    failures: dict[str, int]
    messages: list[str]  # of those failures, one line each
    samples: list[dict[str, Any]]  # rows of samples.jsonl

    def metrics(self) -> dict[str, float]:
        at = f"eval/{self.task}"
        found = {
            f"{at}/mean@{self.k}": self.mean.mean,
            f"{at}/mean@{self.k}_low": self.mean.low,
            f"{at}/mean@{self.k}_high": self.mean.high,
        }
        found |= {f"{at}/pass@{k}": estimate.mean for k, estimate in self.passed.items()}
        if len(self.by_level) > 1:
            found |= {f"{at}/level{level}": mean for level, mean in self.by_level.items()}
        return found | {f"{at}/length": self.length, f"{at}/truncated": self.truncated}


def evaluate(
    policy: Policy,
    engine: Engine,
    scorer: Scorer,
    sets: Mapping[str, Sequence[Problem]],
    config: Config,
    keep: int = 4,
    watch: Callable[[str], None] = lambda text: None,
    world: World = ALONE,
) -> list[Evaluation]:
    """k responses to every problem of every set, all sampled at once.

    With the same random numbers every time: evaluations differ by the policy alone.
    """
    how = config.eval
    problems = [problem for chosen in sets.values() for problem in chosen]
    total = len(problems) * how.k
    rollouts = generate(
        world,
        engine,
        [encode_prompt(policy, problem, config) for problem in problems],
        how.k,
        config.rollout.max_new_tokens,
        how.temperature,
        stream(0, "eval"),
        top_p=how.top_p,
        progress=lambda done: watch(f"evaluating {min(total, done * world.size)}/{total}"),
    )
    found, begin = [], 0
    for name, chosen in sets.items():
        watch(f"scoring {name}")
        found.append(_judge(policy, scorer, name, chosen, rollouts[begin : begin + len(chosen)], how.k, keep, world))
        begin += len(chosen)
    return found


def _judge(
    policy: Policy,
    scorer: Scorer,
    task: str,
    problems: Sequence[Problem],
    rollouts: Sequence[Sequence[Rollout]],
    k: int,
    keep: int,
    world: World,
) -> Evaluation:
    flat = [(problem, r) for problem, group in zip(problems, rollouts, strict=True) for r in group]
    texts, total = [policy.decode(r.tokens) for _, r in flat], len(flat)
    scores = score(world, scorer, [(text, p.answer, p.prompt) for (p, _), text in zip(flat, texts, strict=True)])
    counts = [sum(scores.solved[i : i + k]) for i in range(0, total, k)]
    levels: dict[int, list[float]] = {}
    for problem, count in zip(problems, counts, strict=True):
        levels.setdefault(problem.level, []).append(count / k)
    ks = sorted({1, k} | {2**i for i in range(20) if 2**i <= k})
    return Evaluation(
        task=task,
        problems=len(problems),
        k=k,
        mean=estimate([count / k for count in counts]),
        passed={n: estimate([pass_at_k(count, k, n) for count in counts]) for n in ks},
        by_level={level: sum(values) / len(values) for level, values in sorted(levels.items())},
        length=sum(len(r.tokens) for _, r in flat) / total,
        truncated=sum(not r.finished for _, r in flat) / total,
        failures=scores.failures,
        messages=scores.messages,
        samples=[
            {
                "split": "eval",
                "task": task,
                "group": i // k,
                "prompt": p.prompt,
                "answer": p.answer,
                "level": p.level,
                "response": texts[i],
                "reward": scores.values[i],
                "solved": scores.solved[i],
                "length": len(r.tokens),
                "finished": r.finished,
            }
            for i, (p, r) in enumerate(flat[: keep * k])
        ],
    )


def evaluate_model(config: Config) -> list[Evaluation]:
    """``rpg eval``: a model on the held-out problems of a task."""
    own = config.task
    if own.test is not None:
        task = load_tests(own.test, config.seed, own.prompt_key, own.answer_key)
    else:
        task = load_task(own.name, config.seed, None, own.prompt_key, own.answer_key, look=False)
    device = pick_device(config.device)
    policy = Policy.load(
        config.model, device=device, dtype=pick_dtype(config.dtype, device), options=config.model_options
    )
    engine = make_engine(policy, config, pick_slots(policy, config, held=False, trained=False))
    sets = held_out(task, config)
    engine.expect(max(check_fit(policy, problems, config) for problems in sets.values()))
    with make_scorer(config, task) as scorer:
        return evaluate(policy, engine, scorer, sets, config)
