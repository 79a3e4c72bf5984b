"""Decoding on a GPU: one step of all live rows is captured as a CUDA graph for each number of rows, and replayed.

A step reads the weights once and of the keys and values only what is alive; sampling and the books are part of it, so
that the host does nothing but start the next one, and looks every few steps at who is done (graph_batch.py). Prompts
have pages of their own, once for all samples of a group; a slot holds what one response has generated. A live row of
the batch names its prompt and its slot, so rows can be renumbered without moving a key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..console import first_line
from ..kernels.decode import PAGE, shared_samples
from ..kernels.logp import head_logits
from ..kernels.packed import Packing, pack, to_device
from ..kernels.sample import fused_sample
from ..kernels.step import begin_step, end_step
from .attention import logits_after
from .engine import Sampling
from .slots import Slots

ROOM = 64  # capacities are multiples of this, so that a slightly longer prompt needs no new graphs
MOST_GRAPHS = 64
# of a step: rows, sampling, whether kept sets are written, samples whose prompt is read for all of them at once
Kind = tuple[int, tuple[float, float, int, float], bool, int]


@dataclass(frozen=True)
class Timing:
    """Of the last generate: seconds in which prompts were read, in which tokens were decoded, and the steps of that."""

    prefill: float
    decode: float
    steps: int
    set_back: int = 0  # times that a response had to wait for pages
    begun_again: int = 0  # of these, times that the host had no room for what it held


class GraphDecoder:
    """Generates with up to ``slots`` rows. ``capture`` False: the same steps without graphs, on any device.

    ``cache_tokens``: that the pages hold in all; None: enough for the longest response in every slot. ``host_bytes``:
    for responses that wait for pages; None: as many as they take.
    """

    def __init__(
        self,
        model: Any,
        linear: bool,
        slots: int,
        capture: bool,
        warn: Callable[[str], None],
        cache_tokens: int | None = None,
        fp8: bool = False,
        host_bytes: int | None = None,
    ):
        self.model, self.linear, self.slots, self.capture, self.warn = model, linear, slots, capture, warn
        self.cache_tokens, self.fp8, self.page, self.host_bytes = cache_tokens, fp8, PAGE, host_bytes
        self.shares = True  # prompts are read once for several rows, where that pays
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
        wanted = slots, prompts, prompt_room, room
        if self.buffers is not None:
            if not self.weights_moved and all(a <= b for a, b in zip(wanted, self.buffers.sizes, strict=True)):
                return self.buffers
            wanted = tuple(max(pair) for pair in zip(wanted, self.buffers.sizes, strict=True))  # type: ignore[assignment]
        self.release()
        self.buffers = Slots(wanted, self.cache_tokens, self.page, self.fp8, self.model.device)
        self._weights = self._places_of_weights()
        return self.buffers

    @property
    def weights_moved(self) -> bool:
        """Since the buffers were made: then what was captured reads the wrong places."""
        return self._weights != self._places_of_weights()

    def _places_of_weights(self) -> list[int]:
        return [p.data_ptr() for p in self.model.parameters()]

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, rows: int, sampling: Sampling, n: int = 1, prompt: float = 0.0) -> None:
        """One more token for the first ``rows`` rows, the dead among them aside. About n neighbours have one prompt, of
        ``prompt`` tokens."""
        assert self.buffers is not None
        layers, samples = self.buffers.layers, 1
        if n > 1 and self.shares and layers:
            samples = shared_samples(n, rows, prompt, layers[0].token_bytes)
        key = rows, sampling.how, sampling.gives_kept, samples
        if key in self.graphs:
            self.graphs[key].replay()
            return
        # the first step of its kind is an ordinary one, which also warms up what is captured
        try:
            self._decode(rows, sampling, samples)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a chip that has no room for the kernel; no book has changed
            if samples == 1:
                raise
            self.step(rows, sampling)  # another error than the kernel's comes again
            self.shares = False
            self.warn(f"prompts are read for each row, which is slower: {first_line(error)}")
            return
        if self.capture:
            self._record(key, sampling)

    def _record(self, key: Kind, sampling: Sampling) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool):
                self._decode(key[0], sampling, key[3])
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

    def _decode(self, rows: int, sampling: Sampling, samples: int) -> None:
        b = self.buffers
        assert b is not None
        b.state_5A, b.samples = b.state_5S[:, :rows], samples
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
        # from the host without waiting: it may be asked for behind decoding steps that have still to run
        ids_PL = to_device(torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]), device)
        length_P = torch.tensor([len(prompt) for prompt in prompts])
        one_P1 = torch.ones(len(prompts), 1, dtype=torch.long)  # each with one token to come
        packing = pack(length_P, one_P1, width, device=device)
        row_N, pages = to_device(torch.tensor(rows), device)[packing.token_N // width], b.pages
        b.page_N = pages.prompts.page_RM[row_N, packing.position_N // pages.page].long()
        b.place_N = packing.position_N % pages.page
        return self._read(ids_PL, packing, packing.state_R)

    def read_again(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], rows: Sequence[tuple[int, int]]
    ) -> None:
        """Prompts and the tokens of responses to them, in one pass, into these rows of prompts and slots."""
        b, device = self.buffers, self.model.device
        assert b is not None
        width = max(len(prompt) + len(tokens) for prompt, tokens in sequences)
        longest = max(len(tokens) for _, tokens in sequences)
        ids = [[*prompt, *tokens, *[0] * (width - len(prompt) - len(tokens))] for prompt, tokens in sequences]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for _, tokens in sequences]
        ids_BL, mask_BT = torch.tensor(ids, device=device), torch.tensor(mask, device=device)
        start_B = torch.tensor([len(prompt) for prompt, _ in sequences], device=device)
        prompt_B, slot_B = torch.tensor(rows, device=device).T
        packing, pages = pack(start_B, mask_BT, width, prompt_B), b.pages
        row_N, position_N = packing.token_N // width, packing.position_N
        after_N = position_N - start_B[row_N]  # in the response
        of_prompt_N = pages.prompts.page_RM[prompt_B[row_N], position_N.clamp(max=b.prompt_room - 1) // pages.page]
        of_slot_N = pages.slots.page_RM[slot_B[row_N], after_N.clamp(min=0) // pages.page]
        b.page_N = torch.where(after_N < 0, of_prompt_N, of_slot_N).long()
        b.place_N = torch.where(after_N < 0, position_N, after_N) % pages.page
        self._read(ids_BL, packing, packing.state_R[:1])

    def _read(self, ids: Tensor, packing: Packing, last_R: Tensor) -> Tensor:
        """Into the pages that were named; the logits at these places of the pack."""
        b = self.buffers
        assert b is not None
        b.reading = packing
        try:
            logits = self._logits(ids.flatten()[packing.token_N][None], packing.position_N[None], last_R)
        finally:
            b.reading = None
        if not b.layers:
            raise NotImplementedError("it keeps no keys and values in its cache")
        return logits


def _leave(stream: torch.cuda.Stream, pool: Any) -> None:
    """After a capture that failed: torch stays on its stream, its generator (and allocator, before 2.12) within it."""
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):  # it is out of it
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())  # which it would refuse to draw from until a capture ends
