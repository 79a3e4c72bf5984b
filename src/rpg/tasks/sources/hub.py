"""Problems from the Hugging Face hub, ``org/name[@subset][#split]``; one line for whatever goes wrong, at once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...console import describe, flat_text, install
from ..task import Problem
from .files import ANSWERS, LEVELS, PROMPTS, USUAL, Columns, arrow_rows, problems_of

ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^@#]+))?(?:#([^@#]+))?")
PATIENCE = 10.0  # seconds for the hub to answer the first question
TEST = ("test", "validation", "valid", "val", "dev")


@dataclass(frozen=True)
class HubId:
    repo: str
    subset: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        match = ID.fullmatch(text)
        return cls(*match.groups()) if match else None

    def __str__(self) -> str:
        return self.repo + (f"@{self.subset}" if self.subset else "") + (f"#{self.split}" if self.split else "")


def load_hub(where: HubId, columns: Columns = USUAL) -> tuple[list[Problem], list[Problem], int]:
    """(train, test, rows left out for want of an answer)

    The train and the test split, or the one that is named, as train unless it is a test split by its name.
    """
    splits = _download(where)
    lacking: list[str] = []

    def problems(split: str) -> list[Problem]:
        tables = _only_needed(splits[split], columns).with_format("arrow").iter(1000)
        with_answer, without = problems_of(arrow_rows(f"{where.repo} ({split})", tables), columns)
        lacking.extend(without)
        return with_answer

    if where.split is not None:
        held_out = where.split.partition("[")[0] in TEST
        train_name, test_name = (None, where.split) if held_out else (where.split, None)
    else:
        train_name = "train" if "train" in splits else None
        test_name = next((name for name in TEST if name in splits), None)
    if train_name is None and test_name is None:
        if len(splits) > 1:
            raise ValueError(f"{where} has neither a train nor a test split: name one, {where}#{next(iter(splits))}")
        train_name = next(iter(splits))
    train = problems(train_name) if train_name else []
    test = problems(test_name) if test_name else []
    if lacking and not train and not test:
        raise ValueError(lacking[0])
    return train, test, len(lacking)


def _only_needed(dataset: Any, columns: Columns) -> Any:
    """Without columns that are not looked at, images perhaps; all, where the needed ones are not there."""
    candidates = ((columns.prompt, *PROMPTS), (columns.answer, *ANSWERS))
    prompts, answers = ({key.partition(".")[0] for key in keys if key} for keys in candidates)
    names = dataset.column_names
    if prompts.isdisjoint(names) or answers.isdisjoint(names):
        return dataset
    return dataset.select_columns([name for name in names if name in prompts | answers | {*LEVELS}])


def _download(where: HubId) -> dict[str, Any]:
    """split -> datasets.Dataset"""
    try:
        import datasets
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ValueError(f"{where} needs the hub: {install('datasets')} ({describe(error)})") from error
    page = f"https://huggingface.co/datasets/{where.repo}"
    offline = False
    try:
        huggingface_hub.HfApi().dataset_info(where.repo, timeout=PATIENCE)  # one request: datasets would try for 23 s
    except HfHubHTTPError as error:
        raise ValueError(_refused(where, error.response.status_code, str(error), page)) from error
    except Exception:  # no network, whatever the library in use calls it; the dataset may be in the cache
        offline = True
    try:
        with _offline() if offline else contextlib.nullcontext():
            loaded = datasets.load_dataset(where.repo, where.subset, split=where.split)
    except Exception as error:
        if offline:
            text = "download the file and set RPG_DATA to its folder, or give its path"
            raise ValueError(f"no network, and {where} is not in the cache: {text}") from error
        raise ValueError(_explain(where, error, page)) from error
    return {where.split: loaded} if where.split is not None else dict(loaded)


def _explain(where: HubId, error: Exception, page: str) -> str:
    text = flat_text(error)
    names = re.search(r"\[(.*?)\]", text)
    choices = names.group(1).replace("'", "").replace('"', "") if names else ""
    first = choices.split(", ")[0]
    if "gated" in text:
        return _refused(where, 403, text, page)
    if "Config name is missing" in text:
        return f"{where.repo} has several subsets: write {where.repo}@{first} (it has {choices})"
    if "BuilderConfig" in text:
        return f"{where.repo} has no subset {where.subset!r}: write {where.repo}@{first} (it has {choices})"
    if "Unknown split" in text:
        whole = HubId(where.repo, where.subset, first)
        return f"{where.repo} has no split {where.split!r}: write {whole} (it has {choices})"
    return f"cannot load {where} from the hub: {describe(error)}"


def _refused(where: HubId, status: int, text: str, page: str) -> str:
    if status == 403 or "gated" in text.lower():
        return f"{where.repo} is gated: accept its terms at {page} and run `hf auth login`"
    if status in (401, 404):
        return f"there is no file {where.repo}, and no such dataset on the hub unless it is private (`hf auth login`)"
    return f"the hub answered {status} for {where.repo}: try again later"


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """datasets and huggingface_hub look into their caches only."""
    import datasets.config
    import huggingface_hub.constants

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
