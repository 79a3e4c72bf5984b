"""Groups of responses -> tensors, and their division into minibatches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..advantages import Advantage
from .experience import Group

CPU_MICRO_TOKENS = 1024  # activations stay in the cache
GPU_MICRO_TOKENS = 16384


@dataclass(frozen=True)
class Batch:
    """Responses of a step, [B, …]; sequences are prompt and response, padded on the right."""

    ids_BL: Tensor
    start_B: Tensor  # where the response begins
    mask_BT: Tensor  # true on response tokens
    old_logp_BT: Tensor
    reward_B: Tensor
    group_B: Tensor
    rollout_logp_BT: Tensor | None = None  # the sampler's own, where old_logp was computed anew
    ref_logp_BT: Tensor | None = None
    advantage: Tensor | None = None  # [B] or [B,T]

    def __len__(self) -> int:
        return len(self.ids_BL)

    @property
    def lengths_B(self) -> Tensor:
        """Of prompt and response together."""
        return self.start_B + self.mask_BT.sum(-1)

    def rows(self, index: Tensor) -> Batch:
        """Some rows, without the padding that they do not need."""
        whole, response = int(self.lengths_B[index].max()), int(self.mask_BT[index].sum(-1).max())
        width = {"ids_BL": whole, "mask_BT": response, "old_logp_BT": response}
        width |= {"rollout_logp_BT": response, "ref_logp_BT": response, "advantage": response}

        def cut(name: str, value: Tensor | None) -> Tensor | None:
            return None if value is None else value[index][:, : width[name]] if value.dim() == 2 else value[index]

        return replace(self, **{f.name: cut(f.name, getattr(self, f.name)) for f in fields(self)})  # type: ignore[arg-type]


def make_batch(groups: Sequence[Group], pad: int, device: torch.device) -> Batch:
    found = [(g, group, response) for g, group in enumerate(groups) for response in group.responses]
    sequences = [[*group.prompt_ids, *response.rollout.tokens] for _, group, response in found]
    lengths = [len(response.rollout.tokens) for _, _, response in found]
    ids_BL = torch.full((len(found), max(map(len, sequences))), pad)
    old_logp_BT = torch.zeros(len(found), max(lengths))
    for i, (_, _, response) in enumerate(found):
        ids_BL[i, : len(sequences[i])] = torch.tensor(sequences[i])
        old_logp_BT[i, : lengths[i]] = torch.tensor(response.rollout.logp)
    return Batch(
        ids_BL=ids_BL.to(device),
        start_B=torch.tensor([len(group.prompt_ids) for _, group, _ in found], device=device),
        mask_BT=(torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).to(device),
        old_logp_BT=old_logp_BT.to(device),
        reward_B=torch.tensor([response.reward for _, _, response in found], device=device),
        group_B=torch.tensor([g for g, _, _ in found], device=device),
    )


def with_advantages(batch: Batch, advantage: Advantage, greedy: Sequence[float] | None) -> Batch:
    greedy_B = None if greedy is None else torch.tensor(greedy, device=batch.reward_B.device)[batch.group_B]
    values = advantage(
        batch.reward_B,
        batch.group_B,
        mask=batch.mask_BT,
        old_logp=batch.old_logp_BT,
        ref_logp=batch.ref_logp_BT,
        greedy_rewards=greedy_B,
    )
    return replace(batch, advantage=values)


def micro_batches(batch: Batch, tokens: int | None) -> Iterator[Tensor]:
    """Indices of rows, in parts of at most ``tokens`` (or a single row); a group's prompt counts once in each part.

    Groups stay together, beside those of similar length: short rows need not be padded for long ones' sake, where
    anything is padded.
    """
    if tokens is None:
        tokens = CPU_MICRO_TOKENS if batch.ids_BL.device.type == "cpu" else GPU_MICRO_TOKENS
    about = torch.stack([batch.group_B, batch.start_B, batch.mask_BT.sum(-1)], 1).tolist()
    longest: dict[int, int] = {}
    for group, start, length in about:
        longest[group] = max(longest.get(group, 0), start + length)
    order = sorted(range(len(about)), key=lambda i: (longest[about[i][0]], about[i][0], about[i][2]))
    part: list[int] = []
    size, last = 0, None
    for i in order:
        group, start, length = about[i]
        alone = start + length - 1  # the last token predicts nothing
        more = alone - start if group == last else alone
        if part and size + more > tokens:
            yield torch.tensor(part, device=batch.ids_BL.device)
            part, size, more = [], 0, alone
        part.append(i)
        size, last = size + more, group
    if part:
        yield torch.tensor(part, device=batch.ids_BL.device)
