"""The problems of a task as rows of verl's parquet files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..run.config import Config
from ..tasks import ENDLESS, Problem, Task
from ..training.samples.collect import prompt_parts
from .reward import tag_text

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"  # a chat template that adds nothing
TAGS = "<think></think><answer></answer>\\boxed{}"
LOOKED_AT = 256
SPARE = 2  # with dynamic sampling: problems of an endless task that are written for each one wanted


def train_problems(task: Task, config: Config, begin: int, steps: int, dynamic: bool) -> tuple[Sequence[Problem], bool]:
    """(problems, whether the order is the task's): all of them, or of endless ones as many as the steps take."""
    if not len(task.train):
        raise ValueError(f"task {config.task.name!r} has no problems to train on")
    if len(task.train) < ENDLESS:
        return task.train, False
    count = steps * config.rollout.prompts * (SPARE if dynamic else 1)
    return task.train[begin : begin + count], True


def messages(problem: Problem, config: Config) -> list[dict[str, str]]:
    """The prompt in its template, with its system prompt."""
    text, _, system = prompt_parts(problem, config)
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def rows(problems: Sequence[Problem], source: str, split: str, config: Config) -> list[dict[str, Any]]:
    """verl's columns. ``extra_info`` has what the reward function needs besides: the bare problem, the answer's tag."""
    return [
        {
            "data_source": source,
            "prompt": messages(problem, config),
            "ability": "rpg",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {
                "split": split,
                "index": i,
                "problem": problem.prompt,
                "level": problem.level,
                "source": problem.source,
                "tag": tag_text(problem.answer),
            },
        }
        for i, problem in enumerate(problems)
    ]


def write(path: Path, table: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(table), path)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def load_tokenizer(model: str, config: Config) -> tuple[Any, int | None]:
    """The model's tokenizer, and the tokens it was made for, where it says so. The weights are not read."""
    from transformers import AutoConfig, AutoTokenizer

    from ..models.errors import explain
    from ..models.loading import SHARED, ask_hub, is_missing

    if is_missing(model):
        raise ValueError(f"model {model}: there is no such folder: give one that save_pretrained wrote, or a hub id")
    options = {name: value for name, value in config.model_options.items() if name in SHARED}
    if not Path(model).exists():  # asked once, and then the cache: transformers would go on asking for a minute
        options |= ask_hub(model, ["config.json"], options)[1]
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **options)
        about = AutoConfig.from_pretrained(model, **options).get_text_config()
    except Exception as error:  # of transformers, tokenizers and the hub: each has its own kinds
        raise ValueError(explain(model, error)) from error
    context = getattr(about, "max_position_embeddings", None)
    return tokenizer, context if isinstance(context, int) else None


def uses_chat(tokenizer: Any, config: Config) -> bool:
    has = bool(getattr(tokenizer, "chat_template", None))
    if config.task.chat and not has:
        raise ValueError("the model has no chat template: give --task.chat false, or a model made for chat")
    return has if config.task.chat is None else config.task.chat


def check_prompts(tokenizer: Any, chat: bool, sets: Sequence[Sequence[Problem]], config: Config) -> None:
    """verl puts every prompt through a chat template and reads answers without special tokens: where that would change
    anything, the recipe is refused. Looks at the first of each set; lengths are checked of held-out problems."""
    if chat:
        template, options = tokenizer.chat_template, config.task.chat_options
    else:
        template, options = PLAIN, {}
    limit = config.rollout.max_prompt_tokens
    for number, problems in enumerate(sets):
        for problem in problems[:LOOKED_AT]:
            said = messages(problem, config)
            ids = tokenizer.apply_chat_template(
                said, chat_template=template, add_generation_prompt=True, return_dict=False, **options
            )
            if not chat and len(said) > 1:
                raise ValueError("a system prompt needs the model's chat template: leave task.system empty")
            if not chat and list(ids) != list(tokenizer(said[0]["content"])["input_ids"]):
                raise ValueError(
                    "the model's tokenizer adds tokens to a prompt that verl, which takes chat templates only, would "
                    "not: use a model with a chat template"
                )
            if number and len(ids) > limit:
                raise ValueError(
                    f"a prompt has {len(ids)} tokens, more than rollout.max_prompt_tokens={limit}: "
                    f"{problem.prompt[:60]!r}"
                )
    ids = tokenizer(TAGS, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids, skip_special_tokens=True) != tokenizer.decode(ids) and config.task.rewards.get("format"):
        raise ValueError("task.rewards.format: its tags are special tokens of this model, which verl drops first")


def file_name(name: str, number: int) -> str:
    """test-aime24.parquet"""
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    return f"test-{plain or number}.parquet"
