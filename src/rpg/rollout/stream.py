"""Decoding that goes on from responses under way, and takes new groups as others end: on any device, and on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.merged import merging
from ..kernels.packed import to_device
from ..kernels.sample_torch import uniform_table
from ..kernels.step import DEAD, LENGTH
from .attention import attending
from .eager import EagerBatch
from .engine import Sampling
from .flight import Feed, Partial, Underway
from .graph_batch import READ_TOKENS, GraphBatch
from .graphs import GraphDecoder
from .pages import from_host, to_host

LOTS = 4  # so large a part of the slots is to be free, and so many responses beside those under way to be begun


class Outgrown(Exception):
    """A prompt is longer than there is room for: what is under way has to go on from larger buffers."""


Rows = dict[int, tuple[list[int], list[float], bool]]


def _listed(
    requests: Sequence[int],
    places: Sequence[int],
    tokens: Tensor,
    logp: Tensor,
    sizes: Mapping[int, int] | Sequence[int],
    ended: Mapping[int, int] | Sequence[int],
) -> Rows:
    """These places of two tables, of each as many as its request has, in one copy to the host."""
    if not requests:
        return {}
    wanted = [sizes[r] for r in requests]
    at = torch.tensor(places, device=tokens.device)
    tokens_RT, logp_RT = tokens[at, : max(wanted)].cpu().numpy(), logp[at, : max(wanted)].cpu().numpy()
    rows = zip(requests, wanted, tokens_RT, logp_RT, strict=True)
    return {r: (tokens_T[:size].tolist(), logp_T[:size].tolist(), bool(ended[r])) for r, size, tokens_T, logp_T in rows}


class Stream:
    """``go_on`` with what is under way; what ``left`` gives then is under way. Request r is part r % n of group r // n.

    The keys of what was under way are computed anew, from the weights as they are now, unless they come along.
    """

    n: int
    sampling: Sampling
    prompts: list[Sequence[int]]
    queue: deque[int]
    uniform: Tensor
    tokens: Tensor
    logp: Tensor
    length: Tensor
    ended: Tensor
    steps: int
    row_steps: int

    def _open_books(self, version: int) -> None:
        self.version = version
        self.prompts = []
        self.groups: list[Underway] = []
        self.coming: Sequence[Underway] = ()  # given, and not in the books yet: there may be no memory for them
        self.unfinished: dict[int, int] = {}  # groups that are not over: how many of their responses are not
        self.over: list[int] = []  # groups that are, since they were last asked for
        self.begun: deque[int] = deque()  # requests that have tokens and are to be admitted: before those of the queue

    def go_on(self, groups: Sequence[Underway], feed: Feed) -> None:
        """Until ``feed`` says to stop, or has no more to give."""
        self._add(groups)
        with self._within():
            self._come_back()
            more = self._ask(feed)
            while more is not None:
                self._add(more)
                if not self.unfinished and not self.over:
                    break
                while not self.over:
                    self._advance()
                more = self._ask(feed)
            self._settle()

    def _ask(self, feed: Feed) -> list[Underway] | None:
        self._start_next_steps()
        over, self.over = self._read_back(self.over), []
        return feed(over, len(self.unfinished))

    def left(self, keep_cache: bool = False) -> list[Underway]:
        """The groups that are not over, as far as they have got. With ``keep_cache`` the keys and values of their
        tokens are to be had from ``copy_cache``, as long as nobody else has used the engine."""
        groups = self._read_back([*self.over, *self.unfinished])  # feed has not been told of those that are over
        groups += self.coming
        if keep_cache:
            return groups
        for group in groups:
            group.cache = []
            for part in group.parts:
                part.cache = []
        return groups

    def _add(self, groups: Sequence[Underway]) -> None:
        if not groups:
            return
        self.coming = groups
        width, first, rows = self.sampling.max_new_tokens, len(self.groups), len(groups) * self.n
        tables = [uniform_table(group.seed, [group.prompt], self.n, width) for group in groups]
        self.uniform = torch.cat([self.uniform, to_device(torch.cat(tables), self.uniform.device)])
        self._make_room(rows)
        self.coming = ()
        self.groups += groups
        self.prompts += [group.prompt for group in groups]
        for i, group in enumerate(groups, first):
            if group.over:
                self.over.append(i)
            else:
                self.unfinished[i] = sum(not part.over for part in group.parts)
            for r, part in enumerate(group.parts, i * self.n):
                if not part.over:
                    (self.begun if part.tokens else self.queue).append(r)

    def _part(self, request: int) -> Partial:
        return self.groups[request // self.n].parts[request % self.n]

    def _note_done(self, requests: Sequence[int] | Tensor) -> None:
        for r in requests if isinstance(requests, list) else requests.tolist():  # type: ignore[union-attr]
            self._part(r).over = True
            self.unfinished[r // self.n] -= 1
            if not self.unfinished[r // self.n]:
                del self.unfinished[r // self.n]
                self.over.append(r // self.n)

    def _read_back(self, places: Sequence[int]) -> list[Underway]:
        """These groups, with what was drawn since they came."""
        rows = self._rows([r for i in places for r in range(i * self.n, (i + 1) * self.n)])
        for r, (tokens, logp, ended) in rows.items():
            part = self._part(r)
            if len(tokens) > len(part.tokens):
                part.drawn(tokens, logp, self.version, part.over and ended, part.over)
        return [self.groups[i] for i in places]

    # ---- each way has its own ----------------------------------------------------------------------------------------

    def _within(self) -> AbstractContextManager[Any]:
        """While it decodes."""
        raise NotImplementedError

    def _advance(self) -> None:
        """Admit whom there is room for, and draw more tokens."""
        raise NotImplementedError

    def _make_room(self, requests: int) -> None:
        """For what becomes of so many more."""

    def _come_back(self) -> None:
        """Those that were under way go on, before anything is asked of feed."""

    def _start_next_steps(self) -> None:
        """The device may decode while feed is asked."""

    def _settle(self) -> None:
        """Nothing is asked of the device any more."""

    def _rows(self, requests: Sequence[int]) -> Rows:
        """Of each: its tokens, their log-probabilities, and whether an end token was the last. No tokens of what is not
        begun, or was over before."""
        raise NotImplementedError

    def copy_cache(self) -> None:
        """The keys and values of all responses under way, to the host."""
        raise NotImplementedError


class EagerStream(Stream, EagerBatch):
    """Step by step, on any device. ``longest``: of the prompts."""

    def __init__(
        self,
        model: Any,
        end_ids: Sequence[int],
        n: int,
        sampling: Sampling,
        slots: int,
        longest: int,
        version: int,
    ):
        EagerBatch.__init__(self, model, end_ids, [], n, sampling, 0, slots)
        self._open_books(version)
        self.room = longest

    def _within(self) -> AbstractContextManager[Any]:
        return attending(self.model, self.cache)

    def _add(self, groups: Sequence[Underway]) -> None:
        super()._add(groups)
        self.room = max(self.room, *(len(group.prompt) for group in groups)) if groups else self.room
        self.cache.capacity = self.room + self.sampling.max_new_tokens

    def _make_room(self, requests: int) -> None:
        for name in ("tokens", "logp", "length", "ended"):
            table = getattr(self, name)
            setattr(self, name, torch.cat([table, table.new_zeros(requests, *table.shape[1:])]))

    def _advance(self) -> None:
        self._enter()
        if not self.begun:
            self._refill()
        if not self.over:
            self._step()

    def _more_to_come(self) -> bool:
        return True  # groups are given on the way

    def _rows(self, requests: Sequence[int]) -> Rows:
        return _listed(requests, requests, self.tokens, self.logp, self.length.tolist(), self.ended.tolist())

    def _enter(self) -> None:
        """Responses that have tokens go on: all of these but the newest belong into the cache."""
        while self.begun and len(self.request_A) < self.cache.slots:
            live, requests, longest = len(self.request_A), list[int](), 0
            while self.begun and live + len(requests) < self.cache.slots:
                size = self._held(self.begun[0])
                if requests and (len(requests) + 1) * max(longest, size) > READ_TOKENS:
                    break
                if requests and bool(self._part(requests[0]).cache) != bool(self._part(self.begun[0]).cache):
                    break  # some came without theirs: they are computed anew
                longest = max(longest, size)
                requests.append(self.begun.popleft())
            if self._part(requests[0]).cache:
                for row, r in enumerate(requests, live):
                    self.cache.put(row, self._part(r).cache, row)
            else:
                parts = ((self.prompts[r // self.n], self._part(r)) for r in requests)
                self._read([[*prompt, *part.tokens[:-1]] for prompt, part in parts])
                self.cache.admit(live, torch.arange(len(requests), device=self.device))
            for r in requests:
                part, size = self._part(r), len(self._part(r).tokens)
                self.tokens[r, :size], self.length[r] = self._tensor(part.tokens), size
                self.logp[r, :size] = torch.tensor(part.logp, device=self.device)
            held = self._tensor([self._held(r) for r in requests])
            self.request_A = torch.cat([self.request_A, self._tensor(requests)])
            self.cache.position_A = torch.cat([self.cache.position_A, held])

    def _held(self, request: int) -> int:
        """Tokens of this request that belong into the cache."""
        return len(self.prompts[request // self.n]) + len(self._part(request).tokens) - 1

    def copy_cache(self) -> None:
        for row, r in enumerate(self.request_A.tolist()):
            self._part(r).cache = self.cache.copy(row, int(self.cache.position_A[row]))


class GraphStream(Stream, GraphBatch):
    """By replayed graphs, on a GPU. It has its next steps to do before anything else is done: what has ended is read
    and scored, and new prompts are encoded and read, while it decodes.

    While steps are under way (``running``), rows may be added behind those that are decoded, in pages and slots that
    are free. Nothing is taken from a row, and no page given back, before ``_look`` has waited for the steps.
    """

    def __init__(
        self, decoder: GraphDecoder, end_ids: Sequence[int], n: int, sampling: Sampling, longest: int, version: int
    ):
        self.longest, self.running = longest, False
        self.results: Rows = {}  # of requests that are done, until their group is
        GraphBatch.__init__(self, decoder, end_ids, [], n, sampling, 0)
        self._open_books(version)

    def _sizes(self) -> tuple[int, int, int]:
        return self.decoder.slots, self.decoder.slots, max(self.decoder.longest_prompt, self.longest)

    def _within(self) -> AbstractContextManager[Any]:
        both = ExitStack()
        both.enter_context(attending(self.decoder.model, self.buffers))
        both.enter_context(merging())
        return both

    def _add(self, groups: Sequence[Underway]) -> None:
        super()._add(groups)
        self.slot += [-1] * len(groups) * self.n
        self.undone += [self.unfinished.get(i, 0) for i in range(len(self.groups) - len(groups), len(self.groups))]
        if any(len(group.prompt) > self.buffers.prompt_room for group in groups):
            raise Outgrown

    def _advance(self) -> None:
        self._begin_steps()
        self._come_back()
        if not self.begun or self.waiting:
            self._admit()
        self._look()  # some end with their first token
        self.running = False

    def _come_back(self) -> None:
        while self.begun and not self.waiting and self._enter():
            pass

    def _start_next_steps(self) -> None:
        self._begin_steps()

    def _begin_steps(self) -> None:
        if self.live and not self.running:
            self._start_steps()
            self.running = True

    def _settle(self) -> None:
        if self.running:
            self._look()
            self.running = False

    def _worth_a_pass(self) -> bool:
        """A pass over few prompts takes as long as one over many, and groups come as others end: a few at a time."""
        return len(self.free) >= max(1, self.buffers.slots // LOTS) and len(self.queue) >= len(self.live) // LOTS

    def _take(self, done: Sequence[int]) -> None:
        """To the host at once: nothing is asked of the device just now, and soon it will have steps to do."""
        b, slots = self.buffers, [self.slot[r] for r in done]
        size_M, ended_M = torch.stack([b.count_S, b.ended_S])[:, self._index(slots)].tolist()
        sizes, ended = dict(zip(done, size_M, strict=True)), dict(zip(done, ended_M, strict=True))
        self.results |= _listed(done, slots, b.tokens_SR, b.logp_SR, sizes, ended)

    def _rows(self, requests: Sequence[int]) -> Rows:
        found = {r: self.results.pop(r) for r in requests if r in self.results}
        live = [r for r in requests if self.slot[r] >= 0 and not self._part(r).over]
        return found | (self._live_rows(live) if live else {})

    def _live_rows(self, requests: Sequence[int]) -> Rows:
        b = self.buffers
        ages = dict(zip(self.live, self.age, strict=True)) | {back.request: back.age for back in self.waiting}
        for r, length in zip(self.live, b.state_5S[LENGTH, : len(self.live)].tolist(), strict=True):
            if length == DEAD:  # after an error: it has ended and nobody has looked. Its last token is drawn again
                ages[r] = int(b.count_S[self.slot[r]]) - 2
        lives = {r: ages[r] + 1 for r in requests if r in ages}
        slots, nothing = [self.slot[r] for r in lives], dict.fromkeys(lives, 0)
        return _listed(list(lives), slots, b.tokens_SR, b.logp_SR, lives, nothing)

    def _enter(self) -> bool:
        """Responses that have tokens go on: all of these but the newest belong into the cache."""
        pages = self.buffers.pages
        requests, tokens = list[int](), 0
        spare, held = len(pages.free) - len(self.live), pages.prompt_pages + pages.needed(self.sampling.max_new_tokens)
        while self.begun and self.free:
            r = self.begun[0]
            i, age = r // self.n, self._age(r)
            size = 0 if i in self.prompt_row else pages.needed(len(self.prompts[i]))
            if (spare < size + pages.needed(age) + 1 or tokens > READ_TOKENS) and (requests or self.live):
                break
            if size:
                if not self.free_prompts or held + size > pages.count:
                    break
                self.prompt_row[i] = self.free_prompts.pop()
                pages.extend(pages.prompts, [self.prompt_row[i]], [len(self.prompts[i])])
            self.slot[r] = self.free.pop()
            pages.extend(pages.slots, [self.slot[r]], [age])
            spare, held = spare - size - pages.needed(age) - 1, held + size
            tokens += len(self.prompts[i]) + age
            requests.append(self.begun.popleft())
        if requests:
            self._restore_cache(requests)
            self._restore_rows(requests)
        return bool(requests)

    def _restore_cache(self, requests: Sequence[int]) -> None:
        b, pages = self.buffers, self.buffers.pages
        kept = [r for r in requests if self._part(r).cache or (self._age(r) == 0 and self.groups[r // self.n].cache)]
        if kept and not b.layers:  # they are made when a first prompt is read
            self.decoder.read([self.prompts[kept[0] // self.n]], [self.prompt_row[kept[0] // self.n]])
        came = [i for i in dict.fromkeys(r // self.n for r in kept) if self.groups[i].cache]
        begun = [r for r in kept if pages.slots.pages[self.slot[r]]]
        held = [pages.prompts.pages[self.prompt_row[i]] for i in came]
        held += [pages.slots.pages[self.slot[r]] for r in begun]
        from_host(b.layers, held, [self.groups[i].cache for i in came] + [self._part(r).cache for r in begun])
        again = [r for r in requests if r not in kept]
        if again:
            sequences = [(self.prompts[r // self.n], self._part(r).tokens) for r in again]
            self.decoder.read_again(sequences, [(self.prompt_row[r // self.n], self.slot[r]) for r in again])

    def _age(self, request: int) -> int:
        """Tokens of this response that belong into the cache."""
        return len(self._part(request).tokens) - 1

    def _restore_rows(self, requests: Sequence[int]) -> None:
        b, begin, width = self.buffers, len(self.live), self.uniform.shape[1]
        columns = []
        for r in requests:
            part, prompt = self._part(r), self.prompts[r // self.n]
            columns.append(
                [self.prompt_row[r // self.n], len(prompt), self.slot[r], len(part.tokens) - 1, part.tokens[-1]]
            )
            b.tokens_SR[self.slot[r], : len(part.tokens)] = torch.tensor(part.tokens).to(b.tokens_SR)
            b.logp_SR[self.slot[r], : len(part.logp)] = torch.tensor(part.logp).to(b.logp_SR)
        b.state_5S[:, begin : begin + len(requests)] = torch.tensor(columns).T.to(b.state_5S)
        b.uniform_SR[self._index([self.slot[r] for r in requests]), :width] = self.uniform[self._index(requests)]
        self.live += requests
        self.age += [self._age(r) for r in requests]

    def _begin_again(self, request: int, age: int, first: int, state_5: Tensor) -> None:
        """Its tokens stay, which may be of earlier weights: their keys are computed anew when there is room."""
        b, slot, size = self.buffers, self.slot[request], age + 1
        tokens, logp = b.tokens_SR[slot, :size].tolist(), b.logp_SR[slot, :size].tolist()
        self._part(request).drawn(tokens, logp, self.version, ended=False, over=False)
        self._part(request).cache = []
        self.slot[request] = -1
        self.free.append(slot)
        self.begun.appendleft(request)  # its prompt's pages stay, so nobody else may be waited for before it

    # ---- between two steps -------------------------------------------------------------------------------------------

    def go_on_as(self, version: int) -> None:
        """Everything is where it was when decoding stopped, and the weights may be new. The books forget what feed has
        been told of; rows stand in the order in which they would come from the host."""
        going = [*self.over, *self.unfinished]
        requests = [r for i in going for r in range(i * self.n, (i + 1) * self.n)]
        group, request = ({old: new for new, old in enumerate(olds)} for olds in (going, requests))
        rows = self._index(requests)
        self.uniform = self.uniform[rows]
        self.groups, self.prompts = [self.groups[i] for i in going], [self.prompts[i] for i in going]
        self.undone, self.slot = [self.undone[i] for i in going], [self.slot[r] for r in requests]
        self.unfinished = {group[i]: count for i, count in self.unfinished.items()}
        self.over = [group[i] for i in self.over]
        self.prompt_row = {group[i]: row for i, row in self.prompt_row.items()}
        self.live = [request[r] for r in self.live]
        self.queue, self.begun = (deque(request[r] for r in some) for some in (self.queue, self.begun))
        self.waiting = [replace(back, request=request[back.request]) for back in self.waiting]
        self._keep(sorted(range(len(self.live)), key=self.live.__getitem__))
        self.pending = {}  # logits of the weights as they were
        self.steps = self.row_steps = 0
        self.version = version

    def copy_cache(self) -> None:
        b, pages = self.buffers, self.buffers.pages
        if not b.layers:
            return
        held = [pages.prompts.pages[row] for row in self.prompt_row.values()]
        held += [
            pages.slots.pages[self.slot[r]][: pages.needed(age)] for r, age in zip(self.live, self.age, strict=True)
        ]
        owners: list[Underway | Partial] = [self.groups[i] for i in self.prompt_row]
        owners += [self._part(r) for r in self.live]
        for owner, copies in zip(owners, to_host(b.layers, held), strict=True):
            owner.cache = copies
        for back in self.waiting:
            self._part(back.request).cache = back.copies
