"""Decoding step by step, for any device: keys and values of live rows side by side, finished rows replaced at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.sample_torch import sample, sample_kept, uniform_table
from .attention import attending, logits_after
from .engine import Rollout, Sampling, read_rollouts
from .kept import KeptStore


class SlotCache:
    """Keys and values of up to ``slots`` sequences, each from position 0. Rows 0 … live−1 are in use.

    It stands in for transformers' Cache: attention layers call ``update``, then ``attend``. There is room for what was
    written so far and some more; ``capacity`` is how long a sequence can become.
    """

    is_compileable = False

    def __init__(self, slots: int, capacity: int):
        self.slots, self.capacity = slots, capacity
        self.keys: list[Tensor] = []  # a layer: [slots, heads, room, width]
        self.values: list[Tensor] = []
        self.read: list[tuple[Tensor, Tensor]] | None = None  # keys and values of the prompts being read, a layer each
        self.position_A = torch.empty(0, dtype=torch.long)  # where each live row writes next
        self.longest = 0
        self.row_A = self.position_A  # 0 … live−1
        self._visible: dict[int | None, Tensor] = {}

    def advance(self, more: bool) -> None:
        """Before one more token of every live row is read; ``more``: other rows are still to come."""
        live = len(self.position_A)
        self.longest = int(self.position_A.max()) + 1
        self.row_A = torch.arange(live, device=self.position_A.device)
        self._visible.clear()
        self._grow(self.longest, live, self.slots if more else live)

    def _grow(self, length: int, live: int, rows: int) -> None:
        """Make room for sequences of this length in ``rows`` rows, where there is not enough."""
        if self.keys and length > self.keys[0].shape[2]:
            for stores in (self.keys, self.values):
                for layer, store in enumerate(stores):
                    stores[layer] = store.new_zeros(rows, store.shape[1], self._room(length), store.shape[3])
                    stores[layer][:live, :, : store.shape[2]] = store[:live]

    def _room(self, length: int) -> int:
        return min(self.capacity, length + max(16, length // 2))

    def visible(self, window: int | None) -> Tensor:
        """[live, 1, 1, longest]: what each row's newest token attends to, all of its own row or the end of it."""
        if window not in self._visible:
            place, position = torch.arange(self.longest, device=self.position_A.device), self.position_A[:, None]
            seen = place <= position if window is None else (place <= position) & (place > position - window)
            self._visible[window] = seen[:, None, None, :]
        return self._visible[window]

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.read is not None:
            self.read.append((key, value))
            return key, value
        live, end = len(self.position_A), self.longest
        at = self.row_A, slice(None), self.position_A
        self.keys[layer][at] = key[:, :, 0]
        self.values[layer][at] = value[:, :, 0]
        return self.keys[layer][:live, :, :end], self.values[layer][:live, :, :end]

    def admit(self, row: int, which_M: Tensor) -> None:
        """The prompts that were read move in from ``row`` on; which_M says which prompt each row gets."""
        if not self.read:
            raise NotImplementedError("it keeps no keys and values in its cache")
        self._grow(self.read[0][0].shape[2], row, self.slots)
        for layer, (key, value) in enumerate(self.read):
            if layer == len(self.keys):
                shape = self.slots, key.shape[1], self._room(key.shape[2])
                self.keys.append(key.new_zeros(*shape, key.shape[3]))
                self.values.append(value.new_zeros(*shape, value.shape[3]))
            self.keys[layer][row : row + len(which_M), :, : key.shape[2]] = key[which_M]
            self.values[layer][row : row + len(which_M), :, : value.shape[2]] = value[which_M]
        self.read = None

    def move(self, source_M: Tensor, target_M: Tensor) -> None:
        for store in (*self.keys, *self.values):
            store[target_M, :, : self.longest] = store[source_M, :, : self.longest]

    def copy(self, row: int, length: int) -> list[Tensor]:
        """What this row holds, on the host: keys and values of every layer in turn."""
        pairs = zip(self.keys, self.values, strict=True)
        return [store[row, :, :length].to("cpu", copy=True) for pair in pairs for store in pair]

    def put(self, row: int, copies: Sequence[Tensor], live: int) -> None:
        """What was copied, into this row; ``live`` rows stay as they are."""
        length = copies[0].shape[1]
        if not self.keys:
            for stores, some in ((self.keys, copies[::2]), (self.values, copies[1::2])):
                shape = self.slots, some[0].shape[0], self._room(length), some[0].shape[2]
                stores += [copy.new_zeros(shape, device=self.position_A.device) for copy in some]
        self._grow(length, live, self.slots)
        for stores, some in ((self.keys, copies[::2]), (self.values, copies[1::2])):
            for store, copy in zip(stores, some, strict=True):
                store[row, :, :length] = copy.to(store.device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.read is not None else self.longest

    def __len__(self) -> int:
        return len(self.keys)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """[B,L,heads,width]: plain causal attention while prompts are read, then each row over its own length."""
        if self.read is None:
            return _attend_to_slots(query, key, value, self.visible(window), scaling)
        mask: Tensor | None = None
        if window is not None and key.shape[2] > window:
            gap = torch.arange(key.shape[2], device=key.device)
            gap = gap[:, None] - gap[None, :]
            mask = (gap >= 0) & (gap < window)
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)


def _attend_to_slots(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """One token a row. Heads that share keys stand in for the tokens of a query, so that no key is copied for them."""
    rows, heads, _, width = query.shape
    query = query.reshape(rows, key.shape[1], -1, width)
    if query.device.type == "cpu" and query.dtype == torch.float32:  # where two products beat the fused kernel
        query = query * (width**-0.5 if scaling is None else scaling)
        output = (query @ key.transpose(2, 3)).masked_fill_(~mask, -torch.inf).softmax(-1) @ value
    else:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[3])


class EagerBatch:
    """One call of generate: ``run`` it, then take the ``rollouts``.

    Request r is sample r % n of prompt r // n; all state of live rows is in tensors over A.
    """

    def __init__(
        self,
        model: Any,
        end_ids: Sequence[int],
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seed: int,
        slots: int,
    ):
        self.model, self.n, self.sampling = model, n, sampling
        self.prompts = list(prompts)
        self.device = model.device
        total = len(prompts) * n
        self.cache = SlotCache(slots, max(map(len, prompts), default=0) + sampling.max_new_tokens)
        self.cache.position_A = self._tensor([])
        self.ends = self._tensor(end_ids)
        self.uniform = uniform_table(seed, prompts, n, sampling.max_new_tokens).to(self.device)
        self.tokens = torch.zeros(total, sampling.max_new_tokens, dtype=torch.long, device=self.device)
        self.logp = torch.zeros(total, sampling.max_new_tokens, device=self.device)
        self.length = torch.zeros(total, dtype=torch.long, device=self.device)
        self.ended = torch.zeros(total, dtype=torch.bool, device=self.device)
        self.kept = KeptStore(total, sampling.max_new_tokens, self.device) if sampling.gives_kept else None
        self.request_A = self._tensor([])  # which request each live row works on
        self.queue = deque(range(total))  # requests that are still to be admitted
        self.done = 0
        self.steps = self.row_steps = 0  # decoding steps, and those of all rows

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        with attending(self.model, self.cache):
            while self.done < len(self.length):
                self._refill()
                self._step()
                if progress is not None:
                    progress(self.done)

    def stream(self) -> Iterator[int]:
        """The tokens of a single request, each as it is drawn."""
        shown = 0
        with attending(self.model, self.cache):
            while self.done < 1:
                self._refill()
                while shown < int(self.length[0]):
                    yield int(self.tokens[0, shown])
                    shown += 1
                self._step()
            yield from self.tokens[0, shown : int(self.length[0])].tolist()

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _refill(self) -> None:
        """Admit requests, when enough slots are free to be worth a pass over their prompts."""
        slots, live = self.cache.slots, len(self.request_A)
        while self.queue and (live == 0 or slots - live >= max(1, slots // 8)):
            requests = [self.queue.popleft() for _ in range(min(slots - live, len(self.queue)))]
            place = {i: k for k, i in enumerate(dict.fromkeys(r // self.n for r in requests))}
            chosen = [self.prompts[i] for i in place]
            logits = self._read(chosen)
            which = self._tensor([place[r // self.n] for r in requests])
            self.cache.admit(live, which)
            lengths = self._tensor([len(prompt) for prompt in chosen])[which]
            self.request_A = torch.cat([self.request_A, self._tensor(requests)])
            self.cache.position_A = torch.cat([self.cache.position_A, lengths])
            self._draw(logits[which], slice(live, None))
            live = len(self.request_A)

    def _read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """One pass over prompts padded on the right; the logits after each one's last token."""
        ids = self._tensor([0]).repeat(len(prompts), max(map(len, prompts)))
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = self._tensor(prompt)
        self.cache.read = []
        last = self._tensor([len(prompt) - 1 for prompt in prompts])
        position = torch.arange(ids.shape[1], device=self.device).unsqueeze(0)
        return self._forward(ids, position, last)

    def _forward(self, ids: Tensor, position: Tensor, last: Tensor | None = None) -> Tensor:
        """Logits [B,V] after each row's last token."""
        row = torch.arange(len(ids), device=self.device)
        return logits_after(self.model, self.cache, ids, position, row, self._tensor([0]) if last is None else last)

    def _step(self) -> None:
        """One more token for every live row."""
        if len(self.request_A):
            ids = self.tokens[self.request_A, self.length[self.request_A] - 1]
            self.steps, self.row_steps = self.steps + 1, self.row_steps + len(self.request_A)
            self.cache.advance(more=self._more_to_come())
            logits = self._forward(ids[:, None], self.cache.position_A[:, None])
            self.cache.position_A = self.cache.position_A + 1
            self._draw(logits, slice(None))

    def _more_to_come(self) -> bool:
        return bool(self.queue)

    def _draw(self, logits: Tensor, rows: slice) -> None:
        """Sample the next token of some live rows; rows that are through make room."""
        request, sampling = self.request_A[rows], self.sampling
        at = request, self.length[request]
        if self.kept is None:
            token, logp = sample(logits, self.uniform[at], *sampling.how)
        else:
            token, logp, kept = sample_kept(logits, self.uniform[at], *sampling.how)
            self.kept.put(*at, kept)
        self.tokens[at], self.logp[at] = token, logp
        ended = torch.isin(token, self.ends)
        self.length[request] += 1
        self.ended[request] = ended
        over = ended | (self.length[request] == sampling.max_new_tokens)
        if bool(over.any()):
            self._note_done(request[over])
            live = torch.ones_like(self.request_A, dtype=torch.bool)
            live[rows] = ~over
            self._compact(live)

    def _note_done(self, request_M: Tensor) -> None:
        self.done += len(request_M)

    def _compact(self, live_A: Tensor) -> None:
        """The last live rows move into the gaps, so that live rows stay together at the front."""
        count = int(live_A.sum())
        target, source = (~live_A[:count]).nonzero()[:, 0], live_A[count:].nonzero()[:, 0] + count
        if len(target):
            self.cache.longest = int(self.cache.position_A.max()) + 1
            self.cache.move(source, target)
            self.request_A[target] = self.request_A[source]
            self.cache.position_A[target] = self.cache.position_A[source]
        self.request_A, self.cache.position_A = self.request_A[:count], self.cache.position_A[:count]

    def rollouts(self) -> list[list[Rollout]]:
        return read_rollouts(self.tokens, self.logp, self.length, self.ended, self.n, self.kept)
