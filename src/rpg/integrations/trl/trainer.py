"""RPGTrainer: TRL's GRPOTrainer, with the loss, the advantages, the denominators and the reference of rpg.

TRL generates, scores, splits, distributes and logs. Overridden are ``_compute_loss`` (PolicyLoss), what comes after the
rewards in ``_generate_and_score_completions`` (Advantage), ``_prepare_inputs`` (which looks ahead over the optimiser
step, since a loss is divided by what the whole step holds), and what a checkpoint has beside TRL's own.
"""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.logging import get_logger  # type: ignore[import-untyped]
from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models import prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, get_config_model_id

from ...loss.advantages import NEVER_NEGATIVE, soft_overlong_penalty
from ...training.samples.collect import UNEQUAL
from ...training.update import Means
from . import resume
from .config import RPGConfig
from .record import RecordedStep
from .reference import TRLReference
from .scores import GenerationScores, total_reward
from .setup import AlgorithmLike, algorithm_of, messages, paper, refuse, signal_function, weighed

logger = get_logger(__name__)

# what a batch has beside text, for models that see
SEEN = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@dataclass
class Window:
    """The micro-batches of one optimiser step. ``start``: TRL's count of micro-batches at its first."""

    start: int
    batches: list[Any]  # what the data loader gave for each
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    denominator: float = 0.0  # of gradients added up over micro-batches and averaged over processes; 0: no tokens


class StepMeans(Means):
    """Metrics of micro-batches -> metrics of the optimiser step. All processes call ``add`` for each of theirs."""

    def __init__(self, accelerator: Accelerator):
        super().__init__()
        self.accelerator = accelerator

    def _rows(self, row: Tensor) -> list[list[float]]:
        rows: list[list[float]] = self.accelerator.gather(row[None]).tolist()
        return rows

    def take(self) -> dict[str, float]:
        """The step's metrics; the next step begins empty."""
        metrics = self.result()
        self.sums, self.weights = {}, {}
        return metrics


class RPGTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with any method of rpg: a preset's name, an Algorithm or a PolicyLoss. Other arguments are TRL's."""

    _tag_names = ("trl", "rpg")

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: RPGConfig | None = None,
        *more: Any,
        algorithm: AlgorithmLike = None,
        **named: Any,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = RPGConfig(f"{name.split('/')[-1]}-RPG")
        if not isinstance(args, RPGConfig):
            raise TypeError(f"args must be an rpg.integrations.trl.RPGConfig; got {type(args).__name__}")
        self.algorithm = algorithm_of(args, algorithm)
        self._name, self._paper = self.algorithm.name, paper(self.algorithm)  # of the model card
        self.method = self.algorithm.resolve(args.dynamic, args.overlong, args.reference_update)
        has_sampler_logp = args.use_vllm or named.get("rollout_func") is not None
        refuse(self.method, args, has_sampler_logp)
        anchor, sharded = self.method.anchor, _sharding(args)
        if sharded and anchor not in ("old", "frozen"):
            raise ValueError(
                f"reference_update={anchor} with {sharded}: the reference's shards cannot be renewed here; "
                "take old or frozen, or DDP"
            )
        beta = max(self.method.loss.beta, self.method.advantage.beta) if anchor != "old" else 0.0
        args.beta = beta if sharded else 0.0  # a sharded model's reference, which never changes, is left to TRL
        super().__init__(model, reward_funcs, args, *more, **named)
        args.beta = 0.0
        self.beta = beta  # TRL scores the reference where this is not 0
        self.reference: TRLReference | None = None
        if anchor != "old" and not sharded:
            self.reference = TRLReference(self.model, anchor, args.reference, is_peft_model(self.model))
            copy = self.reference.copy
            self.ref_model = self.reference.adapted_model if copy is None else self._prepare_reference(copy)
        self._window: Window | None = None
        self._sampler: Any = None
        self._means = StepMeans(self.accelerator)
        self._scored: tuple[Tensor, list[int]] | None = None  # rewards of all processes, lengths of this one's
        self._recorded, self._grad_norm = RecordedStep(args), math.nan
        if args.record is not None and self.aux_loss_enabled:
            raise ValueError("record: the router's auxiliary loss is in the gradient too, and no replay has it")
        self._first = True  # no rewards were seen yet
        self.add_callback(_Steps(self))
        self._correct = signal_function(args, self.reward_func_names)
        by = None if self._correct is None else self.reward_func_names[self._correct]
        for text in messages(self.method, args, by, has_sampler_logp):
            logger.warning(text)

    def _prepare_reference(self, model: Any) -> Any:
        """As TRL prepares its own."""
        if self.args.disable_dropout:
            disable_dropout_in_model(model)
        add_fused_lm_head(model, temperature=self.temperature, cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(model, self.accelerator)
        return self.accelerator.prepare_model(model, evaluation_mode=True)

    # ---- rewards -> advantages ---------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards_NF: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = rewards_NF, [len(ids) for ids in completion_ids_list]
        return rewards_NF

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch of this process with the algorithm's advantages; ``rpg_keep``: what is trained on."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rule = self.method.advantage
        if rule.beta and "old_per_token_logps" not in batch:
            with torch.no_grad():
                size = self.args.per_device_train_batch_size
                batch["old_per_token_logps"] = self._score(self.model, batch, batch_size=size)[0]
        scores = self._scores()
        training = bool(self.model.training)
        token_wise: dict[str, Tensor] = {}
        if rule.needs_mask:
            token_wise["mask"] = self._of_all(_mask(batch).long()).bool()
            if rule.beta:
                old_BT = batch["old_per_token_logps"]
                token_wise["old_logp"] = self._of_all(old_BT)
                token_wise["ref_logp"] = self._of_all(batch.get("ref_per_token_logps", old_BT))
        alone = not training and self.num_generations_eval < 2  # nothing to compare in an evaluation
        if alone:
            advantage, keep_N = torch.zeros_like(scores.reward_N), ~scores.reward_N.isnan()
        else:
            advantage, keep_N = scores.advantages(rule, self.method.dynamic and training, **token_wise)
        first = self.accelerator.process_index * len(inputs)
        rows = slice(first, first + len(inputs))
        self._log_scores(scores, advantage, keep_N)
        if self._first and training:
            self._first = False
            if rule.never_negative(scores.reward_N[~scores.reward_N.isnan()].tolist() or [0.0]):
                logger.warning(f"{self.method.name}: {NEVER_NEGATIVE}")
        if advantage.dim() == 2:
            advantage = advantage[:, : batch["completion_ids"].shape[1]]
        return batch | {
            "advantages": advantage[rows],
            "rpg_keep": keep_N[rows],
            "rpg_group": scores.group_N[rows],
            "rpg_reward": (scores.reward_N + scores.penalty_N)[rows],
        }

    def _scores(self) -> GenerationScores:
        """Of all processes, in the order of prompts."""
        assert self._scored is not None
        rewards_NF, lengths = self._scored
        samples = self.num_generations if self.model.training else self.num_generations_eval
        normalised = self.multi_objective_aggregation == "normalize_then_sum"
        reward_N = total_reward(rewards_NF, self.reward_weights, samples, normalised)
        penalty_N = torch.zeros_like(reward_N)
        if self.method.overlong:
            length_N = self.accelerator.gather(torch.tensor(lengths, device=reward_N.device))
            limit, zone = self.max_completion_length, self.args.overlong_tokens
            penalty_N = soft_overlong_penalty(length_N, limit, zone).to(reward_N)
        group_N = torch.arange(len(reward_N), device=reward_N.device) // samples
        correct_N = None if self._correct is None else rewards_NF[:, self._correct]
        return GenerationScores(reward_N, penalty_N, group_N, correct_N)

    def _of_all(self, x_BT: Tensor) -> Tensor:
        """Rows of all processes, as wide as the widest. No booleans: accelerate makes integers of those it pads."""
        gathered: Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(x_BT, dim=1))
        return gathered

    def _log_scores(self, scores: GenerationScores, advantage: Tensor, keep_N: Tensor) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        if self.method.overlong:
            metrics["reward/overlong"].append(float(scores.penalty_N.mean()))
        if self.method.dynamic and self.model.training:
            metrics["groups/kept"].append(float(len(set(scores.group_N[keep_N].tolist()))))
            metrics["groups/sampled"].append(float(scores.group_N[-1] + 1))
        column: deque[float] = self._logs["advantages"]  # of the table of completions, where TRL has put its own
        for _ in range(min(len(column), len(advantage))):
            column.pop()
        column.extend((advantage if advantage.dim() == 1 else advantage[:, 0]).tolist())

    # ---- the optimiser step ------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        """An optimiser step begins.

        Of an iterable dataset's last micro-batches, if too few, Trainer makes none: nothing of them is left for this.
        """
        samples = super().get_batch_samples(*args, **named)
        self.model_wrapped.zero_grad()
        self._means.take()
        self._window = Window(self._step, samples[0])
        return samples

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """In training, all micro-batches of the optimiser step are made when its first is asked for."""
        if not self.model.training:
            batch: dict[str, Any] = super()._prepare_inputs(generation_batch)
            return batch
        window = self._window
        if window is None or not 0 <= self._step - window.start < len(window.batches):
            raise RuntimeError(
                "a micro-batch of no optimiser step: RPGTrainer divides by what the whole step holds, which "
                "Trainer.get_batch_samples tells it; train with trainer.train()"
            )
        if not window.micro_batches:
            for step, batch in enumerate(window.batches, window.start):
                self._step: int = step  # TRL's count of micro-batches
                window.micro_batches.append(super()._prepare_inputs(batch))
            self._step = window.start
            window.denominator = self.method.loss.step_denominator(*map(_trained, window.micro_batches))
        return window.micro_batches[self._step - window.start]

    def _score(self, model: Any, batch: dict[str, Any], **options: Any) -> tuple[Tensor, Any, Any]:
        """TRL's log-probabilities of a batch's responses, entropies and router loss."""
        ids_BL = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention_BL = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        seen = {name: batch.get(name) for name in SEEN}
        length = batch["completion_ids"].shape[1]
        scored: tuple[Tensor, Any, Any] = self._get_per_token_logps_and_entropies(
            model, ids_BL, attention_BL, length, **options, **seen
        )
        return scored

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training, rule = bool(self.model.training), self.method.loss
        logp_BT, entropy_BT, aux_loss = self._score(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        mask_BT = _trained(inputs)
        old_BT = inputs.get("old_per_token_logps")
        old_BT = logp_BT.detach() if old_BT is None else old_BT
        ref_BT = inputs.get("ref_per_token_logps")
        if ref_BT is None and "ref_logp" in rule.needs:  # the reference is the sampling policy
            ref_BT = old_BT
        rollout_BT = inputs.get("sampling_per_token_logps")
        if rollout_BT is not None:
            rule = weighed(rule, self.args)  # nan where vLLM had none: taken for the trainer's
            rollout_BT = torch.where(rollout_BT.isnan(), old_BT.to(rollout_BT.dtype), rollout_BT)
        if training:
            assert self._window is not None
            denominator = self._window.denominator
        else:
            denominator = rule.step_denominator(mask_BT)
        out = rule(
            logp_BT,
            old_BT,
            inputs["advantages"],
            mask_BT,
            ref_logp=ref_BT,
            rollout_logp=rollout_BT,
            denominator=denominator or 1.0,
            entropy=entropy_BT,
            groups=inputs["rpg_group"],
        )
        loss = out.loss
        if training and self._recorded.due(self.state.global_step):
            logps = {"old_logp": old_BT, "ref_logp": ref_BT, "rollout_logp": rollout_BT, "mask": mask_BT}
            self._recorded.add(inputs, rule, loss, **logps)
        metrics = self._metrics["train" if training else "eval"]
        if self.aux_loss_enabled:
            micro_batches = self.current_gradient_accumulation_steps if training else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / micro_batches
            metrics["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self._means.add(out.metrics)
        if not training:
            self._log(self._means.take(), "eval")
        return loss

    def _log(self, values: dict[str, float], mode: str) -> None:
        for name, value in values.items():
            self._metrics[mode][name].append(value)

    def _get_grad_norm(self, *args: Any, **named: Any) -> Any:
        norm = super()._get_grad_norm(*args, **named)
        self._grad_norm = math.nan if norm is None else float(norm)
        return norm

    def _before_optimizer(self) -> None:
        """A step on nothing would still move weights, by momentum and decay; without gradients it does not."""
        window = self._window
        if window is not None and window.denominator and self._recorded.due(self.state.global_step):
            measured = {"grad_norm": self._grad_norm, **self._means.result()}
            self._recorded.write(self, window.denominator, {k: x for k, x in measured.items() if math.isfinite(x)})
        if window is None or window.denominator or self.aux_loss_enabled:
            return
        equal = self.method.dynamic and any(bool(_mask(batch).any()) for batch in window.micro_batches)
        unequal = UNEQUAL["reward" if self._correct is None else "correct"]
        why = f"no group had {unequal}" if equal else "no response is left to train on"
        logger.warning(f"step {self.state.global_step + 1}: {why}; nothing learnt")
        if not self.is_deepspeed_enabled:
            self.model.zero_grad(set_to_none=True)

    def _after_optimizer(self) -> None:
        metrics = self._means.take()
        if self.reference is not None:
            generates = self._step % resume.cycle(self) == 0
            renewed = self.reference.after_step(self.state.global_step, metrics.get("kl/ref"), generates)
            renewals = self.reference.renewal.renewals
            metrics |= {"reference/updated": float(renewed), "reference/renewals": float(renewals)}
        self._log(metrics, "train")

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """What is rpg's comes first: a folder that TRL has finished is whole."""
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if not self.args.save_only_model:
            folder.mkdir(parents=True, exist_ok=True)
            resume.save(self, folder)
            if self.args.should_save and self.reference is not None:
                self.reference.save(folder)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if self.reference is not None:
            self.reference.load(folder)
        if (warning := resume.load(self, folder)) is not None:
            logger.warning(warning)

    def _get_train_sampler(self, *args: Any, **named: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **named)
        return self._sampler

    def _replay(self, micro_batches: int) -> None:
        """TRL shuffles every epoch with one generator: a resumed run draws again for those that are over."""
        steps = max(1, math.ceil(micro_batches / self.args.gradient_accumulation_steps))
        for _ in range(self.state.global_step // steps):
            next(iter(self._sampler), None)


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Tells the trainer when the training begins, and when an optimiser step is made."""

    def __init__(self, trainer: RPGTrainer):
        self.trainer = trainer

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        if self.trainer._sampler is not None:
            self.trainer._replay(len(train_dataloader))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer._before_optimizer()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer._after_optimizer()


def _mask(batch: dict[str, Any]) -> Tensor:
    """[B,T]: the tokens that the policy sampled."""
    mask_BT: Tensor = batch["completion_mask"].bool()
    return mask_BT if batch.get("tool_mask") is None else mask_BT & batch["tool_mask"].bool()


def _trained(batch: dict[str, Any]) -> Tensor:
    """[B,T]: those of them that are trained on."""
    keep_B: Tensor = batch["rpg_keep"]
    return _mask(batch) & keep_B.unsqueeze(-1)


def _sharding(args: RPGConfig) -> str | None:
    """What cuts the model's weights into pieces, if anything does."""
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        return "DeepSpeed ZeRO-3"
    wanted = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return "FSDP" if wanted else None
