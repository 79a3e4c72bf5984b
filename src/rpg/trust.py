"""Code that a run's folder names, a reward file or a model's own, runs only for those who trust the folder.

A folder that this user trained in, on this machine, is trusted: what its settings name is the user's own. That is kept
outside of the folder, where nobody else writes, as a hash of the folder's inode, the run's id and what it names; in it,
from where relative paths lead. Of all others, from a colleague or the web, nothing runs without ``--trust``, or the
same setting given once more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .rewards.scoring import CORRECT
from .run.config import Config
from .run.folder import MARKER, SETTINGS, is_run
from .run.settings import build
from .tasks.loading import made_by_functions
from .tasks.reward import FORMAT

# Options that choose among files, not what is done with them
DATA_OPTIONS = {"revision", "subfolder", "variant", "cache_dir", "local_files_only", "force_download"}
LOGINS = {"token", "hf_token", "use_auth_token"}
OWN_ATTENTION = ("eager", "sdpa", "flash_attention_2")  # other names are fetched from the hub, as code
NUMBERS = (bool, int, float)  # of vLLM's options: how much, not what
FILE = re.compile(r"(?<![^\s*+,@])[^\s*+,@:]+\.(?:py|jsonl|json|parquet|txt|md|jinja)\b")  # in a setting of the task
HELP = "run code that the settings of somebody else's run name (docs/security.md)"


def code_in(config: Config) -> dict[str, str]:
    """The settings that make code run, with what they name."""
    return dict(_code_in(config))


def _code_in(config: Config) -> Iterator[tuple[str, str]]:
    task = config.task
    for setting, name in (("task.name", task.name), ("task.test", task.test)):
        if name is not None and made_by_functions(name):
            yield setting, name
    if task.reward is not None:
        yield "task.reward", task.reward
    for name in task.rewards:
        if name not in (CORRECT, FORMAT):
            yield f"task.rewards.{name}", name
    if (task.template or "").startswith("@"):  # no code, but any file of this machine, put into prompts
        yield "task.template", str(task.template)
    for key, value in config.model_options.items():
        known = key in DATA_OPTIONS | LOGINS or (key == "attn_implementation" and value in OWN_ATTENTION)
        if not known and value is not False:
            yield f"model_options.{key}", str(value)
    for key, value in config.rollout.vllm.items():
        amount = isinstance(value, NUMBERS) and (value is False or key != "trust_remote_code")
        if not amount and key not in LOGINS:
            yield f"rollout.vllm.{key}", str(value)


def check_trust(config: Config, folder: Path, given: Collection[str], parts: Collection[str] = ()) -> None:
    """Refuse code that the folder's settings name, and that neither this user trained with there nor ``given``, the
    settings of this call, name again. ``parts``: the sections that count, all where there are none."""
    code = code_in(config)
    strange = [path for path in code if path not in given and (not parts or path.startswith(tuple(parts)))]
    if not strange or _record(folder).is_file():
        return
    named = ", ".join(f"{path} {code[path]}" for path in strange)
    raise ValueError(
        f"{folder} is no run of yours on this machine, and would run code: {named}; "
        "look at it, then give --trust if you trust whoever made it"
    )


def remember(folder: Path, config: Config) -> None:
    """This user trains in this folder, from here. Where that cannot be kept, a resume needs --trust."""
    if code_in(config) or any(FILE.search(text) for text in _named_in(config)):
        record = _record(folder)
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            record.touch(mode=0o600)
            record.write_text(os.getcwd(), encoding="utf-8", errors="surrogateescape")


def started_in(folder: Path) -> Path | None:
    """Where this user was when training here, if that is elsewhere."""
    with contextlib.suppress(OSError):
        home = _record(folder).read_text(encoding="utf-8", errors="surrogateescape")
        return Path(home) if home and home != os.getcwd() else None
    return None


def found(config: Config, folder: Path, given: Collection[str] = ()) -> Config:
    """The settings with the user's files that are not here where they were when the run was started; not those that
    are ``given`` now."""
    if not any(FILE.search(text) for text in _named_in(config)) or (home := started_in(folder)) is None:
        return config

    def placed(text: str) -> str:
        return FILE.sub(lambda match: _placed(match[0], home), text)

    task = config.task
    texts = {name: getattr(task, name) for name in ("name", "test", "reward", "template")}
    moved: dict[str, Any] = {name: placed(text) for name, text in texts.items() if text and f"task.{name}" not in given}
    if moved.get("template") and not moved["template"].startswith("@"):
        del moved["template"]
    rewards = {name if f"task.rewards.{name}" in given else placed(name): x for name, x in task.rewards.items()}
    return replace(config, task=replace(task, **moved, rewards=rewards))


def _placed(file: str, home: Path) -> str:
    return str(home / file) if not os.path.exists(file) and (home / file).is_file() else file


def _named_in(config: Config) -> list[str]:
    task = config.task
    return [text for text in (task.name, task.test, task.reward, task.template, *task.rewards) if text]


def _record(folder: Path) -> Path:
    run, code = "", code_in(build(Config, file=folder / SETTINGS))
    with contextlib.suppress(OSError, ValueError):
        run = (folder / MARKER).read_text(encoding="utf-8").strip()
    with contextlib.suppress(OSError):
        run += f" {folder.stat().st_ino}"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    digest = hashlib.sha256(json.dumps([run, sorted(code.items())]).encode("utf-8", "surrogatepass")).hexdigest()
    return Path(home) / "rpg" / "trusted" / digest


def of_a_run(file: Path) -> bool:
    """Whether these settings are a run's, not a recipe that its user has written or chosen."""
    return file.name == SETTINGS and is_run(file.parent)


def paths_of(settings: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Of settings as Python has them, nested or with dots."""
    paths = set()
    for key, value in settings.items():
        paths.add(f"{prefix}{key}")
        if isinstance(value, Mapping):
            paths |= paths_of(value, f"{prefix}{key}.")
    return paths
