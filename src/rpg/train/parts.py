"""The parts of a run, made from its settings; a mistake in them is a ValueError of one line."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..algorithms import Algorithm, algorithm
from ..policy import Policy
from ..tasks import ENDLESS, Problem, Scorer, Task
from .config import Config
from .experience import encode_prompt


def make_scorer(config: Config, task: Task) -> Scorer:
    own = config.task
    scorer = Scorer(
        own.reward or task.reward,
        trusted=own.reward is None and task.trusted,
        workers=own.workers,
        timeout=own.timeout,
        on_error=own.on_error,
    )
    scorer.start()
    return scorer


def check_fit(policy: Policy, problems: Sequence[Problem], config: Config) -> None:
    """Prompts and responses have to fit into the model."""
    longest = max(len(encode_prompt(policy, problem, config)) for problem in problems)
    new, context = config.rollout.max_new_tokens, policy.context
    if context is not None and longest + new > context:
        raise ValueError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens={new} do not fit into the {context} of the model"
        )


def resolve(config: Config) -> Algorithm:
    """The preset with the run's options; Dr.GRPO's constant is the run's own longest response unless it is given."""
    try:
        chosen = algorithm(config.algorithm, **config.loss)
    except TypeError as error:  # a value of another type than the option's
        given = ", ".join(f"loss.{key}={value!r}" for key, value in config.loss.items())
        raise ValueError(f"{config.algorithm} cannot have {given}: {error}") from error
    if chosen.loss.reduction == "constant" and "constant" not in config.loss:
        chosen = algorithm(config.algorithm, **config.loss, constant=float(config.rollout.max_new_tokens))
    return chosen


def pick_device(name: str) -> torch.device:
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {name!r} is not to be had: {str(error).splitlines()[0]}") from error
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def held_out(task: Task, config: Config) -> list[Problem]:
    """The problems to evaluate on."""
    problems = list(task.test[: config.eval.problems])
    if not problems:
        raise ValueError(f"task {config.task.name!r} has no held-out problems: name some with --task.test")
    return problems


def check_train(policy: Policy, task: Task, config: Config) -> None:
    """The problems to train on, where they can all be looked at."""
    if not len(task.train):
        raise ValueError(f"task {config.task.name!r} has no problems to train on")
    check_fit(policy, task.train[:64] if len(task.train) >= ENDLESS else task.train, config)
