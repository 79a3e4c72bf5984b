"""One batch of rollouts -> several optimiser steps: minibatches, micro-batches, loss, gradient, step."""

from __future__ import annotations

import json
import math
import re
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
from ..recorded.layout import write
from ..recorded.losses import loss_as_data
from ..run.config import Config
from ..run.folder import RECORDED, RunFolder
from ..run.seeds import permutation
from .batch import Batch, rank_micro_batches
from .health.vitals import Probe, Vitals
from .old_logp import engine_mismatch
from .oom_retry import OomRetry, make_oom_retry
from .optim import MixedOptimizer, learning_rate
from .progress import Progress
from .together import blocks_of, goes_together, learn_together, worth_it

LARGEST = ("ratio/max", "mismatch/max_log_ratio")  # the largest counts; of the others the mean
NO_MEAN = ("tokens", "sequences")
BAD = re.compile(r"step-(\d+)-(\d+)\.safetensors")
BAD_ENDS, BAD_BYTES = 4, 100 * 2**20  # batches kept from the first, and from the last; bytes of each


class Means:
    """Metrics of optimiser steps -> metrics of the step, weighted by tokens."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.latest: dict[str, float] = {}  # of the optimiser step that was added last

    def add(self, metrics: dict[str, Tensor]) -> None:
        names = [name for name in metrics if name not in NO_MEAN]
        row = torch.stack([metrics["tokens"].float(), *(metrics[name].float() for name in names)])
        for tokens, *values in self._rows(row):
            self.latest = dict(zip(names, values, strict=True))
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
        folder: RunFolder,
        progress: Progress | None = None,
        oom_retry: OomRetry | None = None,
        context: RunContext = QUIET,
    ):
        if (method.curvature_gate or method.advantage.needs_score_sq) and not policy.linear:
            raise ValueError(f"{method.name} needs a model with a plain linear head, without bias, scale or cap")
        if method.loss.control_variate and context.world.size > 1:
            raise ValueError("loss.control_variate needs the whole optimiser step at once: leave torchrun out")
        if config.log.recorded_steps and (context.world.size > 1 or method.curvature_gate):
            why = "under torchrun" if context.world.size > 1 else f"with {method.name}, whose gate needs Adam's moments"
            raise ValueError(f"log.record does not work {why}: leave it out")
        self.config, self.method, self.policy, self.optimizer, self.folder = config, method, policy, optimizer, folder
        self.progress = Progress() if progress is None else progress
        self.oom_retry = make_oom_retry(policy, config, context=context) if oom_retry is None else oom_retry
        self.context, self.world = context, context.world
        self.probe = Probe()
        policy.entropy_gradient = method.loss.has_bonus
        self.together = goes_together(method, policy, self.world.size) and worth_it(policy)  # the head and the loss

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
        used = 0.0 if self.config.tokens is None else self.progress.tokens_total / self.config.tokens
        means, losses, norms, skipped, lr = Means(), [], [], 0, 0.0
        metrics: dict[str, float] = {}
        vitals = Vitals()
        if self.probe.batch is None and not self.optimizer.stepped:
            self.probe.take(batch)
        first = number = (step - 1) * self.steps_a_batch
        recorded = step in self.config.log.recorded_steps
        for epoch in range(optim.epochs):
            minibatches = self._split(batch, step, epoch)
            for i, rows in enumerate(minibatches, 1):
                if self.progress.bad_steps >= optim.max_bad_steps:
                    break
                minibatch = batch.rows(rows)
                self.context.stage(f"training {number - first + 1}/{self.steps_a_batch}")
                lr = learning_rate(optim, number, total, used)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                loss, logp_BT, entropy = self.oom_retry.run(
                    minibatch,
                    partial(self._accumulate, minibatch, means),
                    undo=self.optimizer.zero_grad,
                    whole=self.method.loss.control_variate,
                )
                vitals.see(minibatch, logp_BT)
                if number == first and not self.config.stale:
                    metrics |= engine_mismatch(minibatch, logp_BT)
                norm = self.optimizer.clip(optim.max_grad_norm, self.world)
                if math.isfinite(loss) and math.isfinite(norm):
                    if recorded and epoch + 1 == optim.epochs and i == len(minibatches):
                        self._record(minibatch, step, {"loss": loss, "grad_norm": norm, **means.latest})
                    self.optimizer.step()
                    self._move_bonus(entropy)
                    self.progress.bad_steps = 0
                    losses.append(loss)
                    norms.append(norm)
                else:
                    skipped += 1
                    self.progress.bad_steps += 1
                    self._keep_for_inspection(minibatch, step, number - first, loss, norm)
                self.optimizer.zero_grad()
                number += 1
        if self.method.loss.has_bonus:
            metrics["entropy_bonus"] = self._bonus()
        if losses:
            metrics |= {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}
        metrics |= vitals.metrics() | self._gone()
        made = {"lr": lr, "skipped": skipped, "optimizer_steps": number - first - skipped}
        return self.world.from_rank0(metrics | means.result() | made)

    def _gone(self) -> dict[str, float]:
        """How far the policy has gone since the run began."""
        probe = self.probe.batch
        if probe is None:  # resumed from a checkpoint of an older version
            return {}
        compute = partial(self.probe.kl, self.policy, world=self.world)
        kl = self.oom_retry.run(probe, compute)
        return {"kl/start": kl} if math.isfinite(kl) else {}

    def _bonus(self) -> float:
        """The entropy's coefficient in the next optimiser step."""
        loss, reached = self.method.loss, self.progress.entropy_bonus
        if loss.entropy_target is None:
            return loss.entropy_bonus
        return (loss.entropy_bonus if reached is None else reached) if self.progress.entropy_low else 0.0

    def _move_bonus(self, entropy: float) -> None:
        """After an optimiser step whose tokens had that mean entropy."""
        loss, reached = self.method.loss, self.progress.entropy_bonus
        if loss.entropy_target is not None:
            self.progress.entropy_bonus = loss.next_bonus(loss.entropy_bonus if reached is None else reached, entropy)
            self.progress.entropy_low = entropy <= loss.entropy_target

    def _accumulate(self, batch: Batch, means: Means, tokens: int) -> tuple[float, Tensor, float]:
        """Gradients, summed over micro-batches of so many tokens; the sum of their losses, the policy's logp_BT, and
        its mean entropy.

        Of several ranks each computes a share of the micro-batches. Gradients are added when they are shared out again,
        and the denominator is that of all. The metrics are those of the whole optimiser step, however it was cut.
        """
        micro_batches = rank_micro_batches(batch, tokens, self.policy.packs, self.world)
        policy_loss, chosen_BT = self._fitted(batch, micro_batches)
        # all that waits for the device before the first pass: the host lays out each one while the one before it runs
        layouts = [part.layout() for _, part in micro_batches]
        head = self.policy.head() if self.together else None
        blocks = [None if head is None else blocks_of(part, policy_loss, head) for _, part in micro_batches]
        denominator = float(policy_loss.count(batch.mask_BT))
        logp_BT, entropy_BT = torch.zeros_like(batch.old_logp_BT), torch.zeros_like(batch.old_logp_BT)
        keep_BT = torch.zeros_like(batch.mask_BT, dtype=torch.int) if self.method.curvature_gate else None
        curvature = None if keep_BT is None else self._curvature()
        losses = []
        for i, (index, part) in enumerate(micro_batches):
            packing = self.policy.pack(*layouts[i])
            chosen = None if chosen_BT is None or index is None else chosen_BT[index, : part.mask_BT.shape[1]]
            if (cut := blocks[i]) is not None:
                rule, recompute = (policy_loss, denominator, chosen), self.oom_retry.recompute
                scored, loss = learn_together(self.policy, self.optimizer, part, cut, *rule, recompute, packing)
            else:
                scored = self._score(part, packing)
            del packing  # what its layers shared goes with the backward pass
            if index is None:  # another rank has more: take part
                (scored.logp_BT.sum() * 0).backward()  # type: ignore[no-untyped-call]
                self.optimizer.accumulate()
                continue
            keep = None if keep_BT is None else self._keep(policy_loss, part, scored, denominator, curvature)
            if cut is None:
                out = policy_loss(
                    scored.logp_BT,
                    **part.loss_inputs,
                    denominator=denominator,
                    entropy=scored.entropy_BT,
                    keep=keep,
                    chosen=chosen,
                )
                out.loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.accumulate()
                loss = out.loss.detach()
            losses.append(loss)
            width = part.mask_BT.shape[1]
            logp_BT[index, :width], entropy_BT[index, :width] = scored.logp_BT.detach(), scored.entropy_BT.detach()
            if keep_BT is not None and keep is not None:
                keep_BT[index, :width] = keep.int()
        self.world.add(logp_BT, entropy_BT)
        kept_BT = None
        if keep_BT is not None:
            self.world.add(keep_BT)
            kept_BT = keep_BT.bool() | ~batch.mask_BT
        with torch.no_grad():
            whole: dict[str, Any] = {"entropy": entropy_BT, "keep": kept_BT, "chosen": chosen_BT}
            out = policy_loss(logp_BT, **batch.loss_inputs, denominator=denominator, **whole)
            learning_BT = kept_BT
            if chosen_BT is not None and policy_loss.gate is not None and policy_loss.gate.role == "keep":
                learning_BT = chosen_BT
            gated = {} if learning_BT is None else {"clip/gated": (~learning_BT)[batch.mask_BT].float().mean()}
            means.add(out.metrics | gated)
            entropy = float(out.metrics["entropy"])
        return sum(self.world.gather(sum(torch.stack(losses).tolist()) if losses else 0.0)), logp_BT, entropy

    def _score(self, part: Batch, packing: Packing | None) -> Scored:
        recompute = self.oom_retry.recompute
        return self.policy.score(part.ids_BL, part.start_B, part.mask_BT, part.group_B, recompute, packing, part.kept)

    @torch.no_grad()
    def _fitted(
        self, batch: Batch, micro_batches: list[tuple[Tensor | None, Batch]]
    ) -> tuple[PolicyLoss, Tensor | None]:
        """The loss for this optimiser step, and the tokens that its gate chose.

        A clip that chooses its bounds from the ratios, and a gate that compares tokens, see all of the step at once:
        one more pass without gradients.
        """
        loss = self.method.loss
        if loss.has_bonus:
            loss = loss.replace(entropy_bonus=self._bonus())
        if not isinstance(loss.clip, Adaptive) and loss.gate is None:
            return loss, None
        logp_BT, entropy_BT = torch.zeros_like(batch.old_logp_BT), torch.zeros_like(batch.old_logp_BT)
        for index, part in micro_batches:
            scored = self._score(part, None)
            if index is not None:
                width = part.mask_BT.shape[1]
                logp_BT[index, :width], entropy_BT[index, :width] = scored.logp_BT, scored.entropy_BT
        self.world.add(logp_BT, entropy_BT)
        if isinstance(loss.clip, Adaptive):
            log_w = at_level(logp_BT - batch.old_logp_BT, batch.mask_BT, loss.level)
            valid = batch.mask_BT if loss.level == "token" else batch.mask_BT.any(-1)
            loss = loss.replace(clip=loss.clip.fit(log_w, valid))
        chosen_BT = None if loss.gate is None else loss.choose(logp_BT, entropy=entropy_BT, **batch.loss_inputs)
        return loss, chosen_BT

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

    def _record(self, batch: Batch, step: int, measured: dict[str, float]) -> None:
        """The batch of an optimiser step, what was measured in it, and the weights as they are before it."""
        if self.folder.lost() is not None:  # the loop will say so
            return
        path = self.folder.path / RECORDED / f"step-{step:06d}.safetensors"
        self.policy.save(path.with_suffix(""))
        loss = self.method.loss
        loss = loss.replace(entropy_bonus=self._bonus()) if loss.has_bonus else loss
        about = {
            "temperature": self.policy.temperature,
            "model": path.stem,
            "dtype": str(self.policy.model.dtype).removeprefix("torch."),
            "step": step,
            "trainer": "rpg train",
            "method": {"name": self.method.name, "loss": loss_as_data(loss)},
            "measured": {name: value for name, value in measured.items() if math.isfinite(value)},
            "reward_range": self.method.advantage.reward_range,
        }
        write(path, batch.as_recorded, about)

    def _keep_for_inspection(self, batch: Batch, step: int, minibatch: int, loss: float, norm: float) -> None:
        from safetensors.torch import save_file

        if not self.world.first:
            return
        if self.folder.lost() is not None:  # the loop will say so
            return
        folder = self.folder.path / "bad"
        path = folder / f"step-{step:06d}-{minibatch}"
        size = sum(value.nbytes for value in vars(batch).values() if isinstance(value, Tensor))
        if size > BAD_BYTES:
            batch = batch.rows(torch.arange(max(1, len(batch.ids_BL) * BAD_BYTES // size)))
        tensors = {name: value.contiguous() for name, value in vars(batch).items() if isinstance(value, Tensor)}
        about: dict[str, Any] = {"step": step, "loss": repr(loss), "grad_norm": repr(norm)}
        about["texts"] = [self.policy.decode(ids) for ids in batch.ids_BL.tolist()]
        folder.mkdir(exist_ok=True)
        save_file(tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        forget_the_middle(folder)
        self.context.warn(
            f"step {step}: loss {loss}, gradient norm {norm}: optimiser step skipped, its batch is {path}.safetensors"
        )


def forget_the_middle(folder: Path) -> None:
    """The first batches that went wrong stay, and the last ones: a run that goes wrong for days fills no disk."""
    places = [(BAD.fullmatch(path.name), path) for path in folder.iterdir()]
    found = sorted((int(match[1]), int(match[2]), path) for match, path in places if match)
    for _, _, path in found[BAD_ENDS:-BAD_ENDS]:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
