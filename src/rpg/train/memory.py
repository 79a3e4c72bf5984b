"""What a run holds on its device, how many tokens go through it at a time, and what is done when that was too many."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

import torch

from ..models.adapters import adapted
from ..policy import Policy
from .batch import Batch, micro_batches
from .config import Config
from .ranks import ALONE, World

Result = TypeVar("Result")

CPU_TOKENS = 1024  # activations stay in the cache
CPU_SLOTS, MOST_SLOTS, SLOTS = 256, 1024, 64  # decoded at once; on a GPU a multiple of the last
MOST_TOKENS, ENOUGH_TOKENS, LEAST_TOKENS = 32768, 8192, 1024  # on a GPU; below enough, activations are recomputed
SHARE = 0.9  # of the device's memory that is planned for; the rest: workspaces, graphs, logits, fragments


@dataclass(frozen=True)
class Memory:
    """Bytes by part in the backward pass of a micro-batch, where they are most: an estimate, rather too high."""

    weights: int
    masters: int
    """float32, of weights in half precision"""
    moments: int
    """of the optimiser, two a weight"""
    gradients: int
    """the sums, and those of the micro-batch where they are in half precision"""
    reference: int
    """a second set of weights, or of the adapter's, if one is held; a moving average of half precision also in
    float32"""
    cache: int
    """keys and values of the engine, all slots full"""
    activations: int
    """what the backward pass needs of the forward pass"""

    @property
    def total(self) -> int:
        return int(sum(astuple(self)))


def estimate(
    model: Any,
    config: Config,
    micro_tokens: int,
    recompute: bool,
    reference: bool,
    logits: bool,
    world: World = ALONE,
) -> Memory:
    """``reference``: one is held; ``logits``: those of all tokens are, as the head is no part apart.

    Of a sharded run on one of its devices: a whole copy of the weights, for sampling, and a share of the rest.
    """
    whole = _estimate(model, config, micro_tokens, recompute, reference, logits)
    if not world.sharded:
        return whole
    gathered = 3 * _largest_group(model)  # in use, on its way, and its gradient on its way
    return replace(
        whole,
        weights=whole.weights + whole.weights // world.size + gathered,
        masters=whole.masters // world.size,
        moments=whole.moments // world.size,
        gradients=whole.gradients // world.size,
        reference=whole.reference // world.size,
    )


def _largest_group(model: Any) -> int:
    """Bytes of what a sharded model has whole at a time: a layer, or the embeddings and the head."""
    from .shards import layers_of

    layers = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers_of(model)]
    rest = sum(p.numel() * p.element_size() for p in model.parameters()) - sum(layers)
    return int(max([rest, *layers]))


def _estimate(model: Any, config: Config, micro_tokens: int, recompute: bool, reference: bool, logits: bool) -> Memory:
    weights = [(p.numel(), p.element_size()) for p in model.parameters()]
    trained = [(p.numel(), p.element_size()) for p in model.parameters() if p.requires_grad]
    size = weights[0][1]  # of the embedding, and of all that is not an adapter
    rollout, shape = config.rollout, Shape.of(model.config.get_text_config())
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    tokens = max(micro_tokens, longest)  # a sequence is not cut
    return Memory(
        weights=_bytes(weights),
        masters=sum(n * 4 for n, size in trained if size < 4),
        moments=2 * sum(n * max(size, 4) for n, size in trained),
        gradients=sum(n * (4 + size if size < 4 else size) for n, size in trained),
        reference=_reference(weights, trained, adapted(model), config) if reference else 0,
        cache=(rollout.slots or MOST_SLOTS) * longest * shape.layers * 2 * shape.key_width * size,
        activations=tokens * shape.activation_bytes(size, recompute, logits),
    )


def _bytes(parameters: list[tuple[int, int]]) -> int:
    return sum(n * size for n, size in parameters)


def _reference(weights: list[tuple[int, int]], trained: list[tuple[int, int]], adapter: bool, config: Config) -> int:
    """A copy of the weights; of an adapter's where there is one, and nothing where the initial model is meant, which is
    the model with its adapter off. See Reference."""
    if adapter and config.reference.update in ("auto", "frozen"):
        return 0
    copied = trained if adapter else weights
    averages = sum(n * 4 for n, size in copied if size < 4) if config.reference.update == "ema" else 0
    return _bytes(copied) + averages


def pick_slots(policy: Policy, config: Config, held: bool, trained: bool = True, world: World = ALONE) -> int:
    """As the settings say, else as many as are worth it and fit. ``held``: a copy of the model will be."""
    if config.rollout.slots is not None or policy.device.type != "cuda":
        return config.rollout.slots or CPU_SLOTS
    return min(world.gather(slots_for(policy.model, config, available_bytes(policy.device), held, trained, world)))


def slots_for(
    model: Any, config: Config, available: int, held: bool, trained: bool = True, world: World = ALONE
) -> int:
    """Half of what weights and, where it is trained, optimiser and gradients leave goes to keys and values, half to
    activations. Where that is room for few, as with long responses, activations get no more than they need."""
    optim = config.optim
    recompute = can_recompute(model) if optim.recompute is None else optim.recompute
    memory = estimate(model, config, optim.micro_tokens or ENOUGH_TOKENS, recompute, held, logits=False, world=world)
    fixed = memory.total - memory.cache - memory.activations if trained else memory.weights
    each = max(1, memory.cache // (config.rollout.slots or MOST_SLOTS))
    slots = max(0, available - fixed) // 2 // each
    if trained:
        slots = max(slots, min(SLOTS, (available - fixed - memory.activations) // each))
    return min(MOST_SLOTS, slots - slots % SLOTS if slots > SLOTS else max(1, slots))


@dataclass(frozen=True)
class Shape:
    """Of a decoder, as far as its memory goes."""

    layers: int
    hidden: int
    query_width: int  # heads × width of a head
    key_width: int
    ffn: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        ffn = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        if experts := getattr(config, "num_experts_per_tok", None):
            ffn = experts * (getattr(config, "moe_intermediate_size", None) or ffn)
        return cls(
            config.num_hidden_layers, config.hidden_size, heads * width, key_heads * width, ffn, config.vocab_size
        )

    def activation_bytes(self, size: int, recompute: bool, logits: bool) -> int:
        """For each token. A layer keeps, of ``size`` bytes an element,

        its two norms: the input in float32, the normalised one and the product with the weight;
        attention: queries, keys, values and the output;
        the feed-forward part: gate, up, the activation and the product.

        With recomputation a layer keeps its input. In either case the layer whose backward pass runs has all of it and
        the gradients too. Attention is taken to keep no scores, and fused kernels keep less than this.
        """
        norms = 2 * self.hidden * (4 + 2 * size)
        attention = 2 * (self.query_width + self.key_width) * size
        layer = norms + attention + 4 * self.ffn * size
        kept = self.layers * (self.hidden * size if recompute else layer)
        head = self.hidden * (2 * size + 4) + (self.vocabulary * (size + 12) if logits else 0)
        return kept + 2 * layer + head


def choose(
    model: Any, config: Config, available: int, reference: bool, logits: bool, world: World = ALONE
) -> tuple[int, bool]:
    """Tokens of a micro-batch, and whether activations are recomputed, where ``available`` bytes are there in all.

    The largest power of two that fits; where that is below ENOUGH_TOKENS, what fits with recomputation.
    """
    optim = config.optim

    def largest(recompute: bool) -> int:
        if optim.micro_tokens is not None:
            return optim.micro_tokens if fits(optim.micro_tokens, recompute) else 0
        tokens = MOST_TOKENS
        while tokens >= LEAST_TOKENS and not fits(tokens, recompute):
            tokens //= 2
        return tokens if tokens >= LEAST_TOKENS else 0

    def fits(tokens: int, recompute: bool) -> bool:
        return estimate(model, config, tokens, recompute, reference, logits, world).total <= available

    least = optim.micro_tokens or LEAST_TOKENS
    if optim.recompute is not None or not can_recompute(model):
        return largest(bool(optim.recompute)) or least, bool(optim.recompute)
    plain = largest(False)
    if plain >= min(ENOUGH_TOKENS, optim.micro_tokens or ENOUGH_TOKENS):
        return plain, False
    return largest(True) or least, True


def can_recompute(model: Any) -> bool:
    """Whether its layers are such that Policy.score can."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def available_bytes(device: torch.device) -> int:
    """Of a GPU, to plan with: what is free and what this process has."""
    return int(SHARE * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))


class Room:
    """How much is computed at a time: ``tokens`` of a micro-batch, and whether activations are recomputed.

    Where the device runs out of memory, what was begun is done again: the first time with what ``release`` frees (the
    engine's caches), after that with half the tokens, which stays. Neither changes the gradient. Where
    weights are sharded it is an error: the others are in the middle of an operation that this rank has to take part in.
    """

    def __init__(
        self,
        tokens: int,
        recompute: bool = False,
        may_recompute: bool = False,
        release: Callable[[], None] | None = None,
        warn: Callable[[str], None] = lambda text: None,
        packs: bool = True,
        world: World = ALONE,
    ):
        self.world = world
        self.tokens, self.recompute, self.may_recompute = tokens, recompute, may_recompute
        self.release, self.warn, self.packs = release, warn, packs
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
            if self.world.sharded:
                return work(self.tokens)
            try:
                return work(self.tokens)
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
        parts = self._parts(batch)
        if not whole and parts < len(batch):
            while self._parts(batch) == parts:  # a larger size than there is changes nothing
                self.tokens //= 2
            self.warn(f"out of memory: micro-batches of {self.tokens} tokens from here on")
        elif self.may_recompute and not self.recompute:
            self.recompute = True
            self.warn("out of memory: activations are recomputed from here on")
        else:
            raise torch.OutOfMemoryError("a single sequence does not fit")

    def _parts(self, batch: Batch) -> int:
        return len(list(micro_batches(batch, self.tokens, self.packs)))

    def state(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "recompute": self.recompute, "released": self.released}

    def load(self, state: Mapping[str, Any]) -> None:
        self.tokens, self.recompute, self.released = state["tokens"], state["recompute"], state["released"]


def make_room(
    policy: Policy,
    config: Config,
    reference: bool = False,
    release: Callable[[], None] | None = None,
    warn: Callable[[str], None] = lambda text: None,
    world: World = ALONE,
) -> Room:
    """As the settings say; what they leave open is chosen from the GPU's memory, the smallest of all ranks'."""
    slots = pick_slots(policy, config, reference, world=world)
    config = replace(config, rollout=replace(config.rollout, slots=slots))
    optim, able = config.optim, can_recompute(policy.model)
    if optim.recompute and not able:
        raise ValueError(f"optim.recompute: {type(policy.model).__name__} has no layers that can be recomputed")
    if policy.device.type == "cuda":
        available = min(world.gather(available_bytes(policy.device)))
        tokens, recompute = choose(policy.model, config, available, reference, logits=not policy.apart, world=world)
    else:
        tokens, recompute = optim.micro_tokens or CPU_TOKENS, bool(optim.recompute)
    return Room(tokens, recompute, optim.recompute is None and able, release, warn, policy.packs, world)
