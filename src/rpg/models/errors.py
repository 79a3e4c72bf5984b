"""What goes wrong when a model is loaded, in one line that says what to do."""

from __future__ import annotations

import errno

from ..console import first_line, flat_text


class Explained(ValueError):
    """One line that says what to do."""


def explain(name: str, error: BaseException) -> str:
    """One line for what transformers, tokenizers, safetensors or the hub raised."""
    from safetensors import SafetensorError

    text = flat_text(error)
    chain = [error, error.__cause__, error.__context__]
    if (
        any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in chain)
        or "No space left" in text
    ):
        return f"the disk is full while loading {name}: free some, or set HF_HOME to a folder on another disk"
    if "trust_remote_code" in text:
        return f"{name} comes with code of its own: if you trust it, give --model_options.trust_remote_code true"
    if any(isinstance(e, SafetensorError) for e in chain):
        return f"cannot load the model {name!r}: a .safetensors file is damaged ({first_line(error)}): fetch it again"
    if "tokenizer" in text.lower() and ("instantiate" in text or "Can't load" in text):
        return f"cannot load the model {name!r}: its tokenizer cannot be read ({first_line(error)})"
    return f"cannot load the model {name!r}: {first_line(error)}"


def refusal(name: str, error: Exception | None, revision: str | None) -> str:
    """What the hub's answer, or that there is none, means for the user."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms at https://huggingface.co/{name} and run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r}: check model_options.revision"
    if status == 401 and "credentials" in str(error):
        return f"the hub does not know your token: run `hf auth login`, or unset HF_TOKEN (for {name})"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{name}: no such model on the hub (and no such folder): check the name; if private, run `hf auth login`"
    if status is not None:
        return f"the hub answers {status} for {name}, and it is not in the cache: try again later, or give a folder"
    if error is None:
        return f"{name} is not in the cache, and the hub is not asked (HF_HUB_OFFLINE): give a local folder"
    return f"{name}: no network, and it is not in the cache: give a local folder"
