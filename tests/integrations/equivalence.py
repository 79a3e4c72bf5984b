"""One batch for every engine, and what `rpg train` makes of it: the loss and the gradient that others must have too.

Nothing in it is on-policy: the responses were scored by ``theta0``, the weights that are trained are ``theta``, the
reference's are ``theta_ref``, and the sampler's own log-probabilities differ a little from all of them. The temperature
is not 1, prompts and responses have many lengths, and some responses were cut at the limit.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import tiny
from rpg.loss.methods import Method
from rpg.models.policy import Policy
from rpg.rollout import Rollout
from rpg.run.auto import settled
from rpg.run.config import Config, OptimConfig, ReferenceConfig, RolloutConfig, TaskConfig
from rpg.run.folder import RunFolder
from rpg.tasks import Problem
from rpg.training.batch import Batch, make_batch, with_advantages
from rpg.training.old_logp import with_logp
from rpg.training.optim import make_optimizer
from rpg.training.reference import batch_logp
from rpg.training.samples.collect import Group, Response
from rpg.training.setup import method_of
from rpg.training.update import Updater

GROUPS, SAMPLES = 4, 4  # 16 rows: on 2 processes, 4 micro-batches of 2 each
LONGEST = 12  # tokens of a response
TEMPERATURE = 0.8
TOLERANCE = 1e-6  # of a gradient's norm, in float32
OF_A_RESPONSE = 3 * TOLERANCE  # where it is weighed by a product over the response: float32's error adds up in it


@dataclass(frozen=True)
class Case:
    """A preset with options (as in a recipe's ``loss``), and the batch; the same for every preset."""

    name: str
    options: dict[str, object] = field(default_factory=dict)
    reference: str = "auto"  # reference.update: "frozen" gives any method a reference of its own
    old: str = "trainer"  # whose log-probabilities are old: the trainer's before the step, or the "sampler"'s own

    # ---- what every engine is given ------------------------------------------------------------------------------

    @cached_property
    def method(self) -> Method:
        return method_of(self.config)

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids, one prompt a group; tiny.text() of them is the text that the tokenizer turns into these."""
        g = torch.Generator().manual_seed(11)
        return [torch.randint(2, tiny.VOCABULARY, (length,), generator=g).tolist() for length in (3, 6, 1, 4)]

    @property
    def responses(self) -> list[list[int]]:
        """Token ids, GROUPS × SAMPLES in the order of groups. The end token (1) is the last, or the limit was met."""
        g = torch.Generator().manual_seed(12)
        lengths = [5, 12, 1, 8, 3, 7, 12, 2, 9, 4, 6, 10, 11, 2, 5, 8]
        drawn = [torch.randint(2, tiny.VOCABULARY, (length,), generator=g).tolist() for length in lengths]
        return [tokens if len(tokens) == LONGEST else [*tokens[:-1], 1] for tokens in drawn]

    @property
    def rewards(self) -> list[float]:
        """Unequal in every group, so that none is dropped; some negative, as TOPR wants."""
        return [1.0, 0.0, 0.0, 1.0, -0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, -1.0, 1.0]

    @property
    def greedy_rewards(self) -> list[float]:
        """Of the most probable response to each prompt, for ReMax."""
        return [0.0, 1.0, 0.0, 1.0]

    @cached_property
    def theta0(self) -> dict[str, Tensor]:
        """The weights that the responses were sampled with."""
        return _weights(tiny.make("llama", spread=0.08))

    @cached_property
    def theta(self) -> dict[str, Tensor]:
        """The weights that are trained."""
        return _moved(self.theta0, 0.15, 1)

    @cached_property
    def theta_ref(self) -> dict[str, Tensor]:
        """The reference's, where the method has one of its own (``has_reference``)."""
        return _moved(self.theta0, 0.2, 2)

    @cached_property
    def rollout_logp(self) -> list[list[float]]:
        """The sampler's own log-probabilities: near theta0's."""
        batch = make_batch(self._groups([[0.0] * len(r) for r in self.responses]), 0, torch.device("cpu"))
        logp_BT = batch_logp(self.policy(self.theta0), batch, 1024)
        noise_BT = 0.02 * torch.randn(logp_BT.shape, generator=torch.Generator().manual_seed(3))
        return [row[: len(r)].tolist() for row, r in zip(logp_BT + noise_BT, self.responses, strict=True)]

    @property
    def has_reference(self) -> bool:
        return self.method.anchor != "old"

    def model(self, weights: dict[str, Tensor]) -> torch.nn.Module:
        made = tiny.make("llama", spread=0.08)
        made.load_state_dict(weights)
        return made

    # ---- through `rpg train` -------------------------------------------------------------------------------------

    @cached_property
    def config(self) -> Config:
        config = Config(
            algorithm=self.name,
            loss=dict(self.options),
            rollout=RolloutConfig(
                prompts=GROUPS, samples=SAMPLES, max_new_tokens=LONGEST, temperature=TEMPERATURE, overlong_tokens=2
            ),
            optim=OptimConfig(minibatches=1, epochs=1, max_grad_norm=math.inf),
            reference=ReferenceConfig(update=self.reference),  # type: ignore[arg-type]
            task=TaskConfig(reward="own.py:score"),  # nobody knows where its rewards lie
            device="cpu",
            dtype="float32",
        )
        return settled(config)

    def policy(self, weights: dict[str, Tensor]) -> Policy:
        return Policy(self.model(weights), tiny.tokenizer(), TEMPERATURE)

    def _groups(self, logps: list[list[float]]) -> list[Group]:
        rows = [
            Response(Rollout(tokens, logp, tokens[-1] == 1), tiny.text(tokens), reward)
            for tokens, logp, reward in zip(self.responses, logps, self.rewards, strict=True)
        ]
        return [
            Group(Problem(tiny.text(prompt), ""), prompt, rows[i * SAMPLES : (i + 1) * SAMPLES], self.greedy_rewards[i])
            for i, prompt in enumerate(self.prompts)
        ]

    @cached_property
    def batch(self) -> Batch:
        """With old, reference and sampler log-probabilities and advantages, as `rpg train` makes it."""
        batch = make_batch(self._groups(self.rollout_logp), 0, torch.device("cpu"))
        old_BT = batch_logp(self.policy(self.theta0), batch, 1024) if self.old == "trainer" else None
        ref_BT = batch_logp(self.policy(self.theta_ref), batch, 1024) if self.has_reference else None
        batch = with_logp(batch, old_BT, ref_BT, self.method.needs_reference)
        return with_advantages(batch, self.method.advantage, self.greedy_rewards if self.method.needs_greedy else None)


def preset_case(name: str) -> Case:
    """A preset as published. MaxRL's rewards are of 0 … 1, to which those above are mapped."""
    return Case(name, {"advantage": {"reward_range": [-1.0, 1.0]}} if name == "maxrl" else {})


def through_rpg_train(case: Case, accumulation: int = 1) -> tuple[float, dict[str, Tensor]]:
    """The loss of one optimiser step over the whole batch, and its gradients by the parameters' names."""
    policy = case.policy(case.theta)
    tokens = 10**6 if accumulation == 1 else int(case.batch.lengths_B.sum()) // accumulation
    config = case.config
    optimizer = make_optimizer(policy.parameters(), config.optim)
    gradients: dict[str, Tensor] = {}

    def look(*_: object) -> float:
        for name, p in policy.parameters():
            gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        return 0.0

    optimizer.clip = look  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        updater = Updater(config, case.method, policy, optimizer, RunFolder(Path(folder)))
        accumulate = updater._accumulate
        updater._accumulate = lambda batch, means, _: accumulate(batch, means, tokens)  # type: ignore[method-assign]
        metrics = updater.update(case.batch, step=1)
    return metrics["loss"], gradients


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of two gradients, as a share of the expected one's norm."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    apart = sum(float((found[name].double() - g.double()).square().sum()) for name, g in expected.items())
    whole = sum(float(g.double().square().sum()) for g in expected.values())
    assert whole > 0, "a gradient of zero would prove nothing"
    return math.sqrt(apart / whole)


def same(
    found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], tolerance: float = TOLERANCE
) -> None:
    """The loss and the gradients. A loss that is a small sum of large terms is held to their size."""
    assert difference(found[1], expected[1]) <= tolerance
    assert abs(found[0] - expected[0]) <= tolerance * max(1.0, abs(expected[0]))


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def _moved(weights: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: x + share * x.std() * torch.randn(x.shape, generator=g) for name, x in weights.items()}
