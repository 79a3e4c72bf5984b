"""Problems from the Hugging Face hub, ``org/name[@subset][#split]``; one line for whatever goes wrong, at once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...console import describe
from ..task import Problem
from .files import ANSWERS, LEVELS, PROMPTS, arrow_rows, problems_of

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
        found = ID.fullmatch(text)
        return cls(*found.groups()) if found else None

    def __str__(self) -> str:
        return self.repo + (f"@{self.subset}" if self.subset else "") + (f"#{self.split}" if self.split else "")


@dataclass(frozen=True)
class Found:
    train: list[Problem]
    test: list[Problem]
    lacking: int  # rows without an answer, left out


def load_hub(
    where: HubId, *, prompt_key: str | None = None, answer_key: str | None = None, strict: bool = True
) -> Found:
    """The train and the test split, or the one that is named, as train unless it is a test split by its name."""
    splits = _download(where)
    lacking: list[str] = []

    def problems(split: str) -> list[Problem]:
        columns = _columns(splits[split], prompt_key, answer_key)
        tables = columns.with_format("arrow").iter(1000)
        rows = arrow_rows(f"{where.repo} ({split})", tables)
        found, without = problems_of(rows, prompt_key=prompt_key, answer_key=answer_key, strict=strict)
        lacking.extend(without)
        return found

    if where.split is not None:
        held_out = where.split.partition("[")[0] in TEST
        train, test = (None, where.split) if held_out else (where.split, None)
    else:
        train = "train" if "train" in splits else None
        test = next((name for name in TEST if name in splits), None)
    if train is None and test is None:
        if len(splits) > 1:
            raise ValueError(f"{where} has neither a train nor a test split: name one, {where}#{next(iter(splits))}")
        train = next(iter(splits))
    found = Found(problems(train) if train else [], problems(test) if test else [], len(lacking))
    if lacking and not found.train and not found.test:
        raise ValueError(lacking[0])
    return found


def _columns(dataset: Any, prompt_key: str | None, answer_key: str | None) -> Any:
    """Without those that are not looked at, images perhaps; all, where the needed ones are not there."""
    wanted = [
        {key.partition(".")[0] for key in (given, *known) if key} for given, known in _known(prompt_key, answer_key)
    ]
    have = set(dataset.column_names)
    if not all(names & have for names in wanted):
        return dataset
    return dataset.select_columns([name for name in dataset.column_names if name in wanted[0] | wanted[1] | {*LEVELS}])


def _known(prompt_key: str | None, answer_key: str | None) -> list[tuple[str | None, tuple[str, ...]]]:
    return [(prompt_key, PROMPTS), (answer_key, ANSWERS)]


def _download(where: HubId) -> dict[str, Any]:
    """split -> datasets.Dataset"""
    try:
        import datasets
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ValueError(f"{where} needs the hub: pip install datasets ({describe(error)})") from error
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
            found = datasets.load_dataset(where.repo, where.subset, split=where.split)
    except Exception as error:
        if offline:
            text = "download the file and set RPG_DATA to its folder, or give its path"
            raise ValueError(f"no network, and {where} is not in the cache: {text}") from error
        raise ValueError(_explain(where, error, page)) from error
    return {where.split: found} if where.split is not None else dict(found)


def _explain(where: HubId, error: Exception, page: str) -> str:
    text = " ".join(str(error).split())
    names = re.search(r"\[(.*?)\]", text)
    known = names.group(1).replace("'", "").replace('"', "") if names else ""
    first = known.split(", ")[0]
    if "gated" in text:
        return _refused(where, 403, text, page)
    if "Config name is missing" in text:
        return f"{where.repo} has several subsets: write {where.repo}@{first} (it has {known})"
    if "BuilderConfig" in text:
        return f"{where.repo} has no subset {where.subset!r}: write {where.repo}@{first} (it has {known})"
    if "Unknown split" in text:
        whole = HubId(where.repo, where.subset, first)
        return f"{where.repo} has no split {where.split!r}: write {whole} (it has {known})"
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
