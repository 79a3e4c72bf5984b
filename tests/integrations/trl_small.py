"""An RPGTrainer with a tiny model, and what to look at after its training."""

import peft
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

import tiny
from integrations.trl_fixed import config
from rpg.integrations.trl import RPGTrainer


def low_words(completion_ids, **_):
    """The share of words below 20: half of them are."""
    return [sum(1 < i < 20 for i in ids) / len(ids) for ids in completion_ids]


def prompts(count=32):
    return Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(2, count + 2)]})


def trainer(
    folder, model=None, *, algorithm=None, reward=low_words, dataset=None, tokenizer=None, more=None, **settings
):
    """``more``: other arguments of RPGTrainer."""
    usual = {
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": 6,
        "overlong_tokens": 2,
        "learning_rate": 1e-2,
        "max_steps": 6,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
    }
    made = RPGTrainer(
        tiny.make("llama") if model is None else model,
        reward,
        config(str(folder), **(usual | settings)),
        train_dataset=prompts() if dataset is None else dataset,
        processing_class=tokenizer or tiny.tokenizer(),
        algorithm=algorithm,
        **(more or {}),
    )
    made.remove_callback(PrinterCallback)
    return made


def history(made, name):
    return [row[name] for row in made.state.log_history if name in row]


def weights(model):
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def lora(rank=4, **options):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", **options)
    return peft.get_peft_model(tiny.make("llama"), config)


class Stop(TrainerCallback):
    """Ends the training after an optimiser step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step
