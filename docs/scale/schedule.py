"""Where the parts of a step go and how long they take: the trainer, the engines, both together or apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pieces import CARD, NODE, Job, Model, exchange, gather, together

from rpg.costs.devices import Device
from rpg.costs.memory import SHARE
from rpg.costs.operations import Ceilings
from rpg.costs.seconds import DECODE, PREFILL, StepSizes, Work, train_seconds

RESERVED = 0.85  # of a GPU's memory for an engine that has it alone; ASSUMPTION
MOST_ROWS = 1024  # decoded at once by one engine; ASSUMPTION
MOST_TOKENS = 32768  # of a micro-batch on one GPU; more gains nothing
FSDP_BYTES = 16  # a parameter: float32 weights (they are the masters), float32 gradients, two float32 moments
MEGATRON_BYTES = 6, 12  # on every rank: bf16 weights, float32 gradients; sharded over all: masters, moments


@dataclass(frozen=True)
class Layout:
    """Of the trainer. ``shard`` None: Megatron, experts over ``expert`` GPUs, layers over ``pipeline``."""

    gpus: int
    shard: int | None
    sequence: int = 1  # GPUs that share a sequence: Ulysses, or context parallelism
    expert: int = 1
    pipeline: int = 1

    @property
    def sharing(self) -> int:
        return self.sequence * self.pipeline  # GPUs that work on the same sequences

    def state(self, model: Model) -> float:
        """Bytes on each GPU: weights, gradients, masters, moments. A reference that is the old policy: none."""
        if self.shard is not None:
            two = 2 * 2 * model.body(model.experts) / model.layers  # layers in bf16, one computed with, one on its way
            return FSDP_BYTES * model.parameters / self.shard + two + 2 * model.hidden * model.vocab
        local = (model.spread / self.expert + model.parameters - model.spread) / self.pipeline
        return MEGATRON_BYTES[0] * local + MEGATRON_BYTES[1] * model.parameters / self.gpus

    def tokens(self, model: Model, device: Device) -> int:
        """Of a micro-batch on each GPU: what is left, with recomputation. Negative: the state alone does not fit."""
        return min(MOST_TOKENS, int((SHARE * device.memory - self.state(model)) / model.activation()))

    def fits(self, model: Model, device: Device, context: int) -> bool:
        return self.tokens(model, device) * self.sequence >= context  # one sequence is not cut further


@dataclass(frozen=True)
class Training:
    """Times are those of one optimiser step unless they say otherwise."""

    model: Model
    device: Device
    layout: Layout
    job: Job

    @cached_property
    def rows(self) -> float:
        """Sequences of a rank, in mean ones: its share, but one at least, and somebody has the longest."""
        lengths, all_rows = self.job.lengths, self.job.minibatch * self.job.samples
        share = all_rows * self.layout.sharing / self.layout.gpus
        return max(share, (lengths.prompt + lengths.longest(all_rows)) / lengths.sequence)

    @cached_property
    def micro_tokens(self) -> int:
        return self.layout.tokens(self.model, self.device) * self.layout.sequence

    @property
    def micro_batches(self) -> float:
        return max(1.0, self.rows * self.job.lengths.sequence / self.micro_tokens)

    def compute(self, forward: bool = False) -> float:
        """rpg's estimate for one GPU, and the pipeline's bubble; ``forward``: only that pass."""
        model, layout, lengths = self.model, self.layout, self.job.lengths
        work = Work(
            model.counts, model.activation(recompute=False), model.parameters // layout.gpus,
            frozen=False, recompute=True, micro_tokens=self.micro_tokens, slots=1,
        )  # fmt: skip
        batch = StepSizes(self.rows, 1, lengths.prompt, lengths.mean, lengths.limit)
        seconds = train_seconds(work, together(self.device, layout.sharing), batch, forward=forward)
        filled = max(self.micro_batches, self.rows)  # of the pipeline; sequences can go through one at a time
        return seconds * (1 + (layout.pipeline - 1) / filled)

    def shards(self) -> float:
        """FSDP gathers bf16 weights twice and scatters float32 gradients, for each micro-batch; Megatron once."""
        layout, held = self.layout, self.model.parameters
        if layout.shard is None:
            spread = layout.pipeline * layout.expert
            return gather((2 + 4) * held / spread, max(1, layout.gpus // spread))
        weights, gradients = (gather(n * held, layout.shard, self.model.layers) for n in (2, 4))
        return self.micro_batches * (2 * weights + gradients)

    def replicas(self) -> float:
        """HSDP sums the gradients' shards over its copies (a ring through the cards), for each micro-batch: put off
        (``use_no_sync_for_gradient_accumulation``), each GPU would hold all gradients."""
        copies = self.layout.gpus // (self.layout.shard or self.layout.gpus)
        once = 2 * 4 * self.model.parameters * copies / self.layout.gpus * (copies - 1) / copies / CARD
        return self.micro_batches * once

    def exchanges(self) -> float:
        """Heads against positions (Ulysses), tokens to experts; three passes each."""
        model, layout = self.model, self.layout
        tokens = self.rows * self.job.lengths.sequence / layout.sharing
        heads = 2 * 2 * (model.heads + model.key_heads) * model.width  # bytes a token and layer: q, k, v there, o back
        experts = 2 * 2 * model.chosen * model.hidden  # there and back
        return 3 * model.layers * tokens * (exchange(heads, layout.sequence) + exchange(experts, layout.expert))

    def update(self) -> float:
        """Shards move while the GPU computes; the rest does not (ASSUMPTION)."""
        return max(self.compute() + self.exchanges(), self.shards()) + self.replicas()

    def seconds(self) -> float:
        """Of a whole step: the old log-probabilities (a forward pass, 2 of 8 bytes gathered), then the updates."""
        score = max(self.compute(forward=True), self.shards() / 4 if self.layout.shard else 0.0)
        return self.job.optimiser_steps * (score + self.update())


def layouts(model: Model, gpus: int) -> list[Layout]:
    """Powers of two: FSDP2 with Ulysses for dense models; experts in a node (Megatron) for a mixture."""
    powers = [2**i for i in range(11) if 2**i <= gpus]
    within = [p for p in powers if p <= NODE]
    if model.experts == 1:
        return [Layout(gpus, shard, cp) for shard in powers for cp in within]
    pairs = [(cp, pp) for cp in within for pp in (1, 2, 4, 8) if cp * pp <= gpus and gpus // pp >= NODE]
    return [Layout(gpus, None, cp, expert=NODE, pipeline=pp) for cp, pp in pairs]


def best(model: Model, device: Device, gpus: int, job: Job) -> Training | None:
    """Of those that fit and are within 3 % of the fastest, the least parallel. None: nothing fits."""
    context = job.lengths.prompt + job.lengths.limit
    fitting = [Training(model, device, lay, job) for lay in layouts(model, gpus) if lay.fits(model, device, context)]
    timed = [(t.seconds(), t) for t in fitting]
    fastest = min((seconds for seconds, _ in timed), default=0.0)
    near = [t for seconds, t in timed if seconds <= 1.03 * fastest]
    return min(near, key=lambda t: (t.layout.sharing, t.layout.shard or 0), default=None)


@dataclass(frozen=True)
class Rollout:
    """Engines that have ``gpus`` to themselves, ``tensor`` of them to an engine."""

    model: Model
    device: Device
    gpus: int
    tensor: int
    job: Job

    @cached_property
    def one(self) -> Device:
        return together(self.device, self.tensor)

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(self.one.flops, self.one.bandwidth)

    @property
    def split(self) -> int:
        """GPUs that split attention: no more than key heads, or keys and values would be held twice."""
        return min(self.tensor, self.model.key_heads)

    @property
    def copied(self) -> float:
        """Parameters that an engine of more GPUs holds again: all but the experts."""
        return (self.model.parameters - self.model.spread) * (self.tensor // self.split - 1)

    def sequences(self, tokens: float) -> int:
        """Of so many tokens, whose keys and values fit beside the weights."""
        room = RESERVED * self.one.memory - 2 * (self.model.parameters + self.copied)
        return max(0, int(room / (self.model.counts.kv_bytes * tokens)))

    @cached_property
    def slots(self) -> int:
        return min(MOST_ROWS, self.sequences(self.job.lengths.sequence))

    def step(self, rows: float) -> float:
        """Seconds of a decoding step: rpg's line, 1.1 × the floor and so much a layer."""
        length, count = self.job.lengths.prompt + self.job.lengths.age, max(1, round(rows))
        moved = self.model.touched(rows).decode_bytes(count, rows * length) + 2 * self.copied
        floor = self.ceilings.seconds(self.model.counts.decode_flops(count, length), moved)
        return DECODE * floor + self.model.layers * self.one.decode_layer

    @property
    def rows(self) -> float:
        return self.job.sampled * self.tensor / self.gpus  # of one engine

    def prefill(self) -> float:
        once = self.ceilings.seconds(self.model.counts.prefill_flops(1, self.job.lengths.prompt))
        return PREFILL * once * self.rows / self.job.samples

    @property
    def longest(self) -> float:
        return self.job.lengths.longest(self.job.sampled)

    def seconds(self) -> float:
        """Prompts; steps with all slots in use; then fewer and fewer rows until the longest response ends."""
        rows, mean = min(self.rows, self.slots), self.job.lengths.mean
        full, last = (self.rows - rows) * mean / rows, rows * mean / self.longest
        return self.prefill() + full * self.step(rows) + self.longest * self.step(last)

    def idle(self) -> float:
        """Share of slot-steps without a row: those of the tail."""
        rows, mean = min(self.rows, self.slots), self.job.lengths.mean
        return rows * (self.longest - mean) / (rows * self.longest + (self.rows - rows) * mean)

    def streaming(self) -> float:
        """Seconds for as many tokens when new prompts take every free slot at once: no tail."""
        return self.prefill() + self.rows * self.job.lengths.mean / self.slots * self.step(self.slots)


def engines(model: Model, device: Device, gpus: int, job: Job) -> Rollout:
    """The smallest engine that is at most a third slower than the fastest: large ones wait more than assumed here."""
    most = model.key_heads if model.experts == 1 else 2 * NODE
    sizes = [Rollout(model, device, gpus, n, job) for n in (1, 2, 4, 8, 16) if n <= most and gpus % n == 0]
    timed = [(r.streaming(), r) for r in sizes if r.sequences(job.lengths.prompt + job.lengths.limit)]
    fastest = min(seconds for seconds, _ in timed)
    return next(r for seconds, r in timed if seconds <= 4 / 3 * fastest)


@dataclass(frozen=True)
class Plan:
    """``how``: together (in turn on the same GPUs), one-off or streaming (on GPUs of their own, at the same time)."""

    rollout: Rollout
    training: Training
    how: str

    @property
    def sync(self) -> float:
        """Weights in bf16 to the engines: gathered where they are trained; apart, also through the cards of a node."""
        model, layout = self.training.model, self.training.layout
        gathered = gather(2 * model.parameters, layout.shard or layout.gpus, model.layers)
        return gathered + (0.0 if self.how == "together" else 2 * model.parameters / (NODE * CARD))

    @cached_property
    def seconds(self) -> float:
        """One-off: each batch is sampled while the one before is trained on, lag 1, with the tail. Streaming: new
        prompts take every free slot, no tail, whatever lag comes of it."""
        sampling = self.rollout.streaming() if self.how == "streaming" else self.rollout.seconds()
        parts = sampling, self.training.seconds()
        return (sum(parts) if self.how == "together" else max(parts)) + self.sync

    @property
    def idle(self) -> float:
        return self.rollout.idle() * self.rollout.seconds() / self.seconds  # share of the step that slots stand empty

    def lag(self, tokens: float, wait: float) -> float:
        """Steps, when streaming, from the policy a response was begun with to the one it trains: the time it takes to
        be sampled, then the wait until its batch is full, half a step on average and one at worst."""
        return tokens * self.rollout.step(self.rollout.slots) / self.seconds + wait


def fastest(model: Model, device: Device, gpus: int, job: Job, how: str) -> Plan | None:
    """Apart: a half to a sixteenth of the GPUs train, the others sample. None: nothing fits."""
    shares = [(gpus, gpus)] if how == "together" else [(gpus // n, gpus - gpus // n) for n in (2, 4, 8, 16)]
    trainers = [(best(model, device, n, job), rest) for n, rest in shares]
    plans = [Plan(engines(model, device, rest, job), training, how) for training, rest in trainers if training]
    return min(plans, key=lambda plan: plan.seconds, default=None)
