"""A model that answers: several responses to one question, with their rewards, or one of a conversation, streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..models.policy import Policy
from ..rollout import NativeEngine, Rollout, Sampling
from ..run.config import Config
from ..run.seeds import stream
from ..tasks import Problem
from ..training.samples.collect import encode_prompt
from ..training.setup import make_scorer, pick_device, pick_dtype
from .question import Question

LONGEST = 10**9  # tokens of a prompt: the model's context alone bounds it
SLOTS = 64
UNFINISHED = "\ufffd"  # what a tokenizer gives for the first bytes of a character


@dataclass(frozen=True)
class Sampled:
    """A response to a prompt of yours."""

    text: str
    logp: float  # of all of its tokens together, in what they were drawn from; of a greedy one, in the model
    tokens: int
    finished: bool  # ended by itself, not by the limit
    reward: float | None = None  # None where it cannot be known
    solved: bool | None = None


class Responder:
    """``config`` says the model, how prompts are put, and the distribution that is sampled from."""

    def __init__(self, config: Config, policy: Policy | None = None, *, temperature: float | None = None):
        self.config = replace(config, rollout=replace(config.rollout, max_prompt_tokens=LONGEST))
        device = pick_device(config.device)
        self.policy = policy or Policy.load(
            config.model, device=device, dtype=pick_dtype(config.dtype, device), options=config.model_options
        )
        self.temperature = config.rollout.temperature if temperature is None else temperature
        ends = self.policy.end_ids(config.rollout.end_tokens)
        self.engine = NativeEngine(self.policy.model, self.policy.tokenizer, SLOTS, graphs=False, end_ids=ends)

    def encode(self, problem: Problem, raw: bool = False) -> list[int]:
        """``raw``: the text as it is, in no template."""
        prompt = problem.prompt
        ids = self.policy.encode(prompt, chat=False) if raw else encode_prompt(self.policy, problem, self.config)
        if self.policy.unknown_ids.intersection(ids):
            raise ValueError(f"the model's tokenizer does not know all characters of the prompt {prompt[:60]!r}")
        return ids

    def _sampling(self, prompt: Sequence[int]) -> Sampling:
        """A response that the model has no room for is cut there."""
        rollout, context = self.config.rollout, self.policy.context
        room = rollout.max_new_tokens if context is None else min(rollout.max_new_tokens, context - len(prompt))
        if room < 1:
            raise ValueError(f"{len(prompt)} tokens do not fit into the {context} of the model: none is left to answer")
        return Sampling(room, self.temperature, rollout.top_p, rollout.top_k, rollout.min_p)

    def ask(self, question: Question, n: int = 4, seed: int = 0, *, raw: bool = False) -> list[Sampled]:
        """n responses, with rewards where the question has a judge: the task's reward, or that of the settings."""
        problem, judge = question.problem, question.judge
        ids = self.encode(problem, raw)
        how = self._sampling(ids)
        truncation: dict[str, Any] = {"top_p": how.top_p, "top_k": how.top_k, "min_p": how.min_p}
        drawn = stream(seed, "responses")
        (rollouts,) = self.engine.generate([ids], n, how.max_new_tokens, how.temperature, drawn, **truncation)
        texts = [self.policy.decode(rollout.tokens) for rollout in rollouts]
        judged: list[tuple[float | None, bool | None]] = [(None, None)] * len(texts)
        if judge is not None:
            with make_scorer(self.config, judge) as scorer:
                scores = scorer.score([(text, problem.answer, problem.prompt) for text in texts])
            judged = [*zip(scores.values, scores.solved, strict=True)]
        logps = [sum(rollout.logp) if how.temperature else self._logp(ids, rollout) for rollout in rollouts]
        return [
            Sampled(text, logp, len(rollout.tokens), rollout.finished, *verdict)
            for text, logp, rollout, verdict in zip(texts, logps, rollouts, judged, strict=True)
        ]

    @torch.no_grad()
    def _logp(self, prompt: Sequence[int], rollout: Rollout) -> float:
        """In the model itself."""
        device = self.policy.device
        ids, start = (
            torch.tensor([[*prompt, *rollout.tokens]], device=device),
            torch.tensor([len(prompt)], device=device),
        )
        mask = torch.ones(1, len(rollout.tokens), dtype=torch.bool, device=device)
        return float(self.policy.score(ids, start, mask).logp_BT.sum())

    def reply(self, prompt: Sequence[int], seed: int = 0, turn: int = 0) -> Iterator[str]:
        """The text of one response, as it grows."""
        pieces = Pieces(self.policy.decode)
        for token in self.engine.stream(prompt, self._sampling(prompt), stream(seed, "responses", turn)):
            if piece := pieces.add(token):
                yield piece
        yield pieces.rest()

    def encode_chat(self, said: Sequence[Mapping[str, str]]) -> list[int]:
        task = self.config.task
        return self.policy.encode_chat(said, task.system or None, task.chat_options)


class Pieces:
    """Tokens in, text out: the pieces joined are the text of all tokens. A character is given when it is whole.

    A token's text depends on the one before it: what is new is the difference between two decoded stretches.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self.decode = decode
        self.tokens: list[int] = []
        self.begin = self.given = 0  # decoding starts at the one; tokens before the other have been given

    def add(self, token: int) -> str:
        self.tokens.append(token)
        return self._new(lambda text: not text.endswith(UNFINISHED))

    def rest(self) -> str:
        return self._new(lambda text: True)

    def _new(self, whole: Callable[[str], bool]) -> str:
        before, now = self.decode(self.tokens[self.begin : self.given]), self.decode(self.tokens[self.begin :])
        if len(now) <= len(before) or not whole(now):
            return ""
        self.begin, self.given = self.given, len(self.tokens)
        return now[len(before) :]
