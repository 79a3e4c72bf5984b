"""The native engine: the trainer's own model, its keys and values in slots, finished slots refilled from the queue.

There is no copy of the weights and nothing to synchronise. Any transformers model that calls its attention through the
attention interface and keeps keys and values in a cache works; prompts of a group are read once and shared.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..console import first_line
from ..kernels.decode import FP8, WITH_8_BITS, has_8_bits
from ..kernels.fused import fuse
from ..kernels.layer import write_out
from ..kernels.merged import merge
from ..models.architecture import head_is_linear
from ..models.loading import end_ids_of
from .eager import EagerBatch
from .engine import Rollout, Sampling, nothing_to_sample
from .flight import Feed, Underway
from .graph_batch import GraphBatch
from .graphs import GraphDecoder, Timing
from .self_check import check_8_bits, check_engine
from .slots import END_ROOM
from .stream import EagerStream, GraphStream, Outgrown, Stream


class NativeEngine:
    """``slots`` sequences are decoded at the same time. ``warn`` is told when memory allows fewer.

    On a GPU decoding steps are replayed CUDA graphs (graphs.py), elsewhere plain ones (eager.py); ``graphs`` overrides.
    ``end_ids`` end a response (Policy.end_ids); None: the tokenizer's and the generation config's. On a GPU keys and
    values lie in pages, for ``cache_tokens`` tokens in all: rows take them as they grow, and the youngest wait when
    there are none left, in at most ``host_bytes`` of host memory. ``cache_dtype`` torch.float8_e4m3fn: in 8 bits, with
    a scale for each token and head.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        slots: int = 256,
        warn: Callable[[str], None] = lambda text: None,
        graphs: bool | None = None,
        end_ids: Sequence[int] | None = None,
        *,
        cache_tokens: int | None = None,
        cache_dtype: torch.dtype | None = None,
        host_bytes: int | None = None,
    ):
        self.model, self.slots, self.warn = model, slots, warn
        self.busy = 0.0  # share of the slots' time that was decoding, in the last call
        self.stopped: Stream | None = None  # decoding that may go on where it was: its keys and values are there still
        self.end_ids = sorted(set(end_ids_of(tokenizer, model.generation_config) if end_ids is None else end_ids))
        if not self.end_ids:
            raise ValueError("the model has no end token: neither its tokenizer nor its generation config names one")
        on_gpu = model.device.type == "cuda"
        self.decoder: GraphDecoder | None = None
        if (on_gpu if graphs is None else graphs) and len(self.end_ids) <= END_ROOM:
            fuse(model)
            merge(model)
            write_out(model)
            cache = cache_tokens, cache_dtype == FP8, host_bytes
            self.decoder = GraphDecoder(model, head_is_linear(model), slots, on_gpu, warn, *cache)
        if cache_dtype not in (None, FP8):
            raise ValueError(f"a cache of {cache_dtype} is not known: None or {FP8}")
        if cache_dtype is not None and (self.decoder is None or (on_gpu and not has_8_bits(model.device))):
            raise ValueError(f"a cache in 8 bits needs {WITH_8_BITS}: leave rollout.cache_dtype away")
        try:
            self._try_out()
        except ValueError as error:
            if self.decoder is None or self.decoder.fp8:
                raise
            self.decoder = None  # what its kernels do not know (more heads to a key, wider values) plain steps may
            self._try_out()
            warn(f"decoding step by step, which is slow: {str(error).partition(': ')[2]}")

    @property
    def timing(self) -> Timing | None:
        """Of the last generate, where it is measured."""
        return None if self.decoder is None else self.decoder.timing

    def expect(self, longest_prompt: int) -> None:
        """Prompts of up to so many tokens will come: make room for them at once."""
        if self.decoder is not None:
            self.decoder.longest_prompt = longest_prompt

    def sync(self) -> None:
        """Nothing to do: the weights are the trainer's own."""

    def release(self) -> None:
        """Give back what is held between two calls: caches and graphs. The next call makes new ones."""
        self._clear()
        if self.decoder is not None:
            self.decoder.release()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _try_out(self) -> None:
        """An architecture that does not fit is refused."""
        try:
            if getattr(self.model.config.get_text_config(), "attention_chunk_size", None) is not None:
                raise NotImplementedError("attention in chunks")
            exact = self.decoder is None or not self.decoder.fp8
            check_engine(self.model, lambda prompts: self._generate(prompts, 2, Sampling(3), 0, 3, []), exact=exact)
            if self.decoder is not None and self.decoder.buffers is not None and self.decoder.fp8:
                with torch.cuda.device_of(next(self.model.parameters())):  # type: ignore[no-untyped-call]
                    check_8_bits(self.decoder.buffers.layers, self.model.dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"the native engine cannot run {type(self.model).__name__}: {first_line(error)}"
            ) from error

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int = 1,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        kept: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Rollout]]:
        """See ``Engine``. Out of memory: the same responses again, with half the slots."""
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_p, kept)
        if nothing_to_sample(prompt_ids, n):
            return [[] for _ in prompt_ids]
        while True:
            try:
                return self._generate(prompt_ids, n, sampling, seed, self.slots, self.end_ids, progress)
            except torch.OutOfMemoryError:
                if self.slots == 1:
                    raise
            # outside of the except clause: the error's traceback holds the tensors that have to go
            self._halve(min(self.slots, n * len(prompt_ids)))

    def _halve(self, slots: int) -> None:
        """Of ``slots``, which were too many."""
        self.release()
        self.slots = slots // 2 or 1
        if self.decoder is not None and self.decoder.cache_tokens is not None:
            self.decoder.cache_tokens //= 2
        self.warn(f"out of memory: sampling with {self.slots} slots from here on")

    @torch.inference_mode()
    def stream(self, prompt: Sequence[int], sampling: Sampling, seed: int = 0) -> Iterator[int]:
        """One response, token by token: the tokens that ``generate`` gives, the end token among them."""
        if not nothing_to_sample([prompt], 1):
            yield from EagerBatch(self.model, self.end_ids, [prompt], 1, sampling, seed, 1).stream()

    @torch.inference_mode()
    def decode(
        self,
        groups: Sequence[Underway],
        n: int,
        sampling: Sampling,
        feed: Feed,
        version: int = 0,
        keep_cache: bool = False,
        longest_prompt: int = 0,
    ) -> list[Underway]:
        """Go on with ``groups``, and with what ``feed`` gives as others end, until it says to stop; what is under way
        then. Tokens are drawn from the weights as they are now, and are marked with ``version``.

        Keys and values of earlier weights are computed anew, unless they come along: with ``keep_cache`` they do, from
        call to call. On a GPU they stay where they are until somebody else wants the place. Out of memory: goes on with
        half the slots. See flight.py.
        """
        if not sampling.whole:
            raise ValueError("responses under way need top_p 1, top_k 0, min_p 0 and a temperature above 0")
        groups = list(groups)
        stopped = self._stopped_with(groups, n, sampling) if keep_cache else None
        if stopped is None:
            self._clear()
        while True:
            batch: EagerStream | GraphStream | None = None
            try:
                with torch.cuda.device_of(next(self.model.parameters())):  # type: ignore[no-untyped-call]
                    if stopped is None:
                        batch = self._stream(n, sampling, version, longest_prompt)
                        batch.go_on(groups, feed)
                    else:
                        batch, stopped, self.stopped = stopped, None, None
                        batch.go_on_as(version)
                        batch.go_on([], feed)
                    self.busy = batch.row_steps / max(1, batch.steps * self.slots)
                    groups = batch.left(keep_cache)
                    self.stopped = batch if keep_cache and groups else None
                    if self.decoder is None:
                        self._clear()
                    return groups
            except (Outgrown, torch.OutOfMemoryError) as error:
                groups = groups if batch is None else batch.left()
                outgrown = isinstance(error, Outgrown)
                if not outgrown and self.slots == 1:
                    raise
            # outside of the except clause, as in generate; what is too small has to go before there is a larger one
            del batch
            if outgrown:
                longest_prompt = max(len(group.prompt) for group in groups)
            else:
                self._halve(self.slots)

    def copy_cache(self) -> None:
        """What is under way has its keys and values on the host as well, if they are kept: for a checkpoint."""
        if self.stopped is not None:
            self.stopped.copy_cache()

    def _clear(self) -> None:
        """Keys and values of what is under way make room: they go to the host."""
        self.copy_cache()
        self.stopped = None

    def _stopped_with(self, groups: Sequence[Underway], n: int, sampling: Sampling) -> GraphStream | None:
        """The decoding that stopped with these groups, if nobody has used its place or moved a weight since."""
        batch = self.stopped
        if not isinstance(batch, GraphStream) or self.decoder is None or batch.buffers is not self.decoder.buffers:
            return None
        there = [batch.groups[i] for i in (*batch.over, *batch.unfinished)]
        same = len(there) == len(groups) and all(one is other for one, other in zip(there, groups, strict=True))
        fits = (n, sampling) == (batch.n, batch.sampling) and not self.decoder.weights_moved
        return batch if same and fits else None

    def _stream(self, n: int, sampling: Sampling, version: int, longest: int) -> EagerStream | GraphStream:
        if self.decoder is None:
            return EagerStream(self.model, self.end_ids, n, sampling, self.slots, longest, version)
        self.decoder.slots = self.slots
        return GraphStream(self.decoder, self.end_ids, n, sampling, longest, version)

    @torch.inference_mode()
    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seed: int,
        slots: int,
        end_ids: Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Rollout]]:
        batch: EagerBatch | GraphBatch
        self._clear()
        # kernels and graphs are of the current device
        with torch.cuda.device_of(next(self.model.parameters())):  # type: ignore[no-untyped-call]
            if self.decoder is None:
                batch = EagerBatch(self.model, end_ids, prompts, n, sampling, seed, min(slots, n * len(prompts)))
            else:
                self.decoder.slots = slots
                batch = GraphBatch(self.decoder, end_ids, prompts, n, sampling, seed)
            batch.run(progress)
            self.busy = batch.row_steps / max(1, batch.steps * slots)
            return batch.rollouts()
