"""Make the built-in base model: a Llama of a million parameters, trained on noisy worked solutions.

    python scripts/make_base_model.py --device cuda            # five minutes on an H200; without a GPU, hours

The solutions are those of a careless pupil: often he guesses at once, often he skips lines, sometimes he slips. The
model learns to write as he does, so it begins at 20-40 %; what is right is in it, to be brought out.
Only problems of the training split are used. Writes src/rpg/models/builtin (safetensors and tokenizer).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rpg.tasks.sources.builtin import TRAIN, apply, arithmetic, chains, countdown, reduce_once, split_of, terms_of
from rpg.tasks.task import Problem

WORDS = ["<pad>", "<eos>", "\n", " ", *"0123456789+-*=", "make", "from", "answer"]
HASTY, SKIP, SLIP, GUESS = 0.5, 0.25, 0.13, 0.35  # pupils who guess, lines left out, slips in a line, slips in a guess
LUCKY, PATIENT = 0.25, 0.55  # countdown: attempts that are solutions; wrong attempts after which another follows
LONGEST = 96


def slip(value: int, rng: random.Random) -> int:
    return max(0, value + rng.choice([-10, -2, -1, 1, 2, 10]))


def work_arithmetic(problem: Problem, rng: random.Random) -> str:
    """One line for each operation, ``=`` and what is left of the expression; the last line repeats the result."""
    terms, lines = terms_of(problem.prompt), []
    hasty = rng.random() < HASTY
    while len(terms) > 1:
        at = terms.index("*") if "*" in terms else 1
        terms = reduce_once(terms)
        if rng.random() < (GUESS if hasty else SLIP):
            terms[at - 1] = str(slip(int(terms[at - 1]), rng))
        if not hasty and (len(terms) == 1 or rng.random() > SKIP):
            lines.append(f"={''.join(terms)}\n")
    return "".join(lines) + f"answer {terms[0]}"


def work_countdown(problem: Problem, rng: random.Random) -> str:
    """Attempts, each worked out from left to right, until one fits or patience runs out."""
    words = problem.prompt.split()
    target, numbers = int(words[1]), [int(word) for word in words[3:]]
    solutions = [terms for terms, value in chains(numbers) if value == target]
    text = ""
    while True:
        if rng.random() < LUCKY:
            chain = rng.choice(solutions)
        else:
            order = rng.sample(numbers, len(numbers))
            chain = [str(order[0])] + [term for number in order[1:] for term in (rng.choice("+-*"), str(number))]
        terms, line = chain, "".join(chain)
        while len(terms) > 1:
            value = apply(int(terms[0]), terms[1], int(terms[2]))
            if rng.random() < SLIP:
                value = slip(value, rng)
            terms = [str(value), *terms[3:]]
            line += f"={''.join(terms)}"
            if not 0 <= value <= 999:
                break
        text += f"{line}\n"
        if terms[0] == str(target) or rng.random() > PATIENT or len(text) > 60:
            return f"{text}answer {''.join(chain)}"


def examples(seed: int, count: int) -> list[list[int]]:
    """Token ids of prompts with their solutions."""
    rng, ids = random.Random(seed), {word: i for i, word in enumerate(WORDS)}
    made: list[list[int]] = []
    while len(made) < count:
        make, work = (arithmetic, work_arithmetic) if rng.random() < 0.6 else (countdown, work_countdown)
        problem = make(rng)
        if split_of(problem.prompt) == TRAIN:
            text = problem.prompt + work(problem, rng)
            tokens = [ids[piece] for piece in pieces(text)] + [ids["<eos>"]]
            if len(tokens) <= LONGEST:
                made.append(tokens)
    return made


def pieces(text: str) -> list[str]:
    """The same cut as the tokenizer's: words of letters whole, everything else a character at a time."""
    found, word = [], ""
    for character in text:
        if character.isalpha():
            word += character
            continue
        found += [word, character] if word else [character]
        word = ""
    return found + [word] * bool(word)


def batches(steps: int, size: int, seed: int, workers: int) -> Iterator[torch.Tensor]:
    """Batches padded with 0, made in other processes."""
    with get_context("spawn").Pool(workers) as pool:
        jobs = ((seed * 1_000_003 + step, size) for step in range(steps))
        for rows in pool.imap(_job, jobs, chunksize=2):
            batch = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
            for i, row in enumerate(rows):
                batch[i, : len(row)] = torch.tensor(row)
            yield batch


def _job(job: tuple[int, int]) -> list[list[int]]:
    return examples(*job)


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("src/rpg/models/builtin"))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = make_model().to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    start = time.time()
    for step, batch in enumerate(batches(args.steps, args.batch, args.seed, args.workers)):
        share = step / args.steps
        lr = args.lr * min(1, (step + 1) / 200) * (0.5 + 0.5 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = lr
        ids = batch.to(args.device)
        logits = model(input_ids=ids[:, :-1]).logits.float()
        targets = ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f} lr {lr:.1e} {time.time() - start:.0f} s", flush=True)
    model.to("cpu").save_pretrained(args.output)
    make_tokenizer().save_pretrained(args.output)
    print(json.dumps({p.name: p.stat().st_size for p in args.output.iterdir()}))


if __name__ == "__main__":
    main()
