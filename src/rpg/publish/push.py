"""A trained model onto the Hugging Face hub: what would go where, then one commit. Errors are one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..console import first_line, flat_text
from ..models import BUILTIN
from ..models.loading import HUB_ID
from .card import CARD, named_card

RECORD = "merge.json"  # names folders of this machine; the card says the rest
ADAPTER = "adapter_config.json"
OF_GIT = {".gitattributes"}  # the hub's own, in a repository without a commit
MAIN = "main"


@dataclass(frozen=True)
class Shipment:
    """What goes where. ``exists``: the repository has files already."""

    folder: Path
    repository: str
    revision: str
    user: str
    private: bool
    exists: bool
    files: dict[str, Path]
    base: str | None = None  # of an adapter: the model it is for, as others know it

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


def prepare(
    folder: Path,
    repository: str,
    *,
    public: bool = False,
    revision: str | None = None,
    update: bool = False,
    base: str | None = None,
) -> Shipment:
    """Ask the hub who this is and what is there; nothing is changed. ValueError says why it cannot be."""
    if not HUB_ID.fullmatch(repository) or "/" not in repository:
        raise ValueError(f"{repository!r} is no name on the hub: give org/name")
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."}
    files.pop(RECORD, None)
    base = _base(folder, base)
    with explained(repository, ""):
        user = str(_api().whoami()["name"])
    there = _there(repository, user)
    shipment = Shipment(folder, repository, revision or MAIN, user, not public, bool(there), files, base)
    if there is None:
        return shipment
    held = {file.rfilename for file in there.siblings or ()} - OF_GIT
    if held and not update:
        raise ValueError(f"{repository} exists already, with {len(held)} files: give another name, or --update")
    if there.private is False and not public:
        raise ValueError(f"{repository} exists already and is public: give --public to push into it")
    return replace(shipment, private=bool(there.private))


def push(shipment: Shipment, message: str) -> str:
    """One commit; the address of what was pushed. A new repository is made first."""
    from huggingface_hub import CommitOperationAdd

    api, repository, revision = _api(), shipment.repository, shipment.revision
    added = [CommitOperationAdd(name, _content(shipment, path)) for name, path in shipment.files.items()]
    with explained(repository, shipment.user):
        if not shipment.exists:
            api.create_repo(repository, private=shipment.private, exist_ok=True)
        if revision != MAIN:
            api.create_branch(repository, branch=revision, exist_ok=True)
        done = api.create_commit(repository, added, commit_message=message, revision=revision)
    return str(done.repo_url) + ("" if revision == MAIN else f"/tree/{revision}")


def _api() -> Any:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    return huggingface_hub.HfApi()


def _there(repository: str, user: str) -> Any:
    """What the hub tells of a repository; None where there is none, or none that this user may see."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with explained(repository, user):
        try:
            return _api().model_info(repository)
        except RepositoryNotFoundError:
            return None


def _base(folder: Path, given: str | None) -> str | None:
    """The model that an adapter is for, as its file on the hub will name it: no folder of this machine."""
    if not (folder / ADAPTER).is_file():
        if given is not None:
            raise ValueError("--base is for adapters, and this is a whole model: leave it out")
        return None
    stated = str(json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path") or "")
    if given is not None:
        return given
    if Path(stated).parts[-3:] == BUILTIN.parts[-3:]:
        return "builtin"
    if Path(stated).exists() or not HUB_ID.fullmatch(stated):
        raise ValueError(
            f"the adapter is for {stated}, a folder of this machine: give the model's id on the hub with --base, or "
            "merge the adapter into it (rpg merge) and push that"
        )
    return stated


def _content(shipment: Shipment, path: Path) -> str | bytes:
    """A file, or what is pushed in its place."""
    if path.name == CARD:
        return named_card(path.read_text(encoding="utf-8"), shipment.repository, shipment.base).encode()
    if path.name == ADAPTER:
        settings = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": shipment.base}
        return json.dumps(settings, indent=2, sort_keys=True).encode()
    return str(path)


@contextmanager
def explained(repository: str, user: str) -> Iterator[None]:
    """Within, what the hub answers, or that it does not, is a ValueError of one line."""
    from huggingface_hub import errors

    no_answer: Any = errors.HfHubHTTPError.__bases__[
        0
    ]  # of httpx, or of what followed it, as the client's version has it
    try:
        yield
    except errors.LocalTokenNotFoundError as error:
        raise ValueError("no token: run `hf auth login`, or set HF_TOKEN in the environment") from error
    except errors.OfflineModeIsEnabled as error:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it") from error
    except errors.HfHubHTTPError as error:
        raise ValueError(_refused(repository, user, error)) from error
    except (no_answer, OSError) as error:
        raise ValueError(f"the hub does not answer ({first_line(error)}): check the network, and try again") from error
    except ValueError as error:  # of the client: a card that the hub would not take, a name that none can have
        raise ValueError(f"{repository}: {flat_text(error)}") from error
    except RuntimeError as error:  # of an upload in a thread of its own: the cause is behind it
        raise ValueError(f"an upload to {repository} failed: {first_line(error.__cause__ or error)}") from error


def _refused(repository: str, user: str, error: Any) -> str:
    status = getattr(error.response, "status_code", None)
    if status == 401:
        return "the hub does not know this token: run `hf auth login`, or set another HF_TOKEN"
    if status == 403:
        return f"{user} may not write to {repository}: give a name of your own, or a token that may write"
    if status == 404:
        return f"{repository} is not there, or {user} may not see it"
    return f"the hub answers {status} for {repository}: {first_line(error)}"
