"""What a step of training asks of the host while it samples: the plain loop, and sampling that runs ahead.

    python benchmarks/streaming_host.py [--ahead 0 1 2] [--steps 8]

The work is that of a 0.5B model on GSM8K: 64 × 8 responses a step, half of the groups with signal, 1,024 slots, lengths
with a mean of 150 and at most 320. It runs on a CPU by the GPU's way of steps. Decoding steps and passes over prompts
are made up, cost nothing and are counted. All else is real: the books, the pages, texts, rewards, prompts in a chat
template. Keys and values are kept. ``idle`` are milliseconds of the host in which a GPU would have nothing to do, and
``behind`` those in which it would have decoding steps to do. A pass counts for neither.
"""

from __future__ import annotations

import argparse
import random
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rpg.kernels.step import DEAD, LENGTH, SLOT, TOKEN
from rpg.models.policy import Policy
from rpg.rewards.scoring import Part, Scorer
from rpg.rollout import NativeEngine
from rpg.rollout.graph_batch import GraphBatch
from rpg.run.config import Config, RolloutConfig
from rpg.tasks import Problem, verify_reward
from rpg.training.progress import SamplingPosition
from rpg.training.samples.collect import Collector, Sampler
from rpg.training.samples.stream import StreamCollector
from rpg.training.setup import method_of

SLOTS, TOKENS, VOCABULARY, END, HAZARD = 1024, 320, 2000, 1, 1 / 180
SAID = "she sold clips to friends in April then half as many more so the total cost of apples each day is"
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def words(count: int) -> str:
    return " ".join(random.choices(SAID.split(), k=count))


def solution() -> str:
    """Longer than any response, with numbers that a verifier stops at."""
    lines = [f"{i}. {words(12)} {random.randint(2, 300)} × {random.randint(2, 40)}.\n" for i in range(30)]
    return "".join(lines)


def tokenizer_of(texts: list[str]) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


class Counted:
    """Steps and passes that cost nothing, and where the host's time goes between them."""

    def __init__(self, engine: NativeEngine, tokens_KT: Any):
        self.decoder, self.tokens_KT = engine.decoder, tokens_KT
        self.decoder.step, self.decoder.read = self.step, self.read
        self.running: float | None = None
        self.clear()
        start, look = GraphBatch._start_steps, GraphBatch._look

        def started(batch: Any) -> None:
            start(batch)
            self.running = perf_counter()

        def looked(batch: Any) -> None:
            if self.running is not None:
                self.behind, self.running = self.behind + perf_counter() - self.running, None
            self.looks += 1
            look(batch)

        GraphBatch._start_steps, GraphBatch._look = started, looked

    def clear(self) -> None:
        self.steps = self.rows = self.passes = self.looks = 0
        self.behind = self.made_up = 0.0

    def read(self, prompts: list[list[int]], rows: list[int]) -> torch.Tensor:
        self.passes += 1
        logits = torch.zeros(len(prompts), VOCABULARY)
        logits[:, END + 4] = 50
        return logits

    def step(self, rows: int, *_: Any) -> None:
        """A row goes through a text, and ends by the number that would decide its token."""
        begin, b = perf_counter(), self.decoder.buffers
        state = b.state_5S.numpy()[:, :rows]
        live = (state[LENGTH] > DEAD).nonzero()[0]
        slot, new = state[SLOT, live], state[LENGTH, live] + 1
        numbers = b.uniform_SR.numpy()
        ends = numbers[slot, new] < HAZARD
        token = self.tokens_KT[(numbers[slot, 1] * len(self.tokens_KT)).astype(int), new]
        token, over = np.where(ends, END, token), ends | (new + 1 >= TOKENS)
        b.tokens_SR.numpy()[slot, new], b.logp_SR.numpy()[slot, new] = token, -0.5
        b.count_S.numpy()[slot[over]], b.ended_S.numpy()[slot[over]] = new[over] + 1, ends[over]
        state[LENGTH, live], state[TOKEN, live] = np.where(over, DEAD, new), token
        self.steps, self.rows = self.steps + 1, self.rows + len(live)
        self.made_up += perf_counter() - begin


def collector_of(ahead: float) -> tuple[Collector, Counted]:
    random.seed(0)
    torch.manual_seed(0)
    texts = [solution() for _ in range(128)]
    problems = [Problem(f"{words(45)} {i}?", str(i % 4)) for i in range(7473)]
    tokenizer = tokenizer_of(texts + [problem.prompt for problem in problems[:200]])
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, pad_token_id=0, bos_token_id=None, eos_token_id=END,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    engine = NativeEngine(model, tokenizer, SLOTS, graphs=True, end_ids=[END])
    engine.expect(160)
    counted = Counted(engine, np.array([tokenizer(text)["input_ids"][:TOKENS] for text in texts]))
    rollout = RolloutConfig(
        prompts=64,
        samples=8,
        max_new_tokens=TOKENS,
        slots=SLOTS,
        oversample=1.1,
        overlong=False,
        ahead=ahead,
        cache="kept" if ahead else "recomputed",
    )
    settings = Config(algorithm="rpg-reinforce-urkl", rollout=rollout)
    scorer = Scorer([Part("", verify_reward, trusted=True)])
    verified = scorer.score

    def score(items: Any) -> Any:
        """As it is verified, and as half of the groups would be solved."""
        found = verified(items)
        for i, (text, answer, _) in enumerate(items):
            found.solved[i] = answer == "0" or (answer in "12" and len(text) % 2 == 0)
            found.values[i] = float(found.solved[i])
        return found

    scorer.score = score
    sampler = Sampler(Policy(model, tokenizer), engine, scorer, settings)
    kind = StreamCollector if ahead else Collector
    position = SamplingPosition(keep_rate=0.5)
    return kind(settings, method_of(settings), sampler, SimpleNamespace(train=problems), position), counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ahead", type=float, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    plain = GraphBatch._start_steps, GraphBatch._look
    print("a step of training   slots busy  decoding steps  passes  looks  groups  idle ms  behind ms")
    for ahead in args.ahead:
        GraphBatch._start_steps, GraphBatch._look = plain
        collector, counted = collector_of(ahead)
        for step in range(1, 4):  # until the slots are full, and caches are warm
            collector.collect(step)
        counted.clear()
        begin, groups = perf_counter(), 0
        for step in range(4, 4 + args.steps):
            groups += len(collector.collect(step).sampled)
        idle = perf_counter() - begin - counted.behind - counted.made_up
        busy = counted.rows / max(1, counted.steps) / SLOTS
        each = [x / args.steps for x in (counted.steps, counted.passes, counted.looks, groups)]
        print(
            f"rollout.ahead {ahead:<6g} {busy:>10.0%} {each[0]:>15.0f} {each[1]:>7.1f} {each[2]:>6.0f} {each[3]:>7.0f} "
            f"{1000 * idle / args.steps:>8.0f} {1000 * counted.behind / args.steps:>10.0f}",
            flush=True,
        )
        if isinstance(collector, StreamCollector):
            collector.close()


if __name__ == "__main__":
    main()
