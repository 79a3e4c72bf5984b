"""A call of generate on a GPU: who is decoded when, in which slot, on which pages, and what came of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from ..kernels.merged import merging
from ..kernels.packed import to_device
from ..kernels.sample import fused_sample
from ..kernels.sample_torch import uniform_table
from ..kernels.step import DEAD, LENGTH, end_step
from .attention import attending
from .engine import Rollout, Sampling, read_rollouts
from .graphs import GraphDecoder, Timing
from .kept import KeptPool, KeptStore
from .pages import SetBack, from_host, page_bytes, to_host

LOOK_EVERY = 8  # steps between two looks at who is done
READ_TOKENS = 32768  # prompt tokens in one pass
MEAN_OF = 256  # prompts, for the length that a step may count on
FIRST_ROWS = 128  # first tokens drawn at once


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
        self.decoder, self.n, self.sampling = decoder, n, sampling
        self.prompts = list(prompts)
        device, total = decoder.model.device, len(prompts) * n
        self.buffers = b = decoder.prepare(*self._sizes(), sampling.max_new_tokens)
        b.state_5S.fill_(DEAD)
        b.pages.reset()
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
        self.waiting: list[SetBack] = []  # for pages
        self.prompt_row: dict[int, int] = {}  # of each prompt that is in the cache
        self.free_prompts = list(range(b.prompts))[::-1]
        self.undone = [n] * len(prompts)  # samples of each prompt that are not done
        self.pending: dict[int, Tensor] = {}  # logits after the prompt that was read last, of which more may be begun
        self.queue = deque(range(total))  # requests that are still to be begun
        self.done = self.set_back = self.begun_again = 0
        self.steps = self.row_steps = 0  # decoding steps, and those of all rows

    def _sizes(self) -> tuple[int, int, int]:
        """Slots, prompts in the cache at the same time, and the longest of them."""
        slots = min(self.decoder.slots, buckets(len(self.prompts) * self.n))
        rows = min(len(self.prompts), 2 * -(-slots // self.n) + 8, slots)
        return slots, rows, max(self.decoder.longest_prompt, *map(len, self.prompts))

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        prefill = decode = 0.0
        with attending(self.decoder.model, self.buffers), merging():
            while self.done < len(self.slot):
                begin = perf_counter()
                if self._admit():
                    self._look()  # some end with their first token
                    prefill += perf_counter() - begin
                    begin = perf_counter()
                if self.live:
                    self._decode()
                    decode += perf_counter() - begin
                if progress is not None:
                    progress(self.done)
        if self.buffers.kept is not None and self.kept is not None:
            self.buffers.kept.spill(self.kept, last=True)
        self.decoder.timing = Timing(prefill, decode, self.steps, self.set_back, self.begun_again)

    def _decode(self) -> None:
        """A few steps of all live rows, and a look at who is done."""
        self._start_steps()
        self._look()

    def _start_steps(self) -> None:
        """The device has them to do; nobody waits for it."""
        count = min(LOOK_EVERY, self.sampling.max_new_tokens - 1 - min(self.age))
        self._take_pages(count)
        rows = min(buckets(len(self.live)), self.buffers.slots)
        self.steps, self.row_steps = self.steps + count, self.row_steps + count * len(self.live)
        known = self.prompts[-MEAN_OF:]
        prompt = sum(map(len, known)) / len(known)
        for _ in range(count):
            self.decoder.step(rows, self.sampling, self.n, prompt)
        self.age = [age + count for age in self.age]

    # ---- who comes ---------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Begin requests, when enough slots are free to be worth a pass over their prompts. Those set back go first."""
        if self.waiting:
            return self._resume()
        if not self.queue or (self.live and not self._worth_a_pass()):
            return False
        requests: list[int] = []
        fresh: list[int] = []
        pages, longest = self.buffers.pages, self.sampling.max_new_tokens
        spare = len(pages.free) - len(self.live)  # when every live row has taken one more
        held = pages.prompt_pages + pages.needed(longest)  # when all but one row are set back
        while len(requests) < len(self.free) and self.queue:
            prompt = self.queue[0] // self.n
            size = 0 if prompt in self.prompt_row else pages.needed(len(self.prompts[prompt]))
            if spare < size + 1 and (requests or self.live):
                break
            if size:
                if not self.free_prompts or held + size > pages.count:
                    break
                self.prompt_row[prompt] = self.free_prompts.pop()
            if prompt not in self.pending and prompt not in fresh[-1:]:
                fresh.append(prompt)
            spare, held = spare - size - 1, held + size
            requests.append(self.queue.popleft())
        rows = [self.prompt_row[i] for i in fresh]
        pages.extend(pages.prompts, rows, [len(self.prompts[i]) for i in fresh])
        waiting = [r for r in requests if r // self.n in self.pending]
        if waiting:
            self._begin(waiting, self.pending[waiting[0] // self.n].expand(len(waiting), -1))
        for chunk in self._chunks(fresh):
            logits = self.decoder.read([self.prompts[i] for i in chunk], [self.prompt_row[i] for i in chunk])
            place = {prompt: k for k, prompt in enumerate(chunk)}
            begun = [r for r in requests if r // self.n in place]
            for i in range(0, len(begun), FIRST_ROWS):
                some = begun[i : i + FIRST_ROWS]
                which = self._index([place[r // self.n] for r in some])
                self._begin(some, logits[which])
            self.pending = {chunk[-1]: logits[-1:].clone()}
        return bool(requests)

    def _worth_a_pass(self) -> bool:
        return len(self.free) >= max(1, self.buffers.slots // 8)

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
        rows.copy_(to_device(torch.tensor(columns, dtype=torch.int32), rows.device).T)
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
        return to_device(torch.tensor(values, dtype=torch.long), self.buffers.state_5S.device)

    # ---- who has pages -----------------------------------------------------------------------------------------------

    def _take_pages(self, count: int) -> None:
        """For so many more tokens of every live row. Where there are too few, the youngest rows are set back."""
        pages, most = self.buffers.pages, self.sampling.max_new_tokens  # rows that are older than others end on the way
        slots, tokens = [self.slot[r] for r in self.live], np.minimum(np.array(self.age) + count, most)
        missing = pages.missing(slots, tokens)
        short = int(missing.sum()) - len(pages.free)
        if short > 0:
            going = set()
            for row in sorted(range(len(self.live)), key=lambda row: (self.age[row], -row))[:-1]:
                if short <= 0:
                    break
                short -= int(missing[row]) + len(pages.slots.pages[self.slot[self.live[row]]])
                going.add(row)
            self._set_back(sorted(going))
            stay = [row for row in range(len(slots)) if row not in going]
            slots, tokens, missing = [slots[row] for row in stay], tokens[stay], missing[stay]
        lack = missing.nonzero()[0].tolist()
        pages.extend(pages.slots, [slots[row] for row in lack], tokens[lack].tolist())

    def _set_back(self, rows: Sequence[int]) -> None:
        """The oldest of these rows go to the host, as far as it has room; the others will begin again."""
        b, requests, ages = self.buffers, [self.live[row] for row in rows], [self.age[row] for row in rows]
        slots = [self.slot[r] for r in requests]
        columns, first = b.state_5S[:, self._index(rows)].cpu(), b.tokens_SR[self._index(slots), 0].tolist()
        room, kept = self._room_on_host(), set()
        for i in sorted(range(len(rows)), key=ages.__getitem__, reverse=True):
            if b.pages.needed(ages[i]) <= room:
                room -= b.pages.needed(ages[i])
                kept.add(i)
        held = [b.pages.slots.pages[slot][: b.pages.needed(age)] for age, slot in zip(ages, slots, strict=True)]
        # each row's by themselves: the host has their place again when they are back
        copies = (to_host(b.layers, [held[i]])[0] for i in sorted(kept))
        for i, (r, age, slot) in enumerate(zip(requests, ages, slots, strict=True)):
            if i in kept:
                self.waiting.append(SetBack(r, age, columns[:, i], next(copies)))
            else:
                self._begin_again(r, age, first[i], columns[:, i])
            b.pages.drop(b.pages.slots, slot)
        self.set_back += len(rows)
        self.begun_again += len(rows) - len(kept)
        self._keep([row for row in range(len(self.live)) if row not in rows])

    def _begin_again(self, request: int, age: int, first: int, state_5: Tensor) -> None:
        self.waiting.append(SetBack.from_first_token(request, first, state_5))

    def _room_on_host(self) -> float:
        """Pages that those who wait may still have there."""
        if self.decoder.host_bytes is None:
            return math.inf
        held = sum(self.buffers.pages.needed(back.age) for back in self.waiting)
        return self.decoder.host_bytes // page_bytes(self.buffers.layers) - held

    def _resume(self) -> bool:
        """Those that wait, the first of them first, while every live row may still take one more page."""
        b, pages, before = self.buffers, self.buffers.pages, len(self.live)
        while self.waiting:
            back, live = self.waiting[0], len(self.live)
            if live and len(pages.free) < pages.needed(back.age) + live + 1:
                break
            slot = self.slot[back.request]
            pages.extend(pages.slots, [slot], [back.age])
            from_host(b.layers, [pages.slots.pages[slot]], [back.copies])
            b.state_5S[:, live] = back.state_5.to(b.state_5S.device)
            self.live.append(back.request)
            self.age.append(back.age)
            self.waiting.pop(0)
        return len(self.live) > before

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
        self._take(done)
        for r in done:
            self.free.append(self.slot[r])
            b.pages.drop(b.pages.slots, self.slot[r])
            self.undone[r // self.n] -= 1
            if not self.undone[r // self.n]:
                row = self.prompt_row.pop(r // self.n)
                b.pages.drop(b.pages.prompts, row)
                self.free_prompts.append(row)
        self._note_done(done)
        self._keep([row for row, lives in enumerate(alive) if lives])

    def _take(self, done: Sequence[int]) -> None:
        """What became of them, out of their slots."""
        b, width = self.buffers, self.tokens.shape[1]
        request_M, slot_M = self._index(done), self._index([self.slot[r] for r in done])
        self.tokens[request_M], self.logp[request_M] = b.tokens_SR[slot_M, :width], b.logp_SR[slot_M, :width]
        self.length[request_M], self.ended[request_M] = b.count_S[slot_M], b.ended_S[slot_M]
        if b.kept is not None and self.kept is not None:
            self.kept.start_RT[request_M] = b.kept.pool.start_SR[slot_M, :width]
            self.kept.size_RT[request_M] = b.kept.pool.size_SR[slot_M, :width]

    def _note_done(self, requests: Sequence[int]) -> None:
        self.done += len(requests)

    def _keep(self, rows: Sequence[int]) -> None:
        """These live rows go on, close together."""
        b = self.buffers
        b.state_5S[:, : len(rows)] = b.state_5S[:, self._index(rows)]
        b.state_5S[LENGTH, len(rows) : len(self.live)] = DEAD
        self.live, self.age = [self.live[row] for row in rows], [self.age[row] for row in rows]

    def rollouts(self) -> list[list[Rollout]]:
        return read_rollouts(self.tokens, self.logp, self.length, self.ended, self.n, self.kept)


def buckets(rows: int) -> int:
    """The number of rows to decode for so many live ones: 8, 16, 32, 64, then multiples of 64."""
    return next((size for size in (8, 16, 32) if rows <= size), -(-rows // 64) * 64)
