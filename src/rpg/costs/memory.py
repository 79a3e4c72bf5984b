"""What a run holds on its device, counted part by part, and how many tokens and slots that leaves memory for."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from ..distributed.ranks import ALONE, World
from ..models.adapters import adapted
from ..models.meta import Shell, shell
from ..run.config import Config
from ..run.teacher import naming, teacher_of

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
    from ..distributed.shards import layers_of

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


def teacher_shell(config: Config, dtype: torch.dtype) -> Shell:
    """The shape of ``reference.model``."""
    assert config.reference.model is not None
    path = teacher_of(config.reference.model)
    with naming(path):
        return shell(path, dtype, {})


def _bytes(parameters: list[tuple[int, int]]) -> int:
    return sum(n * size for n, size in parameters)


def _reference(weights: list[tuple[int, int]], trained: list[tuple[int, int]], adapter: bool, config: Config) -> int:
    """A copy of the weights; of an adapter's where there is one, and nothing where the initial model is meant, which is
    the model with its adapter off; the weights of a teacher, where there is one. See Reference."""
    if config.reference.model is not None:
        size = weights[0][1]
        return size * teacher_shell(config, torch.float32 if size == 4 else torch.bfloat16).parameters
    if adapter and config.reference.update in ("auto", "frozen"):
        return 0
    copied = trained if adapter else weights
    averages = sum(n * 4 for n, size in copied if size < 4) if config.reference.update == "ema" else 0
    return _bytes(copied) + averages


def slots_for(
    model: Any, config: Config, available: int | None, held: bool, trained: bool = True, world: World = ALONE
) -> int:
    """As the settings say, else as many as are worth it and fit; ``available`` None: on a CPU.

    Half of what weights and, where it is trained, optimiser and gradients leave goes to keys and values, half to
    activations. Where that is room for few, as with long responses, activations get no more than they need.
    """
    if config.rollout.slots is not None or available is None:
        return config.rollout.slots or CPU_SLOTS
    optim = config.optim
    recompute = can_recompute(model) if optim.recompute is None else optim.recompute
    memory = estimate(model, config, optim.micro_tokens or ENOUGH_TOKENS, recompute, held, logits=False, world=world)
    fixed = memory.total - memory.cache - memory.activations if trained else memory.weights
    each = max(1, memory.cache // MOST_SLOTS)
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
    model: Any, config: Config, available: int | None, reference: bool, logits: bool, world: World = ALONE
) -> tuple[int, bool]:
    """Tokens of a micro-batch, and whether activations are recomputed, where ``available`` bytes are there in all. As
    the settings say; None: on a CPU, whose memory is not planned.

    The largest power of two that fits; where that is below ENOUGH_TOKENS, what fits with recomputation.
    """
    optim = config.optim
    if available is None:
        return optim.micro_tokens or CPU_TOKENS, bool(optim.recompute)

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


def available_bytes(device: torch.device) -> int | None:
    """Of a GPU, to plan with: what is free and what this process has. None: a CPU."""
    if device.type != "cuda":
        return None
    return int(SHARE * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))
