"""What ``auto`` means: a learning rate and a response length that suit what is trained; and what would ruin it.

Known without a network and without torch: from names, and from the files of a model that lies on this machine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..console import amount
from ..models import BUILTIN
from .config import Config
from .settings import AUTO

Kind = Literal["toy", "adapter", "full"]
TOY = 20_000_000  # parameters up to which a model is trained as the built-in one is
# 1e-6 is TRL's default, what verl's examples have and what the RPG paper took. Measured at 0.5B (docs/training.md): an
# adapter learns as well with thirty times as much, and all weights unlearn at 1e-5. AdamW divides by the size of the
# gradient: a method's own scale hardly matters.
RATES: dict[Kind, float] = {"toy": 5e-4, "adapter": 3e-5, "full": 1e-6}
HIGH: dict[Kind, float] = {"adapter": 1e-3, "full": 5e-6}  # above it: seldom meant
RUINOUS: dict[Kind, float] = {"adapter": 1e-2, "full": 1e-4}  # from here on: a model that answers nothing any more
TRAINED: dict[Kind, str] = {"adapter": "an adapter", "full": "all weights of a pretrained model"}
TOY_LENGTH, LENGTH, THINKING = 80, 1024, 4096
TOO_SHORT = 8  # a response limit below one part in so many of what responses take
# hybrids and models made to think; those of these families that do not have the names below
THINKERS = ("qwen3", "qwq", "deepseek-r1", "thinking", "reasoner", "-r1-", "magistral", "gpt-oss", "smollm3")
NO_THINKERS = ("-base", "instruct-2507", "qwen3-coder", "embedding")


def settled(config: Config) -> Config:
    """The settings with numbers for every ``auto``: what a run compares, records and resumes with."""
    for path, (value, _) in choices(config).items():
        section, name = path.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def choices(config: Config) -> dict[str, tuple[Any, str]]:
    """What each ``auto`` is, and why."""
    model, values = Model(config), {}
    if config.optim.lr == AUTO:
        values["optim.lr"] = RATES[model.kind], model.called
    if config.rollout.max_new_tokens == AUTO:
        values["rollout.max_new_tokens"] = model.length
    return values


def announcement(config: Config) -> str:
    """lr 1e-06 (auto: all weights of a pretrained model), responses of up to 1,024 tokens (auto: gsm8k)"""
    forms = {"optim.lr": "lr {:g}", "rollout.max_new_tokens": "responses of up to {:,} tokens"}
    by_reason: dict[str, list[str]] = {}
    for path, (value, why) in choices(config).items():
        by_reason.setdefault(why, []).append(forms[path].format(value))
    return ", ".join(f"{', '.join(texts)} (auto: {why})" for why, texts in by_reason.items())


@dataclass(frozen=True)
class Objection:
    text: str
    fatal: bool  # the model is lost, not only the time


def objections(config: Config) -> Iterator[Objection]:
    """What a run with these settings, which are settled, would spoil."""
    model, lr, new = Model(config), config.optim.lr, config.rollout.max_new_tokens
    if model.kind == "toy" or (config.model.startswith((".", "/", "~")) and not model.path.exists()):
        return  # of what is not there it is said when it is loaded
    trained, usual = TRAINED[model.kind], RATES[model.kind]
    if lr >= RUINOUS[model.kind]:
        insisting = "" if config.insist else ", or give --insist"
        yield Objection(
            f"optim.lr {lr:g} on {trained} ruins it: {usual:g} is usual; leave --optim.lr away{insisting}",
            fatal=not config.insist,
        )
    elif lr > HIGH[model.kind]:
        yield Objection(f"optim.lr {lr:g} on {trained} is high: {usual:g} is usual", fatal=False)
    length, why = model.usual_length
    if new < length // TOO_SHORT and (model.thinks or model.datasets):
        way_out = ", or --task.chat_options.enable_thinking false" if model.thinks else ""
        yield Objection(
            f"rollout.max_new_tokens {new} cuts nearly every response before its answer ({why}): leave it away, which "
            f"is {length:,}{way_out}",
            fatal=False,
        )


def refuse_ruin(config: Config) -> None:
    for objection in objections(config):
        if objection.fatal:
            raise ValueError(objection.text)


class Model:
    """The model of a run, as far as it is known before it is loaded."""

    def __init__(self, config: Config):
        self.config, self.name, self.path = config, config.model, Path(config.model).expanduser()

    @property
    def kind(self) -> Kind:
        if self.parameters is not None and self.parameters <= TOY:
            return "toy"
        adapter = self.config.peft.method is not None or self._adapter is not None
        return "adapter" if adapter else "full"

    @property
    def called(self) -> str:
        if self.name == "builtin":
            return "the built-in model"
        return f"a model of {amount(self.parameters)} parameters" if self.kind == "toy" else TRAINED[self.kind]

    @property
    def length(self) -> tuple[int, str]:
        """Tokens of a response, and why: what is usual, as far as it fits into the model beside the prompt."""
        if self.kind == "toy":
            return TOY_LENGTH, self.called
        length, why = self.usual_length
        context = self.shape.get("max_position_embeddings")
        if not isinstance(context, int):
            return length, why
        room = max(context // 2, context - self.config.rollout.max_prompt_tokens)
        return (length, why) if length <= room else (room, f"the model's context is {context:,}")

    @property
    def usual_length(self) -> tuple[int, str]:
        if self.thinks:
            return THINKING, f"{Path(self.name).name} thinks before it answers"
        if self.datasets:
            return max((response, name) for name, response in self.datasets.items())
        return LENGTH, "a pretrained model"

    @cached_property
    def datasets(self) -> dict[str, int]:
        """Those among the problems that have a name, and the tokens that their solutions take."""
        from ..tasks.sources.datasets import DATASETS, dataset_name
        from ..tasks.sources.mixture import parse

        task, parts = self.config.task, []
        with contextlib.suppress(ValueError):  # which is told when the task is loaded
            parts = [part for _, part in parse(task.name)]
        parts += [] if task.test is None else task.test.split(",")
        names = [name for part in parts if (name := dataset_name(part)) is not None]
        return {name: DATASETS[name].response for name in names}

    @property
    def thinks(self) -> bool:
        task = self.config.task
        if task.chat is False or task.chat_options.get("enable_thinking") is False:
            return False
        name = self.name.lower()
        if any(part in name for part in NO_THINKERS):
            return False
        template = self._template
        return any(part in name for part in THINKERS) if template is None else "<think>" in template

    @cached_property
    def folder(self) -> Path | None:
        """Where its files are, if on this machine; of an adapter those of its base."""
        base = self.name if self._adapter is None else str(self._adapter.get("base_model_name_or_path") or "")
        if base == "builtin" or (not Path(base).exists() and Path(base).parts[-3:] == BUILTIN.parts[-3:]):
            return BUILTIN
        folder = Path(base).expanduser()
        inner = folder / str(self.config.model_options.get("subfolder") or "")
        return next((path for path in (inner, folder) if (path / "config.json").is_file()), None)

    @cached_property
    def _adapter(self) -> dict[str, Any] | None:
        if (self.path / "config.json").is_file():
            return None
        return _read_json(self.path / "adapter_config.json")

    @cached_property
    def shape(self) -> dict[str, Any]:
        from ..models.known_shapes import KNOWN

        if self.folder is None:
            return KNOWN[self.name][1] if self.name in KNOWN else {}
        config = _read_json(self.folder / "config.json") or {}
        return {**config, **(config["text_config"] if isinstance(config.get("text_config"), dict) else {})}

    @cached_property
    def parameters(self) -> int | None:
        """About: embeddings, attention and the three matrices of each layer. Of a .gguf file no more than its bytes."""
        if self.name.endswith(".gguf") and self.path.is_file():
            return self.path.stat().st_size
        width, layers, words = (
            self.shape.get(name, self.shape.get(other))
            for name, other in (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("vocab_size", ""))
        )
        if not (isinstance(width, int) and isinstance(layers, int) and isinstance(words, int)):
            return None
        inner = self.shape.get("intermediate_size")
        inner = inner if isinstance(inner, int) else 4 * width
        tables = 1 if self.shape.get("tie_word_embeddings", True) else 2
        return tables * words * width + layers * (4 * width**2 + 3 * width * inner)

    @property
    def _template(self) -> str | None:
        """The chat template of a model on this machine; "" where it has none, None where its files are elsewhere."""
        if self.folder is None:
            return None
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
        return str((_read_json(self.folder / "tokenizer_config.json") or {}).get("chat_template") or "")


def _read_json(file: Path) -> dict[str, Any] | None:
    """None where there is no such file, or no object in it: loading the model says so."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
