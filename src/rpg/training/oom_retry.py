"""How much is computed at a time, and what is done when that was too much: release, halve, recompute, try again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..costs.devices import host_memory
from ..costs.memory import Layout, available_bytes, can_recompute, choose, lay_out, smallest
from ..distributed.context import QUIET, RunContext
from ..distributed.ranks import ALONE, World
from ..models.policy import Policy
from ..run.config import Config
from .batch import Batch, micro_batches

Result = TypeVar("Result")

WHOLE = 2**62  # tokens of a micro-batch that is all of the optimiser step


class DoesNotFit(torch.OutOfMemoryError):
    """One sequence at a time, activations recomputed where they can be, and still out of memory."""

    def __init__(self) -> None:
        super().__init__(
            "the device is out of memory: a single sequence does not fit. Lower rollout.max_new_tokens or "
            "max_prompt_tokens, train an adapter (--peft.method lora), or take more GPUs"
        )


class OomRetry:
    """How much is computed at a time: ``tokens`` of a micro-batch, and whether activations are recomputed.

    Where the device runs out of memory, what was begun is done again: first with what ``release`` frees (the engine's
    caches), then with half the tokens, down to a single sequence, then with activations recomputed. The last two stay.
    None changes the gradient. Where weights are sharded it is an error at once: the other ranks are in the middle of an
    operation that this one has to take part in.
    """

    def __init__(
        self,
        tokens: int,
        recompute: bool = False,
        may_recompute: bool = False,
        release: Callable[[], None] | None = None,
        packs: bool = True,
        context: RunContext = QUIET,
    ):
        self.tokens, self.recompute, self.may_recompute = tokens, recompute, may_recompute
        self.release, self.packs, self.context = release, packs, context
        self.released = release is None  # has been tried in this run

    def run(
        self,
        batch: Batch,
        work: Callable[[int], Result],
        undo: Callable[[], None] = lambda: None,
        whole: bool = False,
    ) -> Result:
        """``work`` with the tokens of a micro-batch, until it fits. ``whole``: it cannot be cut."""
        while True:
            tokens = WHOLE if whole else self.tokens
            if self.context.world.sharded:
                return work(tokens)
            try:
                return work(tokens)
            except torch.OutOfMemoryError:
                pass  # go on outside: in here the traceback holds the tensors that have to go
            undo()
            self._shrink(batch, whole)

    def _shrink(self, batch: Batch, whole: bool) -> None:
        again, self.released = self.released, True
        if self.release is not None:
            self.release()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not again:
            return
        before = self._passes(batch)
        if not whole and before < len(batch):
            while self._passes(batch) == before:  # a larger size than there is changes nothing
                self.tokens //= 2
            self.context.warn(f"out of memory: micro-batches of {self.tokens} tokens from here on")
        elif self.may_recompute and not self.recompute:
            self.recompute = True
            self.context.warn("out of memory: activations are recomputed from here on")
        else:
            raise DoesNotFit

    def _passes(self, batch: Batch) -> int:
        return len(micro_batches(batch, self.tokens, self.packs))

    def state(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "recompute": self.recompute, "released": self.released}

    def load(self, state: Mapping[str, Any]) -> None:
        self.tokens, self.recompute, self.released = state["tokens"], state["recompute"], state["released"]


def pick_layout(policy: Policy, config: Config, held: bool, trained: bool = True, world: World = ALONE) -> Layout:
    """What all ranks have room for. ``held``: a copy of the model will be."""
    available, host = available_bytes(policy.device), host_memory() // world.size
    return smallest(world.gather(lay_out(policy.model, config, available, held, trained, world, host)))


def make_oom_retry(
    policy: Policy,
    config: Config,
    held: bool = False,
    release: Callable[[], None] | None = None,
    context: RunContext = QUIET,
    layout: Layout | None = None,
) -> OomRetry:
    """As the settings say; what they leave open is chosen from the GPU's memory, the smallest of all ranks'.

    ``held``: a copy of the model will be, as reference; ``layout``: as it was picked, None: as it would be.
    """
    optim, world, able = config.optim, context.world, can_recompute(policy.model)
    if optim.recompute and not able:
        raise ValueError(f"optim.recompute: {type(policy.model).__name__} has no layers that can be recomputed")
    layout = pick_layout(policy, config, held, world=world) if layout is None else layout
    bytes_of_ranks = [number for number in world.gather(available_bytes(policy.device)) if number is not None]
    available = min(bytes_of_ranks, default=None)
    tokens, recompute = choose(policy.model, config, layout, available, held, not policy.apart, world)
    return OomRetry(tokens, recompute, optim.recompute is None and able, release, policy.packs, context)
