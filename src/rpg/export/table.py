"""Which setting of a recipe is which of verl's and TRL's: the table of docs/export.md."""

from __future__ import annotations

A, R, M, T = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model", "trainer"
NOT = "not carried over"
REFUSED = "refused"
MADE = "in train.parquet and test-*.parquet"
READ = "read from recipe.yaml by train.py"
REWARD = "in reward.py"

# setting -> (verl, TRL). In backticks: settings of theirs, which tests look for.
ROWS: dict[str, tuple[str, str]] = {
    "algorithm": (f"`{A}.policy_loss.loss_mode`, `algorithm.adv_estimator`, `{A}.loss_agg_mode`", "`algorithm`"),
    "loss": (f"`{A}.policy_loss.rpg`", "`loss`"),
    "model": (f"`{M}.path`", "the trainer's first argument"),
    "model_options": (f"`{M}.trust_remote_code`; others refused", "`model_init_kwargs`"),
    "dtype": (f"`{A}.fsdp_config.mixed_precision`, `{R}.dtype`; auto is bfloat16; float32 masters", "`bf16`"),
    "device": (NOT, "`use_cpu`"),
    "steps": (f"`{T}.total_training_steps`, those that are left", "`max_steps` = steps left × minibatches × epochs"),
    "minutes": (NOT, NOT),
    "seed": (f"`data.seed`, `{R}.seed`, `{A}.data_loader_seed`, `{A}.fsdp_config.seed`", "`seed`"),
    "output": (f"`{T}.experiment_name`; checkpoints go into the folder", "`run_name`"),
    "task.name": (MADE, READ),
    "task.test": (f"{MADE}: `data.val_files`", f"{READ}"),
    "task.prompt_key": (MADE, READ),
    "task.answer_key": (MADE, READ),
    "task.rewards": (f"{REWARD}: `reward.custom_reward_function.path`", READ),
    "task.reward": (f"{REWARD}; the file is copied", READ),
    "task.template": (MADE, READ),
    "task.system": (MADE, READ),
    "task.chat": (f"`{M}.custom_chat_template`, one that adds nothing, without chat", READ),
    "task.chat_options": ("`data.apply_chat_template_kwargs`", "`chat_template_kwargs`"),
    "task.timeout": (REWARD, READ),
    "task.memory_gb": (REWARD, READ),
    "task.on_error": (REWARD, READ),
    "task.workers": (f"{REWARD}, in each of verl's reward workers", READ),
    "rollout.engine": ("always vLLM", "`use_vllm`"),
    "rollout.vllm": (f"`{R}.gpu_memory_utilization` …, others `{R}.engine_kwargs.vllm`", "`vllm_…`; others refused"),
    "rollout.end_tokens": (REFUSED, REFUSED),
    "rollout.prompts": ("`data.train_batch_size`", "`steps_per_generation` and `per_device_train_batch_size`"),
    "rollout.samples": (f"`{R}.n`", "`num_generations`"),
    "rollout.max_prompt_tokens": ("`data.max_prompt_length`", "longer prompts are left out by train.py"),
    "rollout.max_new_tokens": ("`data.max_response_length`", "`max_completion_length`"),
    "rollout.temperature": (f"`{R}.temperature`", "`temperature`"),
    "rollout.top_p": (f"`{R}.top_p`", "`top_p`"),
    "rollout.top_k": (f"`{R}.top_k`", "`top_k`"),
    "rollout.slots": (f"`{R}.max_num_seqs`", NOT),
    "rollout.old_logp": (
        "`algorithm.rollout_correction.bypass_mode` for engine, else anew; engine with loss.mismatch refused",
        "engine: refused",
    ),
    "rollout.dynamic": (
        "`algorithm.filter_groups.enable`, by `algorithm.filter_groups.metric` = signal",
        "`dynamic`: groups are dropped, not replaced",
    ),
    "rollout.oversample": (NOT, NOT),
    "rollout.max_rounds": (NOT, NOT),
    "rollout.overlong": ("`reward.reward_manager.name` = dapo", "`overlong`"),
    "rollout.overlong_tokens": ("`reward.reward_kwargs`: overlong_buffer_cfg.len", "`overlong_tokens`"),
    "peft.method": (f"`{M}.lora_rank`; lora alone", "the trainer's peft_config"),
    "peft.options": (
        f"`{M}.lora_alpha`, `{M}.target_modules`; others, and lora_dropout other than 0, refused",
        "the trainer's peft_config",
    ),
    "optim.name": ("adamw alone", "adamw alone"),
    "optim.lr": (f"`{A}.optim.lr`", "`learning_rate`"),
    "optim.warmup": (f"`{A}.optim.override_optimizer_config`, at each optimiser step", "create_scheduler of train.py"),
    "optim.schedule": (f"`{A}.optim.optimizer` = rpg's ScheduledAdamW", "create_scheduler of train.py"),
    "optim.betas": (f"`{A}.optim.betas`", "`adam_beta1`, `adam_beta2`"),
    "optim.weight_decay": (f"`{A}.optim.weight_decay`, on every parameter", "`weight_decay`, on embeddings too"),
    "optim.max_grad_norm": (f"`{A}.optim.clip_grad`", "`max_grad_norm`"),
    "optim.minibatches": (f"`{A}.ppo_mini_batch_size` = prompts / minibatches", "`gradient_accumulation_steps`"),
    "optim.epochs": (f"`{A}.ppo_epochs`", "`num_iterations`"),
    "optim.micro_tokens": (f"`{A}.ppo_max_token_len_per_gpu`, `{A}.use_dynamic_bsz`", "`per_device_train_batch_size`"),
    "optim.recompute": (f"`{M}.enable_gradient_checkpointing`", "`gradient_checkpointing`"),
    "optim.max_bad_steps": (NOT, NOT),
    "reference.update": (
        f"`{A}.policy_loss.rpg`: reference.update; `{A}.use_kl_loss`; no ema, nor every or kl with LoRA",
        "`reference_update`",
    ),
    "reference.every": (f"`{A}.policy_loss.rpg`: reference.every", "`reference_every` × optimiser steps of a batch"),
    "reference.kl": (f"`{A}.policy_loss.rpg`: reference.kl", "`reference_kl`; refused with several steps on a batch"),
    "reference.smoothing": (f"`{A}.policy_loss.rpg`: reference.smoothing", "`reference_smoothing`; as kl"),
    "reference.decay": (REFUSED, "`reference_decay`; as kl"),
    "eval.every": (f"`{T}.test_freq`", "`eval_steps`"),
    "eval.problems": (MADE, READ),
    "eval.k": (f"`{R}.val_kwargs.n`", "`num_generations_eval`"),
    "eval.temperature": (f"`{R}.val_kwargs.temperature`", "no evaluation where it is not the rollout's, or with top_k"),
    "eval.top_p": (f"`{R}.val_kwargs.top_p`", "as eval.temperature"),
    "checkpoint.every": (f"`{T}.save_freq`", "`save_steps`"),
    "checkpoint.keep": (f"`{T}.max_actor_ckpt_to_keep`", "`save_total_limit`"),
    "checkpoint.best": (NOT, NOT),
    "log.tensorboard": (f"`{T}.logger`", "`report_to`"),
    "log.wandb": (f"`{T}.logger`, `{T}.project_name`", "`report_to`, `project`"),
    "log.trackio": (f"`{T}.logger`, `{T}.project_name`", "`report_to`, `project`"),
    "log.samples": (NOT, NOT),
    "log.report": (NOT, NOT),
    "log.view": (NOT, NOT),
}


def markdown() -> str:
    """actor: actor_rollout_ref.actor, and so on: the table as it stands in the docs."""
    lines = ["| recipe | verl | TRL (`RPGConfig`) |", "|---|---|---|"]
    for name, (verl, trl) in ROWS.items():
        lines.append(f"| `{name}` | {verl.replace('actor_rollout_ref.', '')} | {trl} |")
    return "\n".join(lines) + "\n"
