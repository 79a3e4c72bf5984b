"""What is a second use of the same samples worth? The gradient of samples that were trained on, beside that of others.

    python benchmarks/reuse.py [--steps 24] [--lr 5e-4]

The built-in model and task. In each step the policy is trained on one batch. Then four gradients are compared at the
new weights, all with their exact weights w = π/behaviour:

again        of the batch that was just trained on
stale        of another batch that the same old weights sampled, which nobody was trained on
fresh        of a batch from the new weights
the truth    of a large batch from the new weights, in two halves

Shown is how far each reaches along the truth: its mean product with it, over the mean product of the truth's halves. 1
is an unbiased gradient. What is between ``stale`` and ``again`` is not age: it is that the policy has seen the samples.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import rpg
from rpg.models.policy import Policy
from rpg.rollout import NativeEngine
from rpg.run.seeds import stream
from rpg.tasks import load_task

GROUPS, TRUTH, SAMPLES, TOKENS = 48, 144, 8, 80
Batch = tuple[list[tuple[list[int], Any]], Tensor]


class Side:
    def __init__(self, method: str, lr: float):
        self.policy, self.task = Policy.load("builtin"), load_task("arithmetic", 0)
        self.engine, self.method = (
            NativeEngine(self.policy.model, self.policy.tokenizer),
            rpg.algorithm(method).resolve(),
        )
        self.parameters, self.problem = list(self.policy.model.parameters()), 0
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def sample(self, groups: int) -> Batch:
        """Responses to the next problems, and their advantages."""
        problems = self.task.train[self.problem : self.problem + groups]
        self.problem += groups
        prompts = [self.policy.encode(problem.prompt) for problem in problems]
        found = self.engine.generate(prompts, SAMPLES, TOKENS, seed=stream(0, "reuse", self.problem))
        responses, scores = [], []
        for problem, prompt, group in zip(problems, prompts, found, strict=True):
            responses += [(prompt, rollout) for rollout in group]
            texts = [self.policy.decode(rollout.tokens) for rollout in group]
            scores += [self.task.reward(text, problem.answer, problem.prompt) for text in texts]
        group_B = torch.arange(groups).repeat_interleave(SAMPLES)
        return responses, self.method.advantage(torch.tensor(scores), group_B)

    def gradient(self, batch: Batch) -> Tensor:
        """Over all tokens of the batch, by the number of its responses: batches are alike, whatever their lengths."""
        responses, advantage_B = batch
        self.optimizer.zero_grad()
        for begin in range(0, len(responses), 64):
            some = responses[begin : begin + 64]
            ids_BT = pad_sequence([torch.tensor(prompt + r.tokens) for prompt, r in some], batch_first=True)
            old_BT = pad_sequence([torch.tensor([0.0] * len(p) + r.logp) for p, r in some], batch_first=True)
            mask = [torch.tensor([False] * len(p) + [True] * len(r.tokens)) for p, r in some]
            mask_BT = pad_sequence(mask, batch_first=True)
            logits_BTV = self.policy.model(input_ids=ids_BT[:, :-1], use_cache=False).logits
            logp_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
            advantage = advantage_B[begin : begin + 64]
            out = self.method.loss(logp_BT, old_BT[:, 1:], advantage, mask_BT[:, 1:], denominator=len(responses))
            out.loss.backward()
        return torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--method", default="rpg-reinforce-urkl")
    args = parser.parse_args()
    side, names = Side(args.method, args.lr), ("again", "stale", "fresh")
    along: dict[str, list[float]] = {name: [] for name in (*names, "truth")}
    size: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.steps):
        trained, other = side.sample(GROUPS), side.sample(GROUPS)
        side.gradient(trained)
        side.optimizer.step()
        halves = [side.gradient(side.sample(TRUTH // 2)) for _ in range(2)]
        along["truth"].append(float(halves[0] @ halves[1]))
        for name, batch in zip(names, (trained, other, side.sample(GROUPS)), strict=True):
            gradient = side.gradient(batch)
            along[name].append(float(gradient @ (halves[0] + halves[1])) / 2)
            size[name].append(float(gradient.norm()))
    truth = torch.tensor(along["truth"])
    print(f"{args.method}, rate {args.lr:g}, {args.steps} steps, {GROUPS} × {SAMPLES} responses\n")
    print("| | along the truth | ± | norm, of fresh |\n|---|---:|---:|---:|")
    for name in names:
        each = torch.tensor(along[name])
        ratio = each.mean() / truth.mean()
        error = (each - ratio * truth).std() / len(each) ** 0.5 / truth.mean()
        norm = sum(size[name]) / sum(size["fresh"])
        print(f"| {name} | {ratio:.2f} | {error:.2f} | {norm:.2f} |")


if __name__ == "__main__":
    main()
