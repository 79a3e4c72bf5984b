"""The loss and everything in it: torch tensors in, a loss out. Imports torch and nothing else, and works alone."""

# What TRL, verl, OpenRLHF and others call a method's options: for "did you mean". Here, as a look at it costs no torch.
OTHER_NAMES = {
    "beta": "kl_coef kl_coeff kl_loss_coef init_kl_coef kl_beta",
    "low": "epsilon cliprange clip_eps clip_ratio clip_ratio_low eps_clip eps_clip_low",
    "high": "epsilon_high cliprange_high clip_ratio_high eps_clip_high",
    "c": "clip_ratio_c",
    "level": "importance_sampling_level",
    "reduction": "loss_agg_mode",
    "divergence": "kl_loss_type",
    "entropy_bonus": "entropy_coeff entropy_coef ent_coef",
    "mismatch": "vllm_importance_sampling_correction rollout_is rollout_correction use_tis",
    "advantage": "scale_rewards norm_adv_by_std_in_grpo",
}
