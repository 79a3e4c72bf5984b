"""Time of an optimiser step of RPGTrainer beside GRPOTrainer, on the same responses.

    python benchmarks/trl_step.py [--steps 12] [--accumulation 4]

Both are TRL's trainers with the same model, the same rollout function (fixed responses, so that generation costs
nothing) and the same batch; they take turns, and medians are compared. The first steps are not counted. On a CPU it is
the time of this process on one thread, which what else runs there changes little.
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PrinterCallback, TrainerCallback

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from trl import GRPOConfig, GRPOTrainer

from rpg.integrations.trl import RPGConfig, RPGTrainer

VOCABULARY, LENGTH, SAMPLES, ROWS = 512, 64, 8, 16


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def rollout(prompts, trainer):
    draw = random.Random(0)
    responses = [[draw.randrange(2, VOCABULARY) for _ in range(draw.randint(8, LENGTH))] for _ in prompts]
    return {
        "prompt_ids": [[int(word[1:]) for word in prompt.split()] for prompt in prompts],
        "completion_ids": responses,
        "logprobs": [[-6.0] * len(r) for r in responses],
    }


def reward(completion_ids, **_):
    return [sum(i < 256 for i in ids) / len(ids) for ids in completion_ids]


def clock():
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Times(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begin = clock()

    def on_step_end(self, args, state, control, **kwargs):
        self.found.append(clock() - self.begin)


def measure(kind, steps, accumulation):
    """Seconds of each optimiser step."""
    common = {
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": steps,
        "num_generations": SAMPLES,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "max_completion_length": LENGTH,
    }
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        if kind == "GRPOTrainer":
            trainer, args = GRPOTrainer, GRPOConfig(folder, **common)
        else:
            trainer, args = RPGTrainer, RPGConfig(folder, algorithm="rpg-urkl", **common)
        made = trainer(
            model(),
            reward,
            args,
            train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(2, 130)]}),
            processing_class=tokenizer(),
            callbacks=[times],
            rollout_func=rollout,
        )
        made.remove_callback(PrinterCallback)
        made.train()
    return times.found[2:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    gc.freeze()
    torch.set_num_threads(1)
    found = {"GRPOTrainer": [], "RPGTrainer": []}
    for _ in range(given.rounds):
        for kind, times in found.items():
            times += measure(kind, given.steps, given.accumulation)
    medians = {kind: statistics.median(times) for kind, times in found.items()}
    for kind, seconds in medians.items():
        print(f"{kind:12} {1000 * seconds:8.1f} ms a step")
    print(f"RPGTrainer / GRPOTrainer {medians['RPGTrainer'] / medians['GRPOTrainer']:.3f}")
