"""Mistakes that trainers have shipped, planted one at a time into an exact loss, and the losses that have none.

Each is a loss as a user would hand it to ``rpg audit FILE:name --divergence rkl --drift 0.05 --strict``. ``BUGS`` says
what the audit should call it; an empty string where nothing in its dictionary fits, and it is only caught.
"""

import torch

CLIP = (0.8, 1.28)


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def terms(logp, old_logp, ref_logp):
    return (logp - old_logp).exp(), logp - ref_logp


def per_token(logp, old_logp, advantages, ref_logp, beta):
    w, log_u = terms(logp, old_logp, ref_logp)
    return -w * advantages[:, None] + beta * w * log_u


# ---- how the tokens are summed ---------------------------------------------------------------------------------------


def nomask(logp, old_logp, advantages, mask, ref_logp, beta=0.1):
    """A plain mean over the padded batch."""
    return per_token(logp, old_logp, advantages, ref_logp, beta).mean()


def sequence_mean_of_token_means(logp, old_logp, advantages, mask, ref_logp, beta):
    """GRPO as published: short responses weigh more (Dr. GRPO's complaint)."""
    x = per_token(logp, old_logp, advantages, ref_logp, beta) * mask
    return (x.sum(1) / mask.sum(1)).mean()


def eos_is_pad(logp, old_logp, advantages, mask, ref_logp, beta):
    """pad_token = eos_token, and the mask is made of `tokens != pad`: the EOS is never learned."""
    ends = mask.cumsum(1) == mask.sum(1, keepdim=True)
    return token_mean(per_token(logp, old_logp, advantages, ref_logp, beta), mask & ~ends)


def mask_of_the_labels(logp, old_logp, advantages, mask, ref_logp, beta):
    """Log-probabilities are shifted by one, the mask is not."""
    late = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    return token_mean(per_token(logp, old_logp, advantages, ref_logp, beta), late)


def mean_of_micro_batch_means(logp, old_logp, advantages, mask, ref_logp, beta):
    """Gradient accumulation that averages averages (transformers before 4.46, TRL's bnpo)."""
    x = per_token(logp, old_logp, advantages, ref_logp, beta)
    micro_batches = zip(x.split(4), mask.split(4), strict=True)
    return torch.stack([token_mean(*micro_batch) for micro_batch in micro_batches]).mean()


def kl_by_response(logp, old_logp, advantages, mask, ref_logp, beta):
    """DAPO's token mean for the policy, but the KL still averaged over each response."""
    w, log_u = terms(logp, old_logp, ref_logp)
    kl = ((w * log_u * mask).sum(1) / mask.sum(1)).mean()
    return token_mean(-w * advantages[:, None], mask) + beta * kl * len(mask) / mask.sum()


# ---- the KL ----------------------------------------------------------------------------------------------------------


def k3_without_weight(logp, old_logp, advantages, mask, ref_logp, beta):
    """GRPO as published; TRL with use_bias_correction_kl=False, Liger's default, verl's low_var_kl."""
    w, log_u = terms(logp, old_logp, ref_logp)
    clipped = torch.min(w * advantages[:, None], w.clamp(*CLIP) * advantages[:, None])
    return token_mean(-clipped + beta * ((-log_u).exp() - 1 + log_u), mask)


def k2_without_weight(logp, old_logp, advantages, mask, ref_logp, beta):
    """verl's kl_loss_type=mse, REINFORCE++-baseline."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w * advantages[:, None] + beta * log_u.square() / 2, mask)


def k1_in_the_loss(logp, old_logp, advantages, mask, ref_logp, beta):
    """verl's kl_loss_type=kl: the value of the KL, differentiated as if the samples did not depend on it."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w * advantages[:, None] + beta * log_u, mask)


def k1_with_a_detached_weight(logp, old_logp, advantages, mask, ref_logp, beta):
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w * advantages[:, None] + beta * w.detach() * log_u, mask)


def k3_with_a_detached_weight(logp, old_logp, advantages, mask, ref_logp, beta):
    """Weighted, but the weight's own gradient is cut: that of the forward KL is left."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w * advantages[:, None] + beta * w.detach() * ((-log_u).exp() - 1 + log_u), mask)


def k3_upside_down(logp, old_logp, advantages, mask, ref_logp, beta):
    """exp(log π/ref) for exp(log ref/π)."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w * advantages[:, None] + beta * (log_u.exp() - 1 - log_u), mask)


def kl_is_rewarded(logp, old_logp, advantages, mask, ref_logp, beta):
    """A minus lost between reward and penalty."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w * (advantages[:, None] + beta * log_u.detach()), mask)


def kl_without_the_half(logp, old_logp, advantages, mask, ref_logp, beta):
    """(log u)² for k2."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w * advantages[:, None] + beta * w.detach() * log_u.square(), mask)


def beta_forgotten(logp, old_logp, advantages, mask, ref_logp, beta):
    return per_token(logp, old_logp, advantages, ref_logp, 1.0)[mask].mean()


def kl_under_no_grad(logp, old_logp, advantages, mask, ref_logp, beta):
    """The penalty is logged and added, and has no gradient."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w * advantages[:, None] + beta * (w * log_u).detach(), mask)


def kl_to_old(logp, old_logp, advantages, mask, ref_logp, beta):
    """The reference model was never loaded: the sampler's log-probabilities stand in for it."""
    return token_mean(per_token(logp, old_logp, advantages, old_logp, beta), mask)


# ---- the reward ------------------------------------------------------------------------------------------------------


def old_and_ref_swapped(logp, old_logp, advantages, mask, ref_logp, beta):
    return token_mean(per_token(logp, ref_logp, advantages, old_logp, beta), mask)


def reward_without_weight(logp, old_logp, advantages, mask, ref_logp, beta):
    """REINFORCE on samples of an older policy: several optimiser steps a rollout, no ratio."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-logp * advantages[:, None] + beta * w * log_u, mask)


def ratio_detached(logp, old_logp, advantages, mask, ref_logp, beta):
    """CISPO's stop-gradient without its log π."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w.detach() * advantages[:, None] + beta * w * log_u, mask)


def ratio_upside_down(logp, old_logp, advantages, mask, ref_logp, beta):
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-(old_logp - logp).exp() * advantages[:, None] + beta * w * log_u, mask)


def weight_applied_twice(logp, old_logp, advantages, mask, ref_logp, beta):
    """In the advantage and again in the ratio: the sampler's correction where old is the sampler."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w.detach() * w * advantages[:, None] + beta * w * log_u, mask)


def ratio_of_the_response(logp, old_logp, advantages, mask, ref_logp, beta):
    """A product over the response where ratios were meant per token."""
    w, log_u = terms(logp, old_logp, ref_logp)
    whole = ((logp - old_logp) * mask).sum(1, keepdim=True).exp()
    return token_mean(-whole.detach() * logp * advantages[:, None] + beta * w * log_u, mask)


def old_one_token_late(logp, old_logp, advantages, mask, ref_logp, beta):
    """The engine's log-probabilities begin with the prompt's last token."""
    late = torch.cat([torch.zeros_like(old_logp[:, :1]), old_logp[:, :-1]], 1)
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-(logp - late).exp() * advantages[:, None] + beta * w * log_u, mask)


def advantages_of_the_neighbour(logp, old_logp, advantages, mask, ref_logp, beta):
    """Rewards come back in another order than the responses."""
    return token_mean(per_token(logp, old_logp, advantages.roll(1), ref_logp, beta), mask)


def whitened_again(logp, old_logp, advantages, mask, ref_logp, beta):
    """Advantages normalised in the loss: the harder the problem, the weaker the KL."""
    a = advantages / (advantages.std() + 1e-12)
    return token_mean(per_token(logp, old_logp, a, ref_logp, beta), mask)


def clip_bounds_the_ratio_itself(logp, old_logp, advantages, mask, ref_logp, beta):
    """TRL's and Liger's default of cispo: clamp(max=ε_high), not 1 + ε_high."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-w.clamp(max=0.2).detach() * logp * advantages[:, None] + beta * w * log_u, mask)


def padding_in_the_mean_ratio(logp, old_logp, advantages, mask, ref_logp, beta):
    """GSPO's ratio as the mean over the padded row."""
    w, log_u = terms(logp, old_logp, ref_logp)
    whole = (logp - old_logp).mean(1, keepdim=True).exp()
    return token_mean(-whole.detach() * logp * advantages[:, None] + beta * w * log_u, mask)


def ratio_in_bfloat16(logp, old_logp, advantages, mask, ref_logp, beta):
    """log-probabilities kept in bfloat16."""
    rounded = (logp - old_logp).bfloat16().double()
    log_u = logp - ref_logp
    return token_mean((-advantages[:, None] + beta * log_u) * rounded.exp(), mask)


def kl_in_every_tokens_reward(logp, old_logp, advantages, mask, ref_logp, beta):
    """The response's whole KL in its reward, without reward-to-go."""
    w, log_u = terms(logp, old_logp, ref_logp)
    total = (log_u.detach() * mask).sum(1, keepdim=True)
    return token_mean(-w * (advantages[:, None] - beta * total), mask)


BUGS = {
    nomask: "padding counts",
    sequence_mean_of_token_means: "each response is divided by its own length",
    eos_is_pad: "the last token (the EOS) does not count",
    mask_of_the_labels: "the mask is one token late",
    mean_of_micro_batch_means: "mean over the micro-batch (4 rows each)",
    kl_by_response: "each response is divided by its own length, in the KL",
    k3_without_weight: "the weight w is missing on the KL (k3, as GRPO was published)",
    k2_without_weight: "the weight w is missing on the KL (k2)",
    k1_in_the_loss: "the weight w is missing on the KL (k1, which has no gradient on-policy)",
    k1_with_a_detached_weight: "the KL has no gradient in the mean: w is detached in w·k1",
    k3_with_a_detached_weight: "this is ufkl's gradient (and fkl's), not rkl's",
    k3_upside_down: "the weight w is missing on the KL, and k3 is upside down: π/ref for ref/π",
    kl_is_rewarded: "the KL has the wrong sign",
    kl_without_the_half: "the KL counts twice",
    beta_forgotten: "β is missing: the KL counts in full",
    kl_under_no_grad: "the KL has no gradient (is it detached, or left out?)",
    kl_to_old: "the KL is anchored to old, not to ref",
    old_and_ref_swapped: "old and ref are swapped",
    reward_without_weight: "the importance weight w is missing on the reward",
    ratio_detached: "the reward has no gradient (is the ratio detached?)",
    ratio_upside_down: "the ratio is upside down, old/π",
    weight_applied_twice: "the weight w is applied twice to the reward",
    ratio_of_the_response: "the ratio is the product over the response, and the objective's is another",
    old_one_token_late: "old is one token late, in the reward",
    advantages_of_the_neighbour: "each response has another's advantage: they are one off",
    whitened_again: "the advantages are divided by their standard deviation inside the loss, the KL is not",
    clip_bounds_the_ratio_itself: "the importance weight w is missing on the reward",
    padding_in_the_mean_ratio: "",
    ratio_in_bfloat16: "",
    kl_in_every_tokens_reward: "every token's reward holds the KL of the whole response",
}


# ---- and those that are right ----------------------------------------------------------------------------------------


def plain_rkl(logp, old_logp, advantages, mask, ref_logp, beta):
    return token_mean(per_token(logp, old_logp, advantages, ref_logp, beta), mask)


def rkl_with_k3(logp, old_logp, advantages, mask, ref_logp, beta):
    """w in front of k3, and differentiated: TRL's default."""
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(w * (beta * ((-log_u).exp() - 1 + log_u) - advantages[:, None]), mask)


def rkl_reinforce(logp, old_logp, advantages, mask, ref_logp, beta):
    w, log_u = terms(logp, old_logp, ref_logp)
    return token_mean(-(w * (advantages[:, None] - beta * log_u)).detach() * logp, mask)


def rkl_clipped(logp, old_logp, advantages, mask, ref_logp, beta):
    """With a clip, which does nothing at this drift; summed and divided by a constant, with a baseline."""
    w, log_u = terms(logp, old_logp, ref_logp)
    a = advantages[:, None] - 0.3
    return ((-torch.min(w * a, w.clamp(*CLIP) * a) + beta * w * log_u) * mask).sum() / 7


def fkl(logp, old_logp, advantages, mask, ref_logp, beta):
    w = (logp - old_logp).exp()
    return token_mean(-w * advantages[:, None] - beta * (ref_logp - old_logp).exp() * logp, mask)


def ufkl(logp, old_logp, advantages, mask, ref_logp, beta):
    w = (logp - old_logp).exp()
    return token_mean(-w * advantages[:, None] + beta * (w - (ref_logp - old_logp).exp() * logp), mask)


def no_kl(logp, old_logp, advantages, mask):
    return token_mean(-(logp - old_logp).exp() * advantages[:, None], mask)


EXACT = {
    plain_rkl: "rkl",
    rkl_with_k3: "urkl",
    rkl_reinforce: "rkl",
    rkl_clipped: "rkl",
    fkl: "fkl",
    ufkl: "ufkl",
    no_kl: "none",
}
