"""Decoding on a GPU: one step of all live rows is captured as a CUDA graph for each number of rows, and replayed.

A step reads the weights once and of the keys and values only what is alive; sampling and the books are part of it, so
that the host does nothing but start the next one, and looks every few steps at who is done. Prompts have rows of their
own, one for all samples of a group; a slot holds what one response has generated. A live row of the batch names its
prompt and its slot, so rows can be renumbered without moving a key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..console import first_line
from ..kernels.decode import decode_attention
from ..kernels.logp import head_logits
from ..kernels.merged import merging
from ..kernels.packed import Packing, attend, pack
from ..kernels.sample import Pool, fused_sample
from ..kernels.sample_torch import uniform_table
from ..kernels.step import DEAD, LENGTH, PROMPT, PROMPT_LENGTH, SLOT, begin_step, end_step
from .attention import attending, logits_after
from .engine import Rollout, Sampling, read_rollouts
from .kept import KeptPool, KeptStore

LOOK_EVERY = 8  # steps between two looks at who is done
READ_TOKENS = 32768  # prompt tokens in one pass
FIRST_ROWS = 128  # first tokens drawn at once
ROOM = 64  # capacities are multiples of this, so that a slightly longer prompt needs no new graphs
END_ROOM = 16
MOST_GRAPHS = 64
Kind = tuple[int, tuple[float, float, int, float], bool]  # of a step: rows, sampling, whether kept sets are written


@dataclass(frozen=True)
class Timing:
    """Of the last generate: seconds in which prompts were read, in which tokens were decoded, and the steps of that."""

    prefill: float
    decode: float
    steps: int


class Slots:
    """Keys and values, and all else that a captured step reads or writes: its addresses never change."""

    is_compileable = False

    def __init__(self, slots: int, prompts: int, prompt_room: int, room: int, device: torch.device):
        self.slots, self.prompts, self.prompt_room, self.room = slots, prompts, prompt_room, room
        self.prompt_keys: list[Tensor] = []  # a layer: [prompts, heads, prompt_room, width]
        self.prompt_values: list[Tensor] = []
        self.keys: list[Tensor] = []  # a layer: [slots, heads, room, width]
        self.values: list[Tensor] = []
        self.state_5S = torch.full((5, slots), DEAD, dtype=torch.int32, device=device)
        self.tokens_SR = torch.zeros(slots, room, dtype=torch.int32, device=device)
        self.logp_SR = torch.zeros(slots, room, device=device)
        self.uniform_SR = torch.zeros(slots, room, dtype=torch.float64, device=device)
        self.count_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.ended_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.limit_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self.ends_E = torch.full((END_ROOM,), -1, dtype=torch.int64, device=device)
        self.kept: KeptPool | None = None  # where kept sets go, once they were asked for
        self.state_5A = self.state_5S  # of the step in progress
        self.reading: Packing | None = None
        self.row_N = self.place_N = self.limit_1  # where the tokens that are read go

    def pool(self, state_5A: Tensor, sampling: Sampling) -> tuple[Pool, Tensor] | None:
        """Where fused_sample puts the kept sets of these rows."""
        return (self.kept.pool, state_5A) if self.kept is not None and sampling.gives_kept else None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.slots, self.prompts, self.prompt_room, self.room

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.reading is not None:
            if layer == len(self.keys):
                heads, width = key.shape[1], key.shape[3]
                sizes = (self.prompts, heads, self.prompt_room), (self.slots, heads, self.room)
                self.prompt_keys.append(key.new_empty(*sizes[0], width))
                self.prompt_values.append(value.new_empty(*sizes[0], value.shape[3]))
                self.keys.append(key.new_empty(*sizes[1], width))
                self.values.append(value.new_empty(*sizes[1], value.shape[3]))
            self.prompt_keys[layer][self.row_N, :, self.place_N] = key[0].transpose(0, 1)
            self.prompt_values[layer][self.row_N, :, self.place_N] = value[0].transpose(0, 1)
        return key, value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        if self.reading is not None:
            query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
            return attend(query, key, value, self.reading, scaling, window)[None]
        rows = self.state_5A
        output = decode_attention(
            query[:, :, 0],
            key[:, :, 0],
            value[:, :, 0],
            self.prompt_keys[layer],
            self.prompt_values[layer],
            self.keys[layer],
            self.values[layer],
            rows[PROMPT],
            rows[PROMPT_LENGTH],
            rows[SLOT],
            rows[LENGTH],
            scaling,
            window,
        )
        return output[:, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def __len__(self) -> int:
        return len(self.keys)


class GraphDecoder:
    """Generates with up to ``slots`` rows. ``capture`` False: the same steps without graphs, on any device."""

    def __init__(self, model: Any, linear: bool, slots: int, capture: bool, warn: Callable[[str], None]):
        self.model, self.linear, self.slots, self.capture, self.warn = model, linear, slots, capture, warn
        self.longest_prompt = 0  # that is to be expected: more would need new buffers and new graphs
        self.buffers: Slots | None = None
        self.graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        self.timing: Timing | None = None
        self._weights: list[int] = []

    def release(self) -> None:
        """Give back the caches and the graphs; the next generate makes new ones."""
        self.graphs.clear()
        self.buffers, self.pool = None, None

    def prepare(self, slots: int, prompts: int, prompt_room: int, room: int) -> Slots:
        """Buffers of at least these sizes. What was captured stays, unless they grow or a weight has moved."""
        prompt_room, room = (-(-size // ROOM) * ROOM for size in (prompt_room, room))
        wanted, weights = (slots, prompts, prompt_room, room), [p.data_ptr() for p in self.model.parameters()]
        if self.buffers is not None:
            if weights == self._weights and all(a <= b for a, b in zip(wanted, self.buffers.sizes, strict=True)):
                return self.buffers
            wanted = tuple(max(pair) for pair in zip(wanted, self.buffers.sizes, strict=True))  # type: ignore[assignment]
        self.release()
        self.buffers, self._weights = Slots(*wanted, self.model.device), weights
        return self.buffers

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, rows: int, sampling: Sampling) -> None:
        """One more token for the first ``rows`` rows, the dead among them aside."""
        key = rows, sampling.how, sampling.gives_kept
        if key in self.graphs:
            self.graphs[key].replay()
            return
        self._decode(
            rows, sampling
        )  # the first step of its kind is an ordinary one, which also warms up what is captured
        if self.capture:
            self._record(key, sampling)

    def _record(self, key: Kind, sampling: Sampling) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool):
                self._decode(key[0], sampling)
        except torch.OutOfMemoryError:
            _leave(stream, pool)
            raise
        except Exception as error:  # an architecture that asks the host on the way
            _leave(stream, pool)
            self.capture = False
            self.warn(f"decoding without CUDA graphs, which is slow: {first_line(error)}")
            return
        self.pool = pool
        if len(self.graphs) >= MOST_GRAPHS:  # of temperatures, say, that change from call to call
            self.graphs.pop(next(iter(self.graphs)))
        self.graphs[key] = graph

    def _decode(self, rows: int, sampling: Sampling) -> None:
        b = self.buffers
        assert b is not None
        b.state_5A = b.state_5S[:, :rows]
        ids, position, uniform = begin_step(b.state_5A, b.uniform_SR)
        kept = b.pool(b.state_5A, sampling)
        token, logp = fused_sample(self._logits(ids, position), uniform, *sampling.how, kept)
        end_step(token, logp, b.state_5A, b.tokens_SR, b.logp_SR, b.count_S, b.ended_S, b.limit_1, b.ends_E)

    def _logits(self, ids: Tensor, position: Tensor, last: Tensor | None = None) -> Tensor:
        """After each row's only token, or after those at ``last`` of the only row."""
        if self.linear:
            hidden = self.model.base_model(
                input_ids=ids, position_ids=position, past_key_values=self.buffers, use_cache=True
            ).last_hidden_state
            hidden_NH = hidden[:, 0] if last is None else hidden[0, last]
            return head_logits(hidden_NH, self.model.get_output_embeddings().weight)
        assert self.buffers is not None
        count = len(ids) if last is None else len(last)
        zero, each = ids.new_zeros(count), torch.arange(count, device=ids.device)
        row, last = (each, zero) if last is None else (zero, last)
        return logits_after(self.model, self.buffers, ids, position, row, last)

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def read(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> Tensor:
        """Put prompts, end to end in one pass, into these rows; the logits after each one's last token."""
        b, device = self.buffers, self.model.device
        assert b is not None
        width = max(map(len, prompts)) + 1
        ids_PL = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        length_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
        packing = pack(length_P, torch.ones_like(ids_PL[:, :1]), width)  # each with one token to come
        b.row_N = torch.tensor(rows, device=device)[packing.token_N // width]
        b.place_N, b.reading = packing.position_N, packing
        ids_1N = ids_PL.flatten()[packing.token_N][None]
        try:
            logits = self._logits(ids_1N, packing.position_N[None], packing.state_R)
        finally:
            b.reading = None
        if not b.keys:
            raise NotImplementedError("it keeps no keys and values in its cache")
        return logits


class GraphBatch:
    """One call of generate: ``run`` it, then take the ``rollouts``. Request r is sample r % n of prompt r // n."""

    def __init__(
        self,
        decoder: GraphDecoder,
        end_ids: Sequence[int],
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seed: int,
    ):
        self.decoder, self.prompts, self.n, self.sampling = decoder, prompts, n, sampling
        device, total = decoder.model.device, len(prompts) * n
        slots = min(decoder.slots, buckets(total))
        rows = min(len(prompts), 2 * -(-slots // n) + 8, slots)
        longest = max(decoder.longest_prompt, *map(len, prompts))
        self.buffers = decoder.prepare(slots, rows, longest, sampling.max_new_tokens)
        b = self.buffers
        b.state_5S.fill_(DEAD)
        b.limit_1.fill_(sampling.max_new_tokens)
        b.ends_E.fill_(-1)
        b.ends_E[: len(end_ids)] = torch.tensor(end_ids, dtype=torch.long)
        self.uniform = uniform_table(seed, prompts, n, sampling.max_new_tokens).to(device)
        self.tokens = torch.zeros(total, sampling.max_new_tokens, dtype=torch.int32, device=device)
        self.logp = torch.zeros(total, sampling.max_new_tokens, device=device)
        self.length = torch.zeros(total, dtype=torch.int32, device=device)
        self.ended = torch.zeros(total, dtype=torch.int32, device=device)
        self.kept: KeptStore | None = None
        if sampling.gives_kept:
            self.kept = KeptStore(total, sampling.max_new_tokens, device)
            b.kept = b.kept or KeptPool(b.slots, b.room, device)
            b.kept.reset()
        self.live: list[int] = []  # the request of each live row
        self.age: list[int] = []  # steps each of them has taken
        self.slot = [-1] * total  # of each request
        self.free = list(range(b.slots))[::-1]
        self.prompt_row: dict[int, int] = {}  # of each prompt that is in the cache
        self.free_prompts = list(range(b.prompts))[::-1]
        self.left = [n] * len(prompts)  # samples of each prompt that are not done
        self.pending: Tensor | None = None  # logits after a prompt some of whose samples are still to be begun
        self.next = self.done = 0

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        prefill, decode, steps = 0.0, 0.0, 0
        with attending(self.decoder.model, self.buffers), merging():
            while self.done < len(self.slot):
                begin = perf_counter()
                if self._admit():
                    self._look()  # some end with their first token
                    prefill += perf_counter() - begin
                    begin = perf_counter()
                if self.live:
                    count = min(LOOK_EVERY, self.sampling.max_new_tokens - 1 - min(self.age))
                    rows = min(buckets(len(self.live)), self.buffers.slots)
                    for _ in range(count):
                        self.decoder.step(rows, self.sampling)
                    self.age = [age + count for age in self.age]
                    steps += count
                    self._look()
                    decode += perf_counter() - begin
                if progress is not None:
                    progress(self.done)
        if self.buffers.kept is not None and self.kept is not None:
            self.buffers.kept.spill(self.kept, last=True)
        self.decoder.timing = Timing(prefill, decode, steps)

    # ---- who comes ---------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Begin requests, when enough slots are free to be worth a pass over their prompts."""
        if self.next == len(self.slot) or (self.live and len(self.free) < max(1, self.buffers.slots // 8)):
            return False
        requests: list[int] = []
        fresh: list[int] = []
        while len(requests) < len(self.free) and self.next < len(self.slot):
            prompt = self.next // self.n
            if prompt not in self.prompt_row:
                if not self.free_prompts:
                    break
                self.prompt_row[prompt] = self.free_prompts.pop()
                fresh.append(prompt)
            requests.append(self.next)
            self.next += 1
        waiting = [r for r in requests if not fresh or r // self.n < fresh[0]]
        if waiting:
            assert self.pending is not None
            self._begin(waiting, self.pending.expand(len(waiting), -1))
        for chunk in self._chunks(fresh):
            logits = self.decoder.read([self.prompts[i] for i in chunk], [self.prompt_row[i] for i in chunk])
            begun = [r for r in requests if chunk[0] <= r // self.n <= chunk[-1]]
            for i in range(0, len(begun), FIRST_ROWS):
                some = begun[i : i + FIRST_ROWS]
                which = torch.tensor([r // self.n - chunk[0] for r in some], device=logits.device)
                self._begin(some, logits[which])
            self.pending = logits[-1:].clone()
        return bool(requests)

    def _chunks(self, prompts: Sequence[int]) -> Iterator[list[int]]:
        chunk: list[int] = []
        tokens = 0
        for i in prompts:
            if chunk and tokens + len(self.prompts[i]) > READ_TOKENS:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(i)
            tokens += len(self.prompts[i])
        if chunk:
            yield chunk

    def _begin(self, requests: Sequence[int], logits: Tensor) -> None:
        """A slot and a first token for each."""
        b, sampling = self.buffers, self.sampling
        slots = [self.free.pop() for _ in requests]
        columns = [
            [self.prompt_row[r // self.n], len(self.prompts[r // self.n]), slot, -1, 0]
            for r, slot in zip(requests, slots, strict=True)
        ]
        begin, end = len(self.live), len(self.live) + len(requests)
        rows = b.state_5S[:, begin:end]
        rows.copy_(torch.tensor(columns, dtype=torch.int32).T)
        request_M, slot_M = self._index(requests), self._index(slots)
        numbers = self.uniform[request_M]
        b.uniform_SR[slot_M, : numbers.shape[1]] = numbers
        kept = b.pool(rows, sampling)
        token, logp = fused_sample(logits, numbers[:, 0].contiguous(), *sampling.how, kept)
        end_step(token, logp, rows, b.tokens_SR, b.logp_SR, b.count_S, b.ended_S, b.limit_1, b.ends_E)
        for r, slot in zip(requests, slots, strict=True):
            self.slot[r] = slot
        self.live += requests
        self.age += [0] * len(requests)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.tokens.device)

    # ---- who goes ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take the results of rows that are done, free what they held, and close the gaps."""
        b = self.buffers
        if b.kept is not None and self.kept is not None:
            b.kept.spill(self.kept)
        alive = [length > DEAD for length in b.state_5S[LENGTH, : len(self.live)].tolist()]
        if all(alive):
            return
        done = [r for r, lives in zip(self.live, alive, strict=True) if not lives]
        request_M, slot_M = self._index(done), self._index([self.slot[r] for r in done])
        width = self.tokens.shape[1]
        self.tokens[request_M], self.logp[request_M] = b.tokens_SR[slot_M, :width], b.logp_SR[slot_M, :width]
        self.length[request_M], self.ended[request_M] = b.count_S[slot_M], b.ended_S[slot_M]
        if b.kept is not None and self.kept is not None:
            self.kept.start_RT[request_M] = b.kept.pool.start_SR[slot_M, :width]
            self.kept.size_RT[request_M] = b.kept.pool.size_SR[slot_M, :width]
        for r in done:
            self.free.append(self.slot[r])
            self.left[r // self.n] -= 1
            if not self.left[r // self.n]:
                self.free_prompts.append(self.prompt_row.pop(r // self.n))
        self.done += len(done)
        kept = [row for row, lives in enumerate(alive) if lives]
        b.state_5S[:, : len(kept)] = b.state_5S[:, self._index(kept)]
        b.state_5S[LENGTH, len(kept) : len(alive)] = DEAD
        self.live, self.age = [self.live[row] for row in kept], [self.age[row] for row in kept]

    def rollouts(self) -> list[list[Rollout]]:
        return read_rollouts(self.tokens, self.logp, self.length, self.ended, self.n, self.kept)


def _leave(stream: torch.cuda.Stream, pool: Any) -> None:
    """After a capture that failed: torch stays on its stream, its generator (and allocator, before 2.12) within it."""
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):  # it is out of it
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())  # which it would refuse to draw from until a capture ends


def buckets(rows: int) -> int:
    """The number of rows to decode for so many live ones: 8, 16, 32, 64, then multiples of 64."""
    return next((size for size in (8, 16, 32) if rows <= size), -(-rows // 64) * 64)
