"""One batch of rollouts -> several optimiser steps: minibatches, micro-batches, loss, gradient, step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import ALONE, World
from ..distributed.shards import gathered, like
from ..kernels.packed import Packing
from ..loss.clip import Adaptive, curvature_keep
from ..loss.methods import Algorithm
from ..loss.mismatch import SequenceMask
from ..loss.objective import at_level, k3
from ..loss.policy_loss import LossOutput, PolicyLoss
from ..models.policy import Policy, Scored
from ..run.config import Config
from ..run.seeds import permutation
from .batch import Batch, dealt, filler
from .oom_retry import OomRetry, make_oom_retry
from .optim import MixedOptimizer, learning_rate

LARGEST = ("ratio/max", "mismatch/max_log_ratio")  # the largest counts; of the others the mean
NO_MEAN = ("tokens", "sequences")
WHOLE = 2**62  # tokens of a micro-batch that is all of the optimiser step
HARMLESS = 2e-4  # KL per token between engine and trainer: see OldLogp


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
    """Trains a policy on batches. ``bad_steps`` counts optimiser steps in a row that were skipped as not finite."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        policy: Policy,
        optimizer: MixedOptimizer,
        folder: Path,
        watch: Callable[[str], None] = lambda text: None,
        room: OomRetry | None = None,
        world: World = ALONE,
    ):
        self.config, self.algorithm, self.policy, self.optimizer = config, algorithm, policy, optimizer
        if algorithm.curvature_gate and not policy.linear:
            raise ValueError(f"{algorithm.name} needs a model with a plain linear head, without bias, scale or cap")
        if algorithm.curvature_gate and config.optim.name != "adamw":
            raise ValueError(f"{algorithm.name} needs optim.name=adamw: its gate reads AdamW's second moments")
        if algorithm.loss.control_variate and world.size > 1:
            raise ValueError("loss.control_variate needs the whole optimiser step at once: leave torchrun out")
        self.folder, self.watch, self.world = folder, watch, world
        self.bad_steps = 0
        self.messages: list[str] = []
        self.oom_retry = make_oom_retry(policy, config, warn=self.messages.append) if room is None else room

    @property
    def steps_a_batch(self) -> int:
        return self.config.optim.minibatches * self.config.optim.epochs

    def _minibatches(self, responses: int) -> int:
        """As many as the responses make of the usual size: a batch that came out short is not stretched."""
        usual = self.config.rollout.prompts * self.config.rollout.samples
        return max(1, round(self.config.optim.minibatches * responses / usual))

    def _split(self, batch: Batch, step: int, epoch: int) -> list[Tensor]:
        """Rows of each minibatch. Groups stay whole (a prompt is then computed once) if there are enough of them."""
        group_B, parts = batch.group_B.cpu(), self._minibatches(len(batch))
        if int(group_B.max()) + 1 < parts:
            group_B = torch.arange(len(batch))
        order = torch.from_numpy(permutation(int(group_B.max()) + 1, self.config.seed, "minibatches", step, epoch))
        chosen = (torch.isin(group_B, some).nonzero()[:, 0] for some in order.tensor_split(parts))
        return [rows.to(batch.ids_BL.device) for rows in chosen]

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimiser steps over one batch; step counts from 1."""
        optim, total = self.config.optim, self.config.steps * self.steps_a_batch
        means, losses, norms, skipped, lr = Means(), [], [], 0, 0.0
        metrics: dict[str, float] = {}
        number = (step - 1) * self.steps_a_batch
        for epoch in range(optim.epochs):
            for part in self._split(batch, step, epoch):
                if self.bad_steps >= optim.max_bad_steps:
                    break
                minibatch = batch.rows(part)
                self.watch(f"training {number % self.steps_a_batch + 1}/{self.steps_a_batch}")
                lr = learning_rate(optim, number, total)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                loss, found = self._gradients(minibatch, means, first=number == (step - 1) * self.steps_a_batch)
                metrics |= found
                norm = self.optimizer.clip(optim.max_grad_norm)
                if math.isfinite(loss) and math.isfinite(norm):
                    self.optimizer.step()
                    self.bad_steps = 0
                    losses.append(loss)
                    norms.append(norm)
                else:
                    skipped += 1
                    self.bad_steps += 1
                    self._keep_for_inspection(minibatch, step, number, loss, norm)
                self.optimizer.zero_grad()
                number += 1
        if losses:
            metrics |= {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}
        return self.world.agree(metrics | means.result() | {"lr": lr, "skipped": skipped})

    def _gradients(self, batch: Batch, means: Means, first: bool) -> tuple[float, dict[str, float]]:
        """Accumulated over micro-batches; the sum of their losses, and the engine's mismatch where it can be seen.

        The metrics are those of the whole optimiser step, however it was cut.
        """
        whole = self.algorithm.loss.control_variate

        def attempt(tokens: int) -> tuple[float, Tensor]:
            return self._accumulate(batch, means, WHOLE if whole else tokens)

        loss, logp_BT = self.oom_retry.run(batch, attempt, undo=self.optimizer.zero_grad, whole=whole)
        return loss, self._mismatch(batch, logp_BT) if first else {}

    def _accumulate(self, batch: Batch, means: Means, tokens: int) -> tuple[float, Tensor]:
        """Gradients of micro-batches of so many tokens; the sum of their losses, and the policy's logp_BT.

        Of several ranks each computes a share of the micro-batches. Gradients are added when they are shared out again,
        and the denominator is that of all.
        """
        cuts = dealt(batch, tokens, self.policy.packs, self.world)
        parts = [filler(batch) if index is None else batch.rows(index) for index in cuts]
        rule = self._fitted(parts, cuts)
        packings = [self._pack(part) for part in parts]  # all before the first pass, as each waits for the device
        denominator = float(rule.count(batch.mask_BT))
        logp_BT, entropy_BT = torch.zeros_like(batch.old_logp_BT), torch.zeros_like(batch.old_logp_BT)
        keep_BT = torch.zeros_like(batch.mask_BT) if self.algorithm.curvature_gate else None
        scale = None if keep_BT is None else self._curvature()
        losses = []
        for i, (index, part) in enumerate(zip(cuts, parts, strict=True)):
            scored = self._score(part, packings[i])
            packings[i] = None  # what its layers shared goes with the backward pass
            if index is None:  # another rank has more: take part
                (scored.logp_BT.sum() * 0).backward()  # type: ignore[no-untyped-call]
                self.optimizer.accumulate()
                continue
            keep = None if keep_BT is None else self._keep(rule, part, scored, denominator, lambda: scale)
            out = self._loss(rule, part, scored.logp_BT, scored.entropy_BT, denominator, keep)
            out.loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.accumulate()
            losses.append(out.loss.detach())
            width = part.mask_BT.shape[1]
            logp_BT[index, :width], entropy_BT[index, :width] = scored.logp_BT.detach(), scored.entropy_BT
            if keep_BT is not None and keep is not None:
                keep_BT[index, :width] = keep
        self.world.add(logp_BT, entropy_BT)
        if keep_BT is not None:
            kept_BT = keep_BT.int()
            self.world.add(kept_BT)
            keep_BT = kept_BT.bool() | ~batch.mask_BT
        with torch.no_grad():
            metrics = self._loss(rule, batch, logp_BT, entropy_BT, denominator, keep_BT).metrics
            if keep_BT is not None:
                metrics = metrics | {"clip/gated": (~keep_BT)[batch.mask_BT].float().mean()}
            means.add(metrics)
        return sum(self.world.gather(sum(torch.stack(losses).tolist()) if losses else 0.0)), logp_BT

    def _pack(self, part: Batch) -> Packing | None:
        return self.policy.pack(part.start_B, part.mask_BT, part.ids_BL.shape[1], part.group_B)

    def _score(self, part: Batch, packing: Packing | None) -> Scored:
        recompute = self.oom_retry.recompute
        return self.policy.score(part.ids_BL, part.start_B, part.mask_BT, part.group_B, recompute, packing)

    def _mismatch(self, batch: Batch, logp_BT: Tensor) -> dict[str, float]:
        """Before the first optimiser step the policy is the one that sampled: what differs is the engine.

        With top-p or top-k it is also the truncation, and nothing is reported; where old_logp was computed anew, the
        loss reports it.
        """
        sampling = self.config.rollout
        if batch.rollout_logp_BT is not None or sampling.top_p < 1 or sampling.top_k > 0:
            return {}
        log_rho = (logp_BT - batch.old_logp_BT)[batch.mask_BT]
        found = {"mismatch/max_log_ratio": float(log_rho.abs().max()), "mismatch/kl": float(k3(log_rho).mean())}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _loss(
        self,
        rule: PolicyLoss,
        part: Batch,
        logp_BT: Tensor,
        entropy_BT: Tensor,
        denominator: float,
        keep: Tensor | None,
    ) -> LossOutput:
        assert part.advantage is not None
        return rule(
            logp_BT,
            part.old_logp_BT,
            part.advantage,
            part.mask_BT,
            ref_logp=part.ref_logp_BT,
            rollout_logp=part.rollout_logp_BT,
            denominator=denominator,
            entropy=entropy_BT,
            keep=keep,
            groups=part.group_B,
        )

    @torch.no_grad()
    def _fitted(self, parts: list[Batch], cuts: list[Tensor | None] | None = None) -> PolicyLoss:
        """A clip that chooses its bounds from the ratios sees those of the whole optimiser step at once.

        Where ``cuts`` has None, the part is a filler.
        """
        rule = self.algorithm.loss
        if not isinstance(rule.clip, Adaptive):
            return rule
        ratios = [torch.zeros(0, device=parts[0].mask_BT.device)]
        for i, part in enumerate(parts):
            logp = self._score(part, None).logp_BT
            if cuts is not None and cuts[i] is None:
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
        self,
        rule: PolicyLoss,
        part: Batch,
        scored: Scored,
        denominator: float,
        curvature: Callable[[], Tensor | None] | None = None,
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
        kept_N = curvature_keep(
            hidden_NH @ head.T,
            hidden_NH,
            part.ids_BL[row_N, part.start_B[row_N] + t_N],
            advantage_N * share_B[row_N],
            float(self.optimizer.param_groups[0]["lr"]),
            (curvature or self._curvature)(),
        )
        return torch.ones_like(part.mask_BT).masked_scatter(part.mask_BT, kept_N)

    def _keep_for_inspection(self, batch: Batch, step: int, number: int, loss: float, norm: float) -> None:
        from safetensors.torch import save_file

        if not self.world.first:
            return
        folder = self.folder / "bad"
        path = folder / f"step-{step:06d}-{number % self.steps_a_batch}"
        tensors = {name: value.contiguous() for name, value in vars(batch).items() if isinstance(value, Tensor)}
        about: dict[str, Any] = {"step": step, "loss": repr(loss), "grad_norm": repr(norm)}
        about["texts"] = [self.policy.decode(row[row != self.policy.tokenizer.pad_token_id]) for row in batch.ids_BL]
        folder.mkdir(exist_ok=True)
        save_file(tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        self.messages.append(
            f"step {step}: loss {loss}, gradient norm {norm}: optimiser step skipped, its batch is {path}.safetensors"
        )


class OldLogp:
    """Whether the old log-probabilities are the engine's, or the trainer's of before the first optimiser step.

    In float32 the engine's are the trainer's. In half precision they differ, and what differs is taken for drift: the
    ratios start at e^δ instead of 1. A KL of k per token means a δ of about √(2k), which is 0.02 at HARMLESS: a tenth
    of the usual clip range of 0.2, and far below what an optimiser step does. So the engine's are taken while the KL
    that the step before has measured is no more; the first step computes them. At sequence level the δ of hundreds of
    tokens add up, against a clip range of GSPO's 3e-4 too: there they are always computed anew. A mismatch rule needs
    both. With top-p or top-k the engine's are of the truncated distribution, and taken unless a setting says otherwise.

    vLLM computes with kernels of its own, whatever the precision: with it they are computed anew unless told otherwise.
    """

    def __init__(self, config: Config, rule: PolicyLoss, dtype: torch.dtype):
        rollout, setting = config.rollout, config.rollout.old_logp
        self.measured: float | None = None  # mismatch/kl of the step before
        corrects = rule.mismatch is not None and not isinstance(rule.mismatch, SequenceMask)
        if setting == "engine" and corrects:
            raise ValueError("rollout.old_logp=engine leaves loss.mismatch nothing to correct: auto or recompute")
        exact = dtype in (torch.float32, torch.float64) or rollout.top_p < 1 or rollout.top_k > 0
        wary = rollout.engine == "vllm" or (not exact and rule.level != "token")
        self.always = setting == "recompute" or corrects or (setting == "auto" and wary)
        self.never = not self.always and (setting == "engine" or exact)

    @property
    def recompute(self) -> bool:
        return self.always or not (self.never or (self.measured is not None and self.measured <= HARMLESS))

    def measure(self, metrics: dict[str, float]) -> None:
        self.measured = metrics.get("mismatch/kl", self.measured)


def prepared(batch: Batch, old_logp_BT: Tensor | None, ref_logp_BT: Tensor | None, needs_ref: bool) -> Batch:
    """The batch with what is known of other policies: old_logp computed anew, the reference's log-probabilities."""
    if old_logp_BT is not None:
        batch = replace(batch, old_logp_BT=old_logp_BT, rollout_logp_BT=batch.old_logp_BT)
    if ref_logp_BT is None and needs_ref:  # the reference is the sampling policy, and the loss asks to be told
        ref_logp_BT = batch.old_logp_BT
    return replace(batch, ref_logp_BT=ref_logp_BT)
