"""One batch of rollouts -> several optimiser steps: minibatches, micro-batches, loss, gradient, step."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.context import QUIET, RunContext
from ..distributed.shards import gathered, like
from ..kernels.packed import Packing
from ..loss.clip import Adaptive, curvature_keep
from ..loss.methods import Method
from ..loss.objective import at_level
from ..loss.policy_loss import PolicyLoss
from ..models.policy import Policy, Scored
from ..run.config import Config
from ..run.seeds import permutation
from .batch import Batch, rank_micro_batches
from .old_logp import engine_mismatch
from .oom_retry import OomRetry, make_oom_retry
from .optim import MixedOptimizer, learning_rate
from .progress import Progress

LARGEST = ("ratio/max", "mismatch/max_log_ratio")  # the largest counts; of the others the mean
NO_MEAN = ("tokens", "sequences")


class Means:
    """Metrics of optimiser steps -> metrics of the step, weighted by tokens."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        names = [name for name in metrics if name not in NO_MEAN]
        row = torch.stack([metrics["tokens"].float(), *(metrics[name].float() for name in names)])
        for tokens, *values in self._rows(row):
            for name, value in zip(names, values, strict=True):
                self._add(name, value, tokens)

    def _rows(self, row: Tensor) -> list[list[float]]:
        """What is added: tokens and values, of one part or of several."""
        return [row.tolist()]

    def _add(self, name: str, value: float, tokens: float) -> None:
        if not math.isfinite(value):
            return
        if name in LARGEST:
            self.sums[name] = max(self.sums.get(name, -math.inf), value)
            self.weights[name] = 1.0
        else:
            self.sums[name] = self.sums.get(name, 0.0) + value * tokens
            self.weights[name] = self.weights.get(name, 0.0) + tokens

    def result(self) -> dict[str, float]:
        return {name: total / self.weights[name] for name, total in self.sums.items() if self.weights[name]}


class Updater:
    """Trains a policy on batches. An optimiser step that is not finite is skipped, and counted in ``progress``."""

    def __init__(
        self,
        config: Config,
        method: Method,
        policy: Policy,
        optimizer: MixedOptimizer,
        folder: Path,
        progress: Progress | None = None,
        oom_retry: OomRetry | None = None,
        context: RunContext = QUIET,
    ):
        if method.curvature_gate and not policy.linear:
            raise ValueError(f"{method.name} needs a model with a plain linear head, without bias, scale or cap")
        if method.curvature_gate and config.optim.name != "adamw":
            raise ValueError(f"{method.name} needs optim.name=adamw: its gate reads AdamW's second moments")
        if method.loss.control_variate and context.world.size > 1:
            raise ValueError("loss.control_variate needs the whole optimiser step at once: leave torchrun out")
        self.config, self.method, self.policy, self.optimizer, self.folder = config, method, policy, optimizer, folder
        self.progress = Progress() if progress is None else progress
        self.oom_retry = make_oom_retry(policy, config, context=context) if oom_retry is None else oom_retry
        self.context, self.world = context, context.world

    @property
    def steps_a_batch(self) -> int:
        return self.config.optim.minibatches * self.config.optim.epochs

    def _minibatches(self, responses: int) -> int:
        """As many as the responses make of the usual size: a batch that came out short is not stretched."""
        usual = self.config.rollout.prompts * self.config.rollout.samples
        return max(1, round(self.config.optim.minibatches * responses / usual))

    def _split(self, batch: Batch, step: int, epoch: int) -> list[Tensor]:
        """Rows of each minibatch. Groups stay whole (a prompt is then computed once) if there are enough of them."""
        group_B, minibatches = batch.group_B.cpu(), self._minibatches(len(batch))
        if int(group_B.max()) + 1 < minibatches:
            group_B = torch.arange(len(batch))
        order = torch.from_numpy(permutation(int(group_B.max()) + 1, self.config.seed, "minibatches", step, epoch))
        chosen = (torch.isin(group_B, some).nonzero()[:, 0] for some in order.tensor_split(minibatches))
        return [rows.to(batch.ids_BL.device) for rows in chosen]

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimiser steps over one batch; step counts from 1."""
        optim, total = self.config.optim, self.config.steps * self.steps_a_batch
        means, losses, norms, skipped, lr = Means(), [], [], 0, 0.0
        metrics: dict[str, float] = {}
        first = number = (step - 1) * self.steps_a_batch
        for epoch in range(optim.epochs):
            for rows in self._split(batch, step, epoch):
                if self.progress.bad_steps >= optim.max_bad_steps:
                    break
                minibatch = batch.rows(rows)
                self.context.stage(f"training {number - first + 1}/{self.steps_a_batch}")
                lr = learning_rate(optim, number, total)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                loss, logp_BT = self.oom_retry.run(
                    minibatch,
                    partial(self._accumulate, minibatch, means),
                    undo=self.optimizer.zero_grad,
                    whole=self.method.loss.control_variate,
                )
                if number == first:
                    metrics |= engine_mismatch(minibatch, logp_BT)
                norm = self.optimizer.clip(optim.max_grad_norm, self.world)
                if math.isfinite(loss) and math.isfinite(norm):
                    self.optimizer.step()
                    self.progress.bad_steps = 0
                    losses.append(loss)
                    norms.append(norm)
                else:
                    skipped += 1
                    self.progress.bad_steps += 1
                    self._keep_for_inspection(minibatch, step, number - first, loss, norm)
                self.optimizer.zero_grad()
                number += 1
        if losses:
            metrics |= {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}
        return self.world.from_rank0(metrics | means.result() | {"lr": lr, "skipped": skipped})

    def _accumulate(self, batch: Batch, means: Means, tokens: int) -> tuple[float, Tensor]:
        """Gradients, summed over micro-batches of so many tokens; the sum of their losses, and the policy's logp_BT.

        Of several ranks each computes a share of the micro-batches. Gradients are added when they are shared out again,
        and the denominator is that of all. The metrics are those of the whole optimiser step, however it was cut.
        """
        micro_batches = rank_micro_batches(batch, tokens, self.policy.packs, self.world)
        policy_loss = self._fitted(micro_batches)
        # all before the first pass, as each waits for the device
        packings = [self.policy.pack(p.start_B, p.mask_BT, p.ids_BL.shape[1], p.group_B) for _, p in micro_batches]
        denominator = float(policy_loss.count(batch.mask_BT))
        logp_BT, entropy_BT = torch.zeros_like(batch.old_logp_BT), torch.zeros_like(batch.old_logp_BT)
        keep_BT = torch.zeros_like(batch.mask_BT, dtype=torch.int) if self.method.curvature_gate else None
        curvature = None if keep_BT is None else self._curvature()
        losses = []
        for i, (index, part) in enumerate(micro_batches):
            scored = self._score(part, packings[i])
            packings[i] = None  # what its layers shared goes with the backward pass
            if index is None:  # another rank has more: take part
                (scored.logp_BT.sum() * 0).backward()  # type: ignore[no-untyped-call]
                self.optimizer.accumulate()
                continue
            keep = None if keep_BT is None else self._keep(policy_loss, part, scored, denominator, curvature)
            out = policy_loss(
                scored.logp_BT, **part.loss_inputs, denominator=denominator, entropy=scored.entropy_BT, keep=keep
            )
            out.loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.accumulate()
            losses.append(out.loss.detach())
            width = part.mask_BT.shape[1]
            logp_BT[index, :width], entropy_BT[index, :width] = scored.logp_BT.detach(), scored.entropy_BT
            if keep_BT is not None and keep is not None:
                keep_BT[index, :width] = keep.int()
        self.world.add(logp_BT, entropy_BT)
        kept_BT = None
        if keep_BT is not None:
            self.world.add(keep_BT)
            kept_BT = keep_BT.bool() | ~batch.mask_BT
        with torch.no_grad():
            out = policy_loss(logp_BT, **batch.loss_inputs, denominator=denominator, entropy=entropy_BT, keep=kept_BT)
            gated = {} if kept_BT is None else {"clip/gated": (~kept_BT)[batch.mask_BT].float().mean()}
            means.add(out.metrics | gated)
        return sum(self.world.gather(sum(torch.stack(losses).tolist()) if losses else 0.0)), logp_BT

    def _score(self, part: Batch, packing: Packing | None) -> Scored:
        recompute = self.oom_retry.recompute
        return self.policy.score(part.ids_BL, part.start_B, part.mask_BT, part.group_B, recompute, packing, part.kept)

    @torch.no_grad()
    def _fitted(self, micro_batches: list[tuple[Tensor | None, Batch]]) -> PolicyLoss:
        """A clip that chooses its bounds from the ratios sees those of the whole optimiser step at once."""
        rule = self.method.loss
        if not isinstance(rule.clip, Adaptive):
            return rule
        ratios = [torch.zeros(0, device=self.policy.device)]
        for index, part in micro_batches:
            logp = self._score(part, None).logp_BT
            if index is None:
                continue
            log_w = at_level(logp - part.old_logp_BT, part.mask_BT, rule.level)
            ratios.append(log_w[part.mask_BT] if rule.level == "token" else log_w)
        log_w = self.world.cat(torch.cat(ratios))
        return rule.replace(clip=rule.clip.fit(log_w, torch.ones_like(log_w)))

    @torch.no_grad()
    def _curvature(self) -> Tensor | None:
        """1/(√v + ε) of Adam's second moments v of the head, [V,H]; None before the first step."""
        head = self.policy.head_parameter()
        state = self.optimizer.state_of(head)
        second = state.get("exp_avg_sq")
        if second is None:
            return None
        if self.world.sharded:
            second = gathered({"": like(second, head)}, keep=True)[""].to(second.device)
        beta = self.config.optim.betas[1]
        scale: Tensor = 1 / ((second / (1 - beta ** float(state["step"]))).sqrt() + 1e-8)
        return scale

    @torch.no_grad()
    def _keep(
        self, rule: PolicyLoss, part: Batch, scored: Scored, denominator: float, curvature: Tensor | None
    ) -> Tensor:
        """CAPO: the tokens whose own part of the optimiser step would move the policy little.

        Adam's second moments are of the mean loss, so a token's gradient is taken as it enters that mean.
        """
        head = self.policy.head()
        assert scored.hidden_NH is not None
        assert part.advantage is not None
        hidden_NH = scored.hidden_NH.detach() / self.policy.temperature
        row_N, t_N = part.mask_BT.nonzero(as_tuple=True)
        advantage_N = part.advantage[row_N, t_N] if part.advantage.dim() == 2 else part.advantage[row_N]
        share_B = torch.full_like(part.reward_B, 1 / denominator)
        if rule.reduction == "seq-mean-token-mean":
            share_B = share_B / part.mask_BT.sum(-1)
        logits_NV = hidden_NH @ head.T
        if part.kept is not None:
            logits_NV.masked_fill_(part.kept.to(head.device).outside(len(head)), -torch.inf)
        kept_N = curvature_keep(
            logits_NV,
            hidden_NH,
            part.ids_BL[row_N, part.start_B[row_N] + t_N],
            advantage_N * share_B[row_N],
            float(self.optimizer.param_groups[0]["lr"]),
            curvature,
        )
        return torch.ones_like(part.mask_BT).masked_scatter(part.mask_BT, kept_N)

    def _keep_for_inspection(self, batch: Batch, step: int, minibatch: int, loss: float, norm: float) -> None:
        from safetensors.torch import save_file

        if not self.world.first:
            return
        folder = self.folder / "bad"
        path = folder / f"step-{step:06d}-{minibatch}"
        tensors = {name: value.contiguous() for name, value in vars(batch).items() if isinstance(value, Tensor)}
        about: dict[str, Any] = {"step": step, "loss": repr(loss), "grad_norm": repr(norm)}
        about["texts"] = [self.policy.decode(row[row != self.policy.tokenizer.pad_token_id]) for row in batch.ids_BL]
        folder.mkdir(exist_ok=True)
        save_file(tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        self.context.warn(
            f"step {step}: loss {loss}, gradient norm {norm}: optimiser step skipped, its batch is {path}.safetensors"
        )
