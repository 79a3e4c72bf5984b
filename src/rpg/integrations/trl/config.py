"""RPGConfig: GRPOConfig and what rpg adds. What the algorithm decides cannot be set a second time in TRL's words."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from trl import GRPOConfig

from ...console import one_of
from ...loss.anchor import COUNTS
from ...run.config import ReferenceConfig

DEFAULT = "rpg-reinforce-urkl"
UPDATES = ("auto", "old", "every", "kl", "ema", "frozen")
_MISMATCH = 'loss={"mismatch": "tis"} (or icepop, mis), which corrects for the sampler'
_ENTROPY = "its default: no method of rpg has an entropy term"
_VESPO = "its default: vespo is TRL's own method, use GRPOTrainer for it"
_SAPO = 'algorithm="sapo" with loss={"tau_positive": …, "tau_negative": …}'
_EVERY = 'reference_update="every" with reference_every=…, or "ema" with reference_decay=…'

# TRL's settings that an algorithm of rpg decides, and what to set instead
DECIDED = {
    "beta": 'loss={"beta": …}',
    "loss_type": 'algorithm=… and loss={"reduction": …}',
    "epsilon": 'loss={"low": …}, the clip\'s lower bound',
    "epsilon_high": 'loss={"high": …}, the clip\'s upper bound',
    "delta": 'loss={"c": …} with a method that clips twice, such as rpg-urkl',
    "importance_sampling_level": 'loss={"level": "token"}, "sequence" or "sequence-mean"',
    "scale_rewards": 'loss={"advantage": "group-mean"}, "group-mean-std", "batch-whitening", …',
    "use_bias_correction_kl": 'algorithm="grpo-corrected" (with the weight) or "grpo" (without)',
    "sync_ref_model": _EVERY,
    "ref_model_mixup_alpha": _EVERY,
    "ref_model_sync_steps": _EVERY,
    "off_policy_mask_threshold": 'loss={"mismatch": "sequence-mask"}',
    "vllm_importance_sampling_mode": _MISMATCH,
    "vllm_importance_sampling_clip_max": _MISMATCH,
    "vllm_importance_sampling_clip_min": _MISMATCH,
    "top_entropy_quantile": _ENTROPY,
    "entropy_coef": _ENTROPY,
    "use_adaptive_entropy": _ENTROPY,
    "sapo_temperature_pos": _SAPO,
    "sapo_temperature_neg": _SAPO,
    "vespo_k_pos": _VESPO,
    "vespo_lambda_pos": _VESPO,
    "vespo_k_neg": _VESPO,
    "vespo_lambda_neg": _VESPO,
}


@dataclass
class RPGConfig(GRPOConfig):  # type: ignore[misc]
    """GRPOConfig with the algorithm; everything else as in TRL."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "loss"]
    named = DEFAULT  # a value of ``algorithm`` that no user has set: the default, or a trainer's

    algorithm: str = field(default=DEFAULT, metadata={"help": "Name of a preset: `rpg algorithms` lists them."})
    loss: dict[str, Any] | str | None = field(
        default_factory=dict, metadata={"help": 'Options of the preset, as in recipes: {"beta": 1e-3}.'}
    )
    reference_update: str = field(
        default="auto",
        metadata={
            "help": "The KL's anchor: `old` (the sampling policy; no second model is held), a copy renewed `every` K "
            "updates, when its `kl` passes a target, as a moving average (`ema`), or never (`frozen`); `auto`: "
            "as the algorithm was published."
        },
    )
    reference_every: int = field(
        default=10, metadata={"help": "every: updates between renewals, as reference_count counts them."}
    )
    reference_count: str = field(
        default="optimizer-steps",
        metadata={"help": "What every and smoothing count: `optimizer-steps`, or `iterations` (generations)."},
    )
    reference_kl: float = field(
        default=0.05, metadata={"help": "kl: renewed when the moving average of the KL per token passes this."}
    )
    reference_smoothing: float = field(default=0.9, metadata={"help": "kl: weight of the past in that moving average."})
    reference_decay: float = field(default=0.99, metadata={"help": "ema: weight of the past at each optimiser step."})
    overlong: bool | None = field(
        default=None, metadata={"help": "Soft overlong penalty; None: as the algorithm was published."}
    )
    overlong_tokens: int = field(
        default=16, metadata={"help": "Tokens before max_completion_length in which the penalty grows from 0 to 1."}
    )
    dynamic: bool | None = field(
        default=None,
        metadata={"help": "Drop groups without signal; None: as the algorithm was published."},
    )
    dynamic_by: str = field(
        default="auto",
        metadata={
            "help": "What tells groups with signal from those without: the `reward`, or the reward function of this "
            "name; `auto`: the first called `correct` or `accuracy_reward`, if there is one, else the reward."
        },
    )

    record: str | None = field(
        default=None,
        metadata={"help": "File for the batch of one optimiser step, the weights beside it: for rpg replay."},
    )
    record_step: int = field(default=1, metadata={"help": "record: which optimiser step, counted from 1."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.algorithm, str):
            raise ValueError("algorithm of RPGConfig is a preset's name: pass objects as RPGTrainer(algorithm=…)")
        self.loss = {} if self.loss is None else self.loss
        if not isinstance(self.loss, dict):
            raise ValueError(f'loss must be the options of the preset, as in {{"beta": 1e-3}}; got {self.loss!r}')
        defaults = {f.name: f.default for f in fields(GRPOConfig)}
        for name, instead in DECIDED.items():
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} is decided by the algorithm here: set {instead}")
        one_of("reference_update", self.reference_update, UPDATES)
        one_of("reference_count", self.reference_count, COUNTS)
        for name in ("reference_every", "reference_kl", "record_step"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        for name in ("reference_smoothing", "reference_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")
        if getattr(self, "use_liger_kernel", False):
            warnings.warn(
                "use_liger_kernel is switched off: rpg's losses need per-token log-probabilities, which TRL's own "
                "fused head computes without the logits; Liger's patched layers were not tested with it",
                stacklevel=3,
            )
            self.use_liger_kernel = False

    @property
    def reference(self) -> ReferenceConfig:
        return ReferenceConfig(
            update=self.reference_update,  # type: ignore[arg-type]
            every=self.reference_every,
            count=self.reference_count,  # type: ignore[arg-type]
            kl=self.reference_kl,
            smoothing=self.reference_smoothing,
            decay=self.reference_decay,
        )
