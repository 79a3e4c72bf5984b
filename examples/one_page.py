"""RPG on one page: a language model learns arithmetic by reinforcement learning. Read it from top to bottom.

    python examples/one_page.py                      50 steps: minutes on two CPU cores, or on a GPU if there is one
    python examples/one_page.py --steps 2 --seed 1

The model has a million parameters and comes with the package, and so does the task: "7+3*8-4" wants "answer 27". The
method is RPG-REINFORCE with the unnormalised reverse KL (arXiv 2505.17508). These are the steps of `rpg train` with its
defaults: the same prompts, the same sampled tokens, the same gradients. What `rpg train` has and this page leaves out:

- models, tasks and rewards of your own; rewards that may hang or crash run in other processes there
- a copy of the initial model, which methods such as GRPO need to anchor their KL term
- micro-batches without padding, bfloat16, several GPUs, vLLM, adapters: memory and speed, the same gradient
- checkpoints, resuming, logs, the report, and guards against a loss that is not finite

Letters at the end of a tensor's name are its shape: B responses, T tokens, V words of the vocabulary.
"""

import argparse
import math
import time

import torch
from torch.nn.utils.rnn import pad_sequence

import rpg
from rpg.loss.advantages import soft_overlong_penalty
from rpg.models.policy import Policy
from rpg.rollout import NativeEngine
from rpg.run.seeds import permutation, stream
from rpg.tasks import load_task

METHOD = "rpg-reinforce-urkl"  # `rpg algorithms` lists the others; those with a reference (grpo) need `rpg train`
PROMPTS, SAMPLES = 32, 8  # groups in a step, responses in a group
MAX_NEW_TOKENS, OVERLONG_TOKENS = 80, 16  # a response is cut at 80 tokens; in the last 16 the penalty grows to 1
OVERSAMPLE, MAX_ROUNDS = 1.25, 4  # spare prompts in a round of sampling, rounds in a step
MINIBATCHES = 4  # optimiser steps on one batch of responses; from the second on it is off-policy
LR, WARMUP, MAX_GRAD_NORM = 5e-4, 5, 1.0
EVAL_EVERY, EVAL_PROBLEMS, EVAL_SAMPLES = 10, 128, 8


def learning_rate(number, total):
    """Of optimiser step `number` of `total`, from 0: up while it warms up, then down a line to a tenth at the last."""
    if number < WARMUP:
        return LR * (number + 1) / WARMUP
    return LR * (1 - 0.9 * (number - WARMUP + 1) / max(total - WARMUP, 1))


def respond(policy, engine, task, problems, samples, seed):
    """For each problem: its prompt, responses to it, and their scores, 1 for the right answer, else 0."""
    prompts = [policy.encode(problem.prompt) for problem in problems]
    rollouts = engine.generate(prompts, n=samples, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0, seed=seed)
    for problem, prompt, group in zip(problems, prompts, rollouts, strict=True):
        yield prompt, group, [task.reward(policy.decode(r.tokens), problem.answer, problem.prompt) for r in group]


def accuracy(policy, engine, task):
    """Share of right responses to problems that are never trained on. The same random numbers each time."""
    groups = respond(policy, engine, task, task.test[:EVAL_PROBLEMS], EVAL_SAMPLES, stream(0, "eval"))
    return float(torch.tensor([scores for _, _, scores in groups]).mean())


def token_logp(model, ids_BT):
    """log π(token | those before it) of every token but the first, with its gradient."""
    logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    return logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]


def train(steps=50, seed=0):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy.load("builtin", device=device)  # a Hugging Face model and its tokenizer
    engine = NativeEngine(policy.model, policy.tokenizer)  # samples from these very weights, so nothing is copied
    task = load_task("arithmetic", seed)
    method = rpg.algorithm(METHOD).resolve()  # its loss, its advantages, and what it asks of the loop
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    next_problem, keep_rate, history, start = 0, 1.0, [], time.time()

    for step in range(1, steps + 1):
        if step % EVAL_EVERY == 1:
            print(f"held-out accuracy {accuracy(policy, engine, task):.1%}")

        # Prompts -> responses -> scores. A group whose scores are all equal has no advantages and teaches nothing:
        # drop it, and sample others until there are enough (dynamic sampling). Every random number is a function of
        # the seed, its purpose and the step, so there is no generator whose state would have to be kept.
        groups, scores = [], []  # groups to learn from; the scores of all, a list for each group
        for attempt in range(MAX_ROUNDS):
            if len(groups) >= PROMPTS:
                break
            spare = min(OVERSAMPLE / max(keep_rate, 0.1), 4) if method.dynamic else 1
            wanted = math.ceil((PROMPTS - len(groups)) * spare)
            problems = task.train[next_problem : next_problem + wanted]
            next_problem += wanted
            for group in respond(policy, engine, task, problems, SAMPLES, stream(seed, "rollout", step, attempt)):
                scores.append(group[-1])
                if max(scores[-1]) > min(scores[-1]) or not method.dynamic:
                    groups.append(group)
        keep_rate = 0.7 * keep_rate + 0.3 * len(groups) / len(scores)  # so that the next step asks for enough prompts
        groups = groups[:PROMPTS]
        if not groups:
            print(f"step {step:3d}  every group was all right or all wrong: nothing to learn")
            continue

        # Rewards -> advantages. The reward is the score less a penalty for nearly running out of tokens; the advantage
        # is the reward less its group's mean, so the other responses to a prompt are the baseline.
        responses = [(prompt, rollout) for prompt, group, _ in groups for rollout in group]
        group_B = torch.arange(len(groups)).repeat_interleave(SAMPLES)
        score_B = torch.tensor([score for _, _, group_scores in groups for score in group_scores])
        length_B = torch.tensor([len(rollout.tokens) for _, rollout in responses])
        reward_B = score_B + method.overlong * soft_overlong_penalty(length_B, MAX_NEW_TOKENS, OVERLONG_TOKENS)
        advantage_B = method.advantage(reward_B, group_B)

        # Minibatches of whole groups, in a random order; fewer of them where groups are missing.
        order = torch.from_numpy(permutation(len(groups), seed, "minibatches", step, 0))
        minibatches = order.tensor_split(max(1, round(MINIBATCHES * len(groups) / PROMPTS)))
        losses, norms = [], []
        for i, chosen in enumerate(minibatches):
            rows = torch.isin(group_B, chosen).nonzero()[:, 0]
            ids, old, mask = [], [], []  # one row a response: its prompt, then its tokens, padded on the right
            for prompt, rollout in (responses[row] for row in rows):
                ids.append(torch.tensor(prompt + rollout.tokens))
                old.append(torch.tensor([0.0] * len(prompt) + rollout.logp))
                mask.append(torch.tensor([False] * len(prompt) + [True] * len(rollout.tokens)))
            ids_BT, old_logp_BT, mask_BT = (pad_sequence(x, batch_first=True).to(device) for x in (ids, old, mask))

            # The loss. w = π/π_old corrects for responses sampled by the policy of before this step's updates, and the
            # KL pulls towards that policy: ω = w·(A − β·log(π/π_old)), clipped, taken as a constant; loss = −ω·log π,
            # averaged over the minibatch's tokens. The old log-probabilities are the engine's, noted as it sampled.
            logp_BT = token_logp(policy.model, ids_BT)
            out = method.loss(logp_BT, old_logp_BT[:, 1:], advantage_B[rows].to(device), mask_BT[:, 1:])
            out.loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item())
            losses.append(out.loss.item())
            optimizer.param_groups[0]["lr"] = learning_rate((step - 1) * MINIBATCHES + i, steps * MINIBATCHES)
            optimizer.step()
            optimizer.zero_grad()

        right, loss, norm = (float(torch.tensor(x).mean()) for x in (scores, losses, norms))
        history.append({"step": step, "right": right, "loss": loss, "grad_norm": norm})
        line = f"step {step:3d}  right {right:.3f}  kept {len(groups)} of {len(scores)} groups  loss {loss:+.4f}"
        print(f"{line}  gradient {norm:.3f}  {time.time() - start:.0f} s")
    print(f"held-out accuracy {accuracy(policy, engine, task):.1%}")
    return policy, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="RPG on one page")
    parser.add_argument("--steps", type=int, default=50, help="batches of responses to learn from")
    parser.add_argument("--seed", type=int, default=0, help="decides the problems and every sampled token")
    options = parser.parse_args()
    train(options.steps, options.seed)
