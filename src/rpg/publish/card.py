"""A model's card: the README.md beside its weights, which says what it is, with the metadata that the hub reads.

It is a function of the run's settings and of what its checkpoint holds: no clock, no machine, no path, no secret.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..console import amount, steps_text
from ..loss.describe import advantage_text, clip_text
from ..loss.registry import Algorithm
from ..models import BUILTIN
from ..models.loading import HUB_ID, PATIENCE, SHARED
from ..run.config import Config
from ..run.settings import flags_of
from ..secrets import hidden, without_secrets
from ..tasks import ENDLESS
from ..tasks.sources.datasets import DATASETS, dataset_name
from ..tasks.sources.hub import HubId
from ..tasks.sources.mixture import parse

CARD = "README.md"
HERE = "path/to/this/folder"  # in the examples, until the model has a name on the hub
MARK = "rpg-rl"  # a tag: this card is ours
UNTOLD = ("output", "insist", "device", "log.", "checkpoint.")  # settings that leave the weights as they are
TEXTS = ("--task.system", "--task.template")  # in which a / is no folder's
PATH = re.compile(r"(?<![^\s=+*,@'\"(])(?:~|\.{0,2})/(?:[^\s/,+*'\"]+/)*(?=[^\s/,+*'\"])")
ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
FETCHED = "It is an adapter: `pip install peft`, and transformers fetches the model it is for."
NOT_FETCHED = "It is an adapter for a model that is not on the hub: `rpg` finds it where it was trained."
ROUNDED = (
    "It was trained beside weights held in 4 bits (NF4), and `rpg` loads it so. transformers puts it on the weights as "
    "they are, which differ from those by their rounding. `rpg merge` writes the whole model as it was trained."
)
WARP = "arXiv 2406.16768"


@dataclass(frozen=True)
class Base:
    """The model that a run began from, as the world may know it."""

    name: str
    id: str | None = None  # on the hub
    license: Mapping[str, str] = field(
        default_factory=dict
    )  # license, license_name, license_link, as its card has them


def base_of(model: str, options: Mapping[str, Any], card: Path | None = None) -> Base:
    """What is known of a model by its name: from its id on the hub and from the metadata of its card.

    ``card``: of the run's own last checkpoint, where it is resumed. What that says of the base is taken from there, so
    that the hub need not be asked again.
    """
    path = Path(model).expanduser()
    if model == "builtin" or path.resolve() == BUILTIN.resolve() or path.parts[-3:] == BUILTIN.parts[-3:]:
        return Base("the model that comes with rpg", license={"license": "mit"})
    about = _metadata(card) if card is not None and card.is_file() else None
    if path.exists():
        adapter = path / "adapter_config.json"
        if adapter.is_file() and not (path / "config.json").is_file():
            under = str(json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or "")
            return base_of(under, {}, card)
        about = _metadata(path / CARD) if about is None else about
        named = about.get("base_model")
        return Base(path.resolve().name, named if isinstance(named, str) else None, _license(about))
    repository = "/".join(model.split("/")[:2])
    if not HUB_ID.fullmatch(repository):
        return Base(public(model))
    return Base(repository, repository, _license(_on_the_hub(repository, options) if about is None else about))


def _on_the_hub(repository: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a card on the hub or in its cache; none where it cannot be had: a run needs no card."""
    import huggingface_hub

    kept = {key: value for key, value in options.items() if key in SHARED[:4]}
    with contextlib.suppress(Exception):
        return _metadata(Path(huggingface_hub.hf_hub_download(repository, CARD, etag_timeout=PATIENCE, **kept)))
    return {}


def _metadata(card: Path) -> dict[str, Any]:
    import huggingface_hub

    with contextlib.suppress(Exception):  # somebody else's file, whatever is in it
        return dict(huggingface_hub.metadata_load(card) or {})
    return {}


def _license(about: Mapping[str, Any]) -> dict[str, str]:
    keys = ("license", "license_name", "license_link")
    return {key: str(about[key]) for key in keys if isinstance(about.get(key), str)}


def is_ours(folder: Path) -> bool:
    """Whether the card in this folder is one that was written here."""
    tags = _metadata(folder / CARD).get("tags")
    return isinstance(tags, list) and MARK in tags


def public(text: str) -> str:
    """Without the folders of this machine, ~/data/x.jsonl -> x.jsonl, and without secrets."""
    return hidden(PATH.sub("", text))


# ---- the card of a run -----------------------------------------------------------------------------------------------


def run_card(
    config: Config,
    chosen: Algorithm,
    base: Base,
    data: Mapping[str, Sequence[Any]],
    step: int,
    tokens: int,
    evals: Sequence[Mapping[str, Any]],
    adapter: str | None = None,
    four_bits: bool = False,
) -> str:
    """Of a run's checkpoint. ``chosen``: the preset with the run's options; ``data``: [problems, hash] by set;
    ``evals``: those of Progress; ``adapter``: its method, where only that is trained; ``four_bits``: beside weights
    that were held so."""
    held = " in 4 bits (NF4)" * four_bits
    what = f"{base.name}{held} with a {adapter} adapter" if adapter else base.name
    title = f"{base.name.rpartition('/')[2]}, {chosen.name}"
    metadata = {
        **base.license,
        "base_model": base.id,
        "base_model_relation": None if base.id is None else "adapter" if adapter else "finetune",
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [MARK, "reinforcement-learning", chosen.name, *([adapter] if adapter else [])],
        "datasets": sorted(set(_on_hub(config.task.name))) or None,
        "model-index": _index(title, config, data, evals),
    }
    parts = [
        f"# {title}\n\n{_sentence(what, chosen, step, tokens, config)}",
        _results(config, data, evals),
        _use(base, adapter is not None, four_bits),
        _training(config, chosen, data),
        _versions([*(["peft"] if adapter else [])]),
        _about_license(base),
    ]
    return _page(metadata, parts)


def _sentence(what: str, chosen: Algorithm, step: int, tokens: int, config: Config) -> str:
    return (
        f"{what[:1].upper()}{what[1:]}, after {steps_text(step)} of `{chosen.name}` on "
        f"{public(config.task.name)} ({amount(tokens)} sampled tokens). Written by `rpg train` (`pip install rpg-rl`)."
    )


def _results(config: Config, data: Mapping[str, Sequence[Any]], evals: Sequence[Mapping[str, Any]]) -> str:
    if not evals:
        return ""
    first, last, k = evals[0], evals[-1], config.eval.k
    title = f"mean@{k} at step {last['step']}"
    rows = [("held-out set", "problems", *(["at the start"] if last["step"] else []), title)]
    for name, score in last["sets"].items():
        before = [_figure(first["sets"].get(name))] if last["step"] else []
        rows.append((public(name), f"{_problems(name, config, data):,}", *before, f"**{_figure(score)}**"))
    how = f"temperature {config.eval.temperature:g}" + (
        f", top-p {config.eval.top_p:g}" if config.eval.top_p < 1 else ""
    )
    chosen = " A run keeps its best checkpoint by these figures, which flatters that one." * config.checkpoint.best
    return (
        f"## Held-out result\n\n{_table(rows)}\n\nThe mean reward of {k} responses to a problem ({how}), with 95 % "
        f"intervals over the problems.{chosen} Again: `{_eval_command(config)}`."
    )


def _figure(score: Mapping[str, float] | None) -> str:
    return "" if score is None else f"{score['mean']:.1%} [{score['low']:.1%}, {score['high']:.1%}]"


def _problems(name: str, config: Config, data: Mapping[str, Sequence[Any]]) -> int:
    return min(config.eval.problems, int(data[name][0]) if name in data else config.eval.problems)


def _eval_command(config: Config) -> str:
    task = public(config.task.test or config.task.name)
    flags = {"k": config.eval.k, "problems": config.eval.problems, "temperature": f"{config.eval.temperature:g}"}
    return f"rpg eval {HERE} --task {shlex.quote(task)} " + " ".join(
        f"--{name} {value}" for name, value in flags.items()
    )


def _training(config: Config, chosen: Algorithm, data: Mapping[str, Sequence[Any]]) -> str:
    loss, count = chosen.loss, int(data[""][0])
    problems = "a stream of problems without end" if count >= ENDLESS else f"{count:,} problems"
    divergence = "none" if loss.divergence == "none" else f"{loss.divergence}, β = {loss.beta:g}"
    rows = [
        ("", ""),
        ("data", f"{public(config.task.name)}: {problems}"),
        ("divergence", divergence),
        ("estimator", loss.estimator),
        ("clip", clip_text(loss.clip)),
        ("level", loss.level),
        ("advantage", advantage_text(chosen.advantage)),
        ("reduction", loss.reduction),
        ("the KL's anchor", chosen.reference),
    ]
    return (
        f"## Training\n\n`{chosen.name}` ({_paper(chosen.paper)}): {chosen.formula}\n\n{_table(rows)}\n\n"
        f"```sh\n{train_command(config)}\n```"
    )


def train_command(config: Config) -> str:
    """What makes this run again, once its files lie where one is."""
    kept = ((flag, text) for flag, text in flags_of(config) if not flag[2:].startswith(UNTOLD))
    told = (
        (_public_flag(flag), text if flag in TEXTS and not text.startswith("@") else public(text))
        for flag, text in kept
    )
    return " \\\n  ".join(["rpg train", *(f"{shlex.quote(flag)} {shlex.quote(text)}" for flag, text in told)])


def _public_flag(flag: str) -> str:
    """--task.rewards./home/me/reward.py:score names a file too."""
    rewards = "--task.rewards."
    return rewards + public(flag.removeprefix(rewards)) if flag.startswith(rewards) else flag


def _index(
    title: str, config: Config, data: Mapping[str, Sequence[Any]], evals: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]] | None:
    """The last evaluation, as the hub shows it."""
    if not evals:
        return None
    results = []
    for name, score in evals[-1]["sets"].items():
        shown = public(name)
        row = DATASETS.get(dataset_name(name) or "")
        where = HubId.parse(row.test.hub if row is not None and row.test is not None else name)
        dataset = {"type": where.repo if where is not None else re.sub(r"[^\w.-]+", "-", shown), "name": shown}
        args = {"low": score["low"], "high": score["high"], "problems": _problems(name, config, data)}
        metric = {"type": "accuracy", "name": f"mean@{config.eval.k}", "value": score["mean"], "args": args}
        results.append({"task": {"type": "text-generation"}, "dataset": dataset, "metrics": [metric]})
    return [{"name": title, "results": results}]


def _on_hub(task: str) -> Iterator[str]:
    """Of the data, what is on the hub."""
    with contextlib.suppress(ValueError):
        for _, part in parse(task):
            row = DATASETS.get(dataset_name(part) or "")
            split = None if row is None else row.train or row.test
            where = HubId.parse(part if split is None else split.hub)
            if where is not None and not Path(part).exists() and ":" not in part:
                yield where.repo


# ---- the card of a merged model --------------------------------------------------------------------------------------


def merged_card(record: Mapping[str, Any], base: Base) -> str:
    """Of what `rpg merge` writes; ``record`` is its merge.json."""
    title = f"{base.name.rpartition('/')[2]}, {len(record['models'])} merged"
    metadata = {
        **base.license,
        "base_model": base.id,
        "base_model_relation": None if base.id is None else "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [MARK, "reinforcement-learning", "merge"],
    }
    rows: list[tuple[str, ...]] = [("model", "weight", "‖δ‖")]
    for name, weight, norm in zip(record["models"], record["weights"], record["norms"], strict=True):
        rows.append((public(name), f"{weight:g}", f"{norm:.4g}"))
    on = "on the sphere" if record["method"] == "slerp" else "on a line"
    text = (
        f"# {title}\n\nWhat these models have learnt since {base.name}, joined {on} per {record['per']}, "
        f"{record['towards']:g} of the way ({_paper(WARP)}). Written by `rpg merge` (`pip install rpg-rl`).\n\n"
        f"{_table(rows)}\n\nδ is a model minus the one that it began from."
    )
    return _page(metadata, [text, _use(base, False), _versions([]), _about_license(base)])


# ---- parts -----------------------------------------------------------------------------------------------------------


def _use(base: Base, adapter: bool, four_bits: bool = False) -> str:
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'model = AutoModelForCausalLM.from_pretrained("{HERE}", dtype="auto")',
        f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")',
    ]
    needs = f"{FETCHED if base.id else NOT_FETCHED}\n\n" * adapter + f"{ROUNDED}\n\n" * four_bits
    return f"## Use\n\n{needs}```python\n" + "\n".join(lines) + f"\n```\n\n`rpg sample {HERE}` asks it something."


def _versions(more: Iterable[str]) -> str:
    import torch
    import transformers

    names = {"rpg": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    names |= {name: version(name) for name in more} | {"Python": platform.python_version()}
    return "## Versions\n\n" + ", ".join(f"{name} {number}" for name, number in names.items())


def _about_license(base: Base) -> str:
    told = base.license.get("license_name") or base.license.get("license")
    whose = f"[{base.id}](https://huggingface.co/{base.id})" if base.id else base.name
    text = f"{told}, as {whose}." if told else f"As that of {whose}, whose card does not tell it here."
    return f"## Licence\n\n{text}"


def _paper(paper: str) -> str:
    return ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    cells = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells)


def _page(metadata: Mapping[str, Any], parts: Iterable[str]) -> str:
    from ..yaml_text import dump_yaml

    told = {key: value for key, value in without_secrets(metadata).items() if value is not None}
    return hidden(f"---\n{dump_yaml(told)}---\n\n" + "\n\n".join(part for part in parts if part) + "\n")


def named_card(text: str, repository: str, base: str | None = None) -> str:
    """The card once the model has a name on the hub; ``base``: of an adapter, that of the model it is for."""
    if base is not None and HUB_ID.fullmatch(base) and "/" in base and NOT_FETCHED in text:
        metadata = f"base_model: {base}\nbase_model_relation: adapter\n"
        text = text.replace("---\n", f"---\n{metadata}", 1).replace(NOT_FETCHED, FETCHED)
    return text.replace(HERE, repository)
