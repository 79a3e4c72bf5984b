"""What a run holds on its device in each of its two phases, counted part by part, and what that leaves room for.

While responses are sampled there are no gradients and no activations; while the model is trained nobody reads the
engine's cache. With offload the optimiser's masters and moments are in host memory during the first phase and the cache
is given back before the second, so that each phase has the device for itself.

On a GPU the count is of layers that fuse (kernels/fused.py, kernels/merged.py). Others keep more than is planned for;
where that is more than there is, micro-batches are halved (training/oom_retry.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..distributed.ranks import ALONE, World
from ..kernels.decode import PAGE
from ..kernels.head_with_loss import block_bytes, rows_at_once
from ..loss.methods import algorithm
from ..models.adapters import adapted
from ..models.four_bits import largest_dense, packed_bytes
from ..models.meta import Shell, shell
from ..run.config import Config
from ..run.teacher import naming, teacher_of

CPU_TOKENS = 1024  # activations stay in the cache
CPU_SLOTS, MOST_SLOTS, SLOTS = 256, 1024, 64  # decoded at once; on a GPU a multiple of the last
MOST_TOKENS, ENOUGH_TOKENS, LEAST_TOKENS = 32768, 8192, 1024  # on a GPU; below enough, activations are recomputed
READ_TOKENS = 32768  # of prompts, in one pass of the engine, at most
MOST_MORE = 4  # prompts sampled in a call for one that is wanted, where groups without signal are replaced
SHARE = 0.9  # of the device's memory that is planned for; the rest: workspaces, graphs, logits, fragments
GPU_SHARE = "RPG_GPU_SHARE"  # in the environment: of a GPU's memory, for each of several runs on it (rpg study)
HOST_SHARE = 0.5  # of the host's memory that is taken for offload without being asked
WAITING_SHARE = 0.25  # of it, at most, for responses that wait for pages
WORTH = 1.5  # times the rows at a time, from which on offload is worth its transfers
PHASES = ("sampling", "training")
PARTS = ("weights", "masters", "moments", "gradients", "reference", "dense", "cache", "reading", "activations", "head")
ABSENT = {"sampling": ("gradients", "activations", "head"), "training": ("reading",)}
MOVED = {"sampling": ("masters", "moments"), "training": ("cache",)}  # with offload


@dataclass(frozen=True)
class Memory:
    """Bytes by part, each where it is most: an estimate, rather too high."""

    weights: int
    masters: int
    """float32, of weights in half precision"""
    moments: int
    """of the optimiser, two a weight"""
    gradients: int
    """the sums, and those of the micro-batch in half precision; on a GPU as far as they are more than the activations,
    which go as they come"""
    reference: int
    """a second set of weights, or of the adapter's, if one is held; a moving average of half precision also in
    float32"""
    cache: int
    """keys and values of the engine"""
    reading: int
    """what the engine needs to read prompts"""
    activations: int
    """what the backward pass needs of the forward pass of a micro-batch"""
    offload: bool = False
    dense: int = 0
    """the largest matrix of a model in 4 bits, while it is multiplied"""
    head: int = 0
    """a block of tokens over the whole vocabulary, on a GPU, as far as it is more than what a layer's backward pass
    takes, which comes after it"""

    def during(self, phase: str) -> dict[str, int]:
        """The parts that are on the device while responses are sampled, or while the model is trained."""
        away = ABSENT[phase] + (MOVED[phase] if self.offload else ())
        return {name: getattr(self, name) for name in PARTS if name not in away}

    @property
    def sampling(self) -> int:
        return sum(self.during("sampling").values())

    @property
    def training(self) -> int:
        return sum(self.during("training").values())

    @property
    def peak(self) -> int:
        return max(self.sampling, self.training)

    @property
    def moved(self) -> int:
        """What goes to host memory before responses are sampled, and comes back."""
        return self.masters + self.moments if self.offload else 0


@dataclass(frozen=True)
class Layout:
    """How sampling and training share the device."""

    slots: int
    """responses decoded at a time, at most"""
    cache_tokens: int | None = None
    """that the engine's cache holds in all; None: as many as the slots have at full length"""
    offload: bool = False
    """masters and moments are in host memory while responses are sampled, the cache is given back before training"""

    def held(self, config: Config, gpu: bool) -> int:
        """Tokens in the cache. On a GPU as in GraphBatch._sizes: no more rows than a call has, each prompt once."""
        if not gpu:
            return self.slots * longest_row(config) if self.cache_tokens is None else self.cache_tokens
        rows = max(prompts * n for prompts, n in calls(config))
        slots = self.slots if config.rollout.ahead else min(self.slots, _rounded(rows, SLOTS))
        whole = all_pages(slots, config)
        return whole if self.cache_tokens is None else min(self.cache_tokens, whole)


def estimate(
    model: Any,
    config: Config,
    layout: Layout,
    micro_tokens: int,
    recompute: bool,
    reference: bool,
    logits: bool,
    world: World = ALONE,
    gpu: bool = False,
) -> Memory:
    """``reference``: one is held; ``logits``: those of all tokens are, as the head is no part apart. ``gpu``: the head
    goes with the loss (training/together.py).

    Of a sharded run on one of its devices: a whole copy of the weights, for sampling, and a share of the rest.
    """
    whole = _estimate(model, config, layout, micro_tokens, recompute, reference, logits, world, gpu)
    if not world.sharded:
        head = _head(model, config, micro_tokens, recompute) if gpu and not logits else 0
        return replace(whole, head=head)
    gathered = 3 * _largest_group(model)  # in use, on its way, and its gradient on its way
    return replace(
        whole,
        weights=whole.weights + whole.weights // world.size + gathered,
        masters=whole.masters // world.size,
        moments=whole.moments // world.size,
        reference=whole.reference // world.size,
    )


def _largest_group(model: Any) -> int:
    """Bytes of what a sharded model has whole at a time: a layer, or the embeddings and the head."""
    from ..distributed.shards import layers_of

    layers = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers_of(model)]
    rest = sum(p.numel() * p.element_size() for p in model.parameters()) - sum(layers)
    return int(max([rest, *layers]))


def _estimate(
    model: Any,
    config: Config,
    layout: Layout,
    micro_tokens: int,
    recompute: bool,
    reference: bool,
    logits: bool,
    world: World,
    gpu: bool,
) -> Memory:
    weights = [(p.numel(), p.element_size()) for p in model.parameters()]
    trained = [(p.numel(), p.element_size()) for p in model.parameters() if p.requires_grad]
    size = weights[0][1]  # of the embedding, and of all that is not an adapter
    shape, share = Shape.of(model.config.get_text_config()), world.size if world.sharded else 1
    sums = sum(n * max(size, 4) for n, size in trained) // share
    half = sum(n * size for n, size in trained if size < 4) // share
    tokens = max(micro_tokens, longest_row(config))  # none is cut
    kept = tokens * shape.activation_bytes(size, recompute, logits, gpu, adapted(model))
    backward = tokens * shape.backward_bytes(size, recompute, gpu, adapted(model))
    return Memory(
        weights=_bytes(weights) + packed_bytes(model),
        masters=sum(n * 4 for n, size in trained if size < 4),
        moments=2 * sum(n * max(size, 4) for n, size in trained),
        gradients=sums + (max(0, half - kept + backward) if gpu else half),
        reference=_reference(weights, trained, adapted(model), config) if reference else 0,
        cache=layout.held(config, gpu) * shape.cache_bytes(size, config.rollout.cache_dtype),
        reading=read_tokens(config) * shape.reading_bytes(size, gpu, adapted(model)),
        activations=kept,
        offload=layout.offload,
        dense=largest_dense(model),
    )


def _head(model: Any, config: Config, micro_tokens: int, recompute: bool) -> int:
    weight = model.get_output_embeddings().weight
    size, most = weight.element_size(), max(micro_tokens, longest_row(config))
    to_come = most * Shape.of(model.config.get_text_config()).backward_bytes(size, recompute, True, adapted(model))
    return max(0, block_bytes(min(rows_at_once(len(weight), size), most), len(weight), size) - to_come)


def calls(config: Config) -> list[tuple[int, int]]:
    """Prompts that the engine is given at once, at most, and responses to each: for a step, and for an evaluation."""
    rollout, published = config.rollout, algorithm(config.algorithm)
    dynamic = published.dynamic_sampling if rollout.dynamic is None else rollout.dynamic
    more = dynamic or (published.min_signal if rollout.min_signal is None else rollout.min_signal)
    return [(rollout.prompts * (MOST_MORE if more else 1), rollout.samples), (config.eval.problems, config.eval.k)]


def read_tokens(config: Config) -> int:
    """Of prompts, in one pass of the engine, at most."""
    if config.rollout.ahead:  # responses are read again with them
        return READ_TOKENS
    prompt, most = config.rollout.max_prompt_tokens, max(prompts for prompts, _ in calls(config))
    return max(prompt, min(READ_TOKENS, most * prompt))


def all_pages(slots: int, config: Config) -> int:
    """Tokens of the pages that so many rows take at full length, with the prompts that are in the cache beside them."""
    rollout = config.rollout
    prompts = slots  # and where it runs ahead, so many
    if not rollout.ahead:
        prompts = max(min(most, 2 * math.ceil(slots / n) + 8, slots) for most, n in calls(config))
    return slots * _rounded(rollout.max_new_tokens, PAGE) + prompts * _rounded(rollout.max_prompt_tokens, PAGE)


def _rounded(number: int, to: int) -> int:
    return -(-number // to) * to


def longest_row(config: Config) -> int:
    """Tokens of the longest prompt and the longest response to it."""
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens


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


def lay_out(
    model: Any,
    config: Config,
    available: int | None,
    held: bool,
    trained: bool = True,
    world: World = ALONE,
    host: int | None = None,
) -> Layout:
    """As the settings say, else what has room for most responses at a time. ``available``: bytes of the device, None:
    a CPU; ``host``: of its host, where that is known; ``held``: a reference is; not ``trained``: an evaluation.

    Sharded runs and those with vLLM, which keeps its own memory, offload only where they are told to.
    """
    asked, rollout = config.optim.offload and trained, config.rollout
    if available is None:
        return Layout(rollout.slots or CPU_SLOTS, None, bool(asked))
    recompute = can_recompute(model) if config.optim.recompute is None else config.optim.recompute
    micro_tokens = config.optim.micro_tokens or ENOUGH_TOKENS
    parts = estimate(model, config, Layout(0), micro_tokens, recompute, held, False, world, gpu=True)
    shape, size = Shape.of(model.config.get_text_config()), next(model.parameters()).element_size()
    each = shape.cache_bytes(size, rollout.cache_dtype)
    row = row_tokens(config, trained)
    if not trained:
        return _fitted(config, available - parts.weights - parts.dense - parts.reading, each, row, False)
    moving = replace(parts, offload=True)
    if asked and host is not None and moving.moved > host:
        raise ValueError(
            f"optim.offload needs {moving.moved / 1e9:,.1f} GB of host memory, and this machine has {host / 1e9:,.1f}: "
            "leave it out"
        )
    left = available - parts.training  # with room for a micro-batch
    beside = max(0, parts.sampling - parts.training)  # reading prompts takes more than training
    few = min(SLOTS * row * each, left - beside)
    stays = _fitted(config, max((left + parts.activations - beside) // 2, few), each, row, False)
    moves = _fitted(config, available - moving.sampling, each, row, True)
    if asked is not None:
        return moves if asked else stays
    if world.sharded or rollout.engine != "native" or (host is not None and moving.moved > HOST_SHARE * host):
        return stays
    gain = [min(used(layout, config), rollout.prompts * rollout.samples) for layout in (stays, moves)]
    return moves if gain[1] >= WORTH * gain[0] and parts.training - parts.activations < available else stays


def _fitted(config: Config, room: int, each: int, row: int, offload: bool) -> Layout:
    """In so many bytes, of which a token takes ``each``; one row at full length is the least."""
    longest, given = longest_row(config), config.rollout.slots
    tokens = min(max(room // each, longest), max(longest, all_pages(given or MOST_SLOTS, config)))
    slots = given or min(MOST_SLOTS, max(1, tokens // row))
    if given is None and slots > SLOTS:
        slots -= slots % SLOTS
    return Layout(slots, None if tokens >= all_pages(slots, config) else tokens, offload)


def row_tokens(config: Config, trained: bool = True) -> int:
    """That a row holds on average, at most: its share of the prompt, and half of the longest response."""
    rollout, samples = config.rollout, config.rollout.samples if trained else config.eval.k
    return -(-rollout.max_prompt_tokens // samples) + -(-rollout.max_new_tokens // 2)


def used(layout: Layout, config: Config) -> int:
    """Rows that are decoded at a time, on average, where responses are as long as they may be."""
    if layout.cache_tokens is None:
        return max(1, layout.slots)
    return max(1, min(layout.slots, layout.cache_tokens // row_tokens(config)))


def smallest(layouts: Sequence[Layout]) -> Layout:
    """What all ranks have room for."""
    tokens = [layout.cache_tokens for layout in layouts if layout.cache_tokens is not None]
    offload = all(layout.offload for layout in layouts)
    return Layout(min(layout.slots for layout in layouts), min(tokens, default=None), offload)


@dataclass(frozen=True)
class Shape:
    """Of a decoder, as far as its memory goes."""

    layers: int
    hidden: int
    query_width: int  # heads × width of a head
    key_width: int
    key_heads: int
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
        widths = heads * width, key_heads * width, key_heads
        return cls(config.num_hidden_layers, config.hidden_size, *widths, ffn, config.vocab_size)

    def cache_bytes(self, size: int, dtype: str = "auto") -> int:
        """For each token: keys and values; in 8 bits with a float32 scale for each head."""
        width = self.key_width * size if dtype == "auto" else self.key_width + 4 * self.key_heads
        return self.layers * 2 * width

    def layer_bytes(self, size: int) -> int:
        """For each token, of one layer in its forward pass, as transformers computes it. Of ``size`` bytes an element,

        its two norms: the input in float32, the normalised one and the product with the weight;
        attention: queries, keys, values and the output;
        the feed-forward part: gate, up, the activation and the product.
        """
        norms = 2 * self.hidden * (4 + 2 * size)
        attention = 2 * (self.query_width + self.key_width) * size
        return norms + attention + 4 * self.ffn * size

    def fused_bytes(self, size: int, adapter: bool = False) -> int:
        """The same where kernels are fused: inputs and outputs of norms; queries and keys before and after they are
        rotated, values and the output; gate and up. An adapter needs their product too."""
        ffn = (3 if adapter else 2) * self.ffn
        return (4 * self.hidden + 3 * self.query_width + 4 * self.key_width + ffn) * size

    def reading_bytes(self, size: int, fused: bool, adapter: bool = False) -> int:
        """For each token of prompts that are read, no gradients wanted: of the layer that is computed."""
        if not fused:
            return self.layer_bytes(size)
        ffn = (4 if adapter else 3) * self.ffn  # what an adapter adds, and the sum
        return (2 * (self.hidden + self.query_width + self.key_width) + ffn) * size

    def backward_bytes(self, size: int, recompute: bool, fused: bool, adapter: bool = False) -> int:
        """For each token, of the layer whose backward pass runs, beside what all layers keep: as much as it keeps, for
        the gradients, and what was computed again."""
        if not fused:
            return 2 * self.layer_bytes(size)
        return (2 if recompute else 1) * self.fused_bytes(size, adapter)

    def activation_bytes(
        self, size: int, recompute: bool, logits: bool, fused: bool = False, adapter: bool = False
    ) -> int:
        """For each token. All layers keep what their backward pass needs, or with recomputation their input; one is in
        its backward pass. Attention is taken to keep no scores."""
        layer = self.fused_bytes(size, adapter) if fused else self.layer_bytes(size)
        kept = self.layers * (self.hidden * size if recompute else layer)
        head = self.hidden * (2 * size + 4) + (self.vocabulary * (size + 12) if logits else 0)
        return kept + self.backward_bytes(size, recompute, fused, adapter) + head

    def moved_bytes(self, size: int) -> int:
        """For each token: what the rule of costs/seconds.py was fitted with as moved, whatever is kept."""
        return self.activation_bytes(size, False, False)


def choose(
    model: Any,
    config: Config,
    layout: Layout,
    available: int | None,
    reference: bool,
    logits: bool,
    world: World = ALONE,
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
        needed = estimate(model, config, layout, tokens, recompute, reference, logits, world, gpu=True)
        return needed.training <= available

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
    free, total = torch.cuda.mem_get_info(device)
    # a study's runs share a GPU, and a process may have been limited
    allowed = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)  # not in every torch
    share = min(float(os.environ.get(GPU_SHARE, 1)), allowed(device))
    return int(SHARE * min(free + torch.cuda.memory_reserved(device), share * total))
