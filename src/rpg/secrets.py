"""Which settings hold a secret: it is used, and written nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

WORDS = {"token", "secret", "password", "passwd", "passphrase", "auth", "authorization", "credential", "credentials"}
KEYS = {"api", "access", "private", "secret"}  # before "key"
MARKS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "end", "start", "stop", "think"}  # before "token"
LOOKS = re.compile(r"(?:^|(?<=[\s=:'\"]))(?:hf_\w{16,}|sk-[\w-]{24,}|gh[a-z]_\w{20,}|github_pat_\w{20,})")
SHORTEST = 8  # characters: a shorter one cannot be told from other text
HIDDEN = "(secret)"
_known: set[str] = set()  # in this process


def is_secret(path: str, value: Any) -> bool:
    """By the setting's name, or by what the value looks like. ``token: true`` means the login of this machine."""
    if isinstance(value, str):
        return bool(value) and (named(path) or LOOKS.search(value) is not None)
    return isinstance(value, int | float) and not isinstance(value, bool) and named(path)


def named(path: str) -> bool:
    """model_options.token, rollout.vllm.hf_token, api_key; not max_new_tokens, eos_token or token_id."""
    if ":" in path:  # a function's
        return False
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path.rpartition(".")[2]).lower())
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word == "token" and (before in MARKS or after == "id"):
            continue
        if word in WORDS or word == "apikey" or (word == "key" and before in KEYS):
            return True
    return False


def secrets_in(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, secret), at any depth."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from secrets_in(value, f"{path}.")
        elif is_secret(path, value):
            yield path, str(value)


def without_secrets(value: Any) -> Any:
    """The same without the settings that hold one, at any depth."""
    if not isinstance(value, Mapping):
        return value
    return {key: without_secrets(inner) for key, inner in value.items() if not is_secret(key, inner)}


def instead(path: str) -> str:
    """What to do with this one."""
    hub = path.rpartition(".")[2] in ("token", "hf_token", "use_auth_token")
    return "set HF_TOKEN in the environment, or run `hf auth login`" if hub else f"give it as a flag, --{path}"


def keep_hidden(values: Mapping[str, Any]) -> list[str]:
    """From here on ``hidden`` knows these secrets; gives their paths."""
    found = dict(secrets_in(values))
    _known.update(found.values())
    return list(found)


def hidden(text: str) -> str:
    """Text that goes to a file or a terminal, without the secrets that are known."""
    for secret in sorted(_known, key=len, reverse=True):
        if len(secret) >= SHORTEST and not secret.isdigit():
            text = text.replace(secret, HIDDEN)
    return text
