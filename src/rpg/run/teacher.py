"""``reference.model``: the model that it means, and whether it can score the trained one's tokens. Errors name it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..models.loading import is_missing
from ..models.vocabulary import clash
from .checkpoint import model_of
from .config import Config


def with_teacher(config: Config, state: Mapping[str, Any] | None = None) -> Config:
    """The settings with the teacher's model in place of its run. ``state``: of the checkpoint that is gone on from,
    whose teacher stays the same, however far the teacher's run has got since."""
    named = config.reference.model
    if named is None:
        return config
    before = None if state is None else state["reference"].get("teacher")
    if before is not None and is_missing(before):
        raise ValueError(
            f"reference.model {named}: this run's teacher, {before}, is gone: bring it back, or start another --output"
        )
    return replace(config, reference=replace(config.reference, model=before or teacher_of(named)))


def teacher_of(name: str) -> str:
    """As model_of."""
    if is_missing(name):
        raise ValueError(
            f"reference.model {name}: there is no such run or folder: train the teacher first, or name another"
        )
    with naming(name):
        return model_of(name)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """What is wrong with the teacher begins with the setting."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(f"reference.model {text if text.startswith(name) else f'{name}: {text}'}") from error


def check_tokens(config: Config, wanted: Mapping[str, int], known: Mapping[str, int]) -> None:
    """``wanted``: the trained model's numbers of tokens; ``known``: the teacher's."""
    if (text := clash(wanted, known)) is not None:
        raise ValueError(
            f"reference.model {config.reference.model} has another vocabulary than {config.model}: {text}; "
            "take a teacher of the same family"
        )


def check_rows(config: Config, model: Any, teacher: Any) -> None:
    needed, rows = (m.get_input_embeddings().weight.shape[0] for m in (model, teacher))
    if rows < needed:
        raise ValueError(
            f"reference.model {config.reference.model} has {rows} embeddings and {config.model} has {needed}: it "
            "cannot score each token that can be sampled; take a teacher with as many"
        )
