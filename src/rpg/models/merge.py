"""Several trained models as one: their task vectors joined on the sphere or on a line, layer by layer.

WARP (arXiv 2406.16768): with δ_m = θ_m − init, the merged model is init + η·slerp(δ_1, …, δ_M). A model is read one
tensor at a time: no whole model is ever in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..console import describe, first_line, one_of
from . import BUILTIN, adapters
from .errors import Explained
from .four_bits import make_dense
from .loading import HUB_ID, SHARED, TOKENIZERS, load
from .meta import config_of
from .vocabulary import clash, tokenizer_files, vocabulary

METHODS, PARTS = ("slerp", "linear"), ("layer", "tensor", "model")
LAYER = re.compile(r"(.*\.(?:layers|h|blocks)\.\d+)\.")  # a decoder layer; other tensors are layers of their own
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD = 5 * 10**9  # bytes in one file
CHUNK = 2**22  # elements in float64 at a time
STRAIGHT = 1e-6  # sine of an angle below which an arc is a line, to 1e-12
RECORD = "merge.json"


# ---- coefficients ----------------------------------------------------------------------------------------------------


def arc(gram_22: Tensor, share: float) -> tuple[float, float]:
    """Spherical interpolation of x and y, ``share`` of the way to y, as multiples of each; gram: x·x, x·y, y·y.

    sin((1−λ)Ω)/sin Ω and sin(λΩ)/sin Ω, Ω the angle between them. Where there is no arc, or any, it is a line: vectors
    of one direction, of opposite ones, and zeros.
    """
    norms = math.sqrt(float(gram_22[0, 0] * gram_22[1, 1]))
    cosine = float(gram_22[0, 1]) / norms if norms else 1.0
    sine = math.sqrt(max(0.0, 1 - cosine * cosine))
    if sine < STRAIGHT:
        return 1 - share, share
    angle = math.atan2(sine, cosine)
    return math.sin((1 - share) * angle) / math.sin(angle), math.sin(share * angle) / math.sin(angle)


def spherical(gram_MM: Tensor, weights: Sequence[float]) -> Tensor:
    """slerp of M vectors as multiples of each, [M]: the next is joined to what there is, by its share of the weights.

    With equal weights the shares are 1/2, 1/3, …, as in WARP. From three on the result depends on their order.
    """
    c_M, so_far = torch.zeros(len(weights), dtype=torch.float64), 0.0
    for m, weight in enumerate(weights):
        if not weight:
            continue
        so_far += weight
        both_2M = torch.stack([c_M, torch.eye(len(weights), dtype=torch.float64)[m]])
        old, new = arc(both_2M @ gram_MM @ both_2M.T, weight / so_far) if so_far > weight else (0.0, 1.0)
        c_M = old * c_M + new * both_2M[1]
    return c_M


def linear(gram_MM: Tensor, weights: Sequence[float]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


# ---- models on disk --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model's folder, its tensors read when they are asked for."""

    name: str  # as the user knows it
    folder: Path
    dtype: torch.dtype | None = None  # of the model it stands for, where its files have another
    trusted: bool = False  # code that comes with its tokenizer may run
    base_bits: int | None = None  # in which an adapter's model was held when it was trained

    @cached_property
    def files(self) -> dict[str, Path]:
        """Where each tensor is."""
        if (index := self.folder / INDEX).is_file():
            with _intact(index):
                placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {name: self.folder / file for name, file in placed.items()}
        with _opened(self.folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), self.folder / SINGLE)

    def tensor(self, name: str) -> Tensor:
        """In float32 where the optimiser's own copy is known, of which the file has the rounded one."""
        with _opened(self.files[name]) as file:
            value: Tensor = file.get_tensor(name)
        if (key := f"{name}/master") not in self.masters:
            return value
        with _opened(self.optimizer) as file:
            master: Tensor = file.get_tensor(key)
        same = master.shape == value.shape and torch.equal(master.to(value.dtype), value)
        return master if same else value  # of schedule-free, files have averages and masters are none

    @property
    def optimizer(self) -> Path:
        """Of a checkpoint, beside its model."""
        return self.folder.parent / "trainer" / "optimizer.safetensors"

    @cached_property
    def masters(self) -> frozenset[str]:
        if self.folder.name != "model" or not self.optimizer.is_file():
            return frozenset()
        with _opened(self.optimizer) as file:
            keys = file.keys()
        return frozenset(key for key in keys if key.endswith("/master"))

    def about(self, name: str) -> tuple[list[int], torch.dtype]:
        """Shape and type; an empty slice has the latter."""
        with _opened(self.files[name]) as file:
            part = file.get_slice(name)
            shape = list(part.get_shape())
            return shape, (part[:0] if shape else file.get_tensor(name)).dtype

    @property
    def tied(self) -> bool:
        with _intact(self.folder / "config.json") as file:
            settings = json.loads(file.read_text(encoding="utf-8"))
        return bool(settings.get("tie_word_embeddings", settings.get("text_config", {}).get("tie_word_embeddings")))


@contextlib.contextmanager
def _intact(file: Path) -> Iterator[Path]:
    """Within, a file that is missing or damaged is one line that names it."""
    try:
        yield file
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing, the model is not whole: fetch it again, or merge without it") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged ({describe(error)}): fetch it again, or merge without it") from error


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with _intact(file), safe_open(file, "pt") as tensors:
        yield tensors


def open_source(
    name: str, scratch: Path, options: Mapping[str, Any] | None = None, base_bits: int | None = None
) -> Source:
    """A model by any name that --model takes. What has no safetensors of a whole model (an adapter, a .gguf) is loaded
    and written to ``scratch``, in float32: an adapter's changes are smaller than half precision can tell. So is what is
    to be rounded to ``base_bits``, as the model was that an adapter began from."""
    if base_bits is not None:
        return _written(name, scratch, options, base_bits)
    if name == "builtin":
        return Source(name, BUILTIN)
    folder = Path(name).expanduser()
    trusted = bool((options or {}).get("trust_remote_code"))
    if _whole(folder):
        return Source(name, folder, trusted=trusted)
    kept = {key: value for key, value in (options or {}).items() if key in SHARED[:5]}
    if not folder.exists() and HUB_ID.fullmatch(name) and (fetched := _fetched(name, kept)) is not None:
        return Source(name, fetched, trusted=trusted)
    return _written(name, scratch, options)


def _written(name: str, scratch: Path, options: Mapping[str, Any] | None, base_bits: int | None = None) -> Source:
    trusted = bool((options or {}).get("trust_remote_code"))
    model, tokenizer = load(name, options=options, base_bits=base_bits)
    base, bits = name, base_bits or adapters.base_bits(model)
    make_dense(model)
    if adapters.adapted(model):
        wrapper = vars(model)[adapters.WRAPPER]
        base = str(wrapper.peft_config["default"].base_model_name_or_path)
        model = wrapper.merge_and_unload()
    target = scratch / f"model-{len(list(scratch.iterdir()))}"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    stated = None if base.endswith(".gguf") else getattr(config_of(base, options or {})[0], "dtype", None)
    return Source(name, target, stated if isinstance(stated, torch.dtype) else None, trusted, bits)


def _whole(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any((folder / file).is_file() for file in (INDEX, SINGLE))


def _fetched(name: str, options: Mapping[str, Any]) -> Path | None:
    """A hub model's files; None where it has none in safetensors, or cannot be had: loading says why."""
    import huggingface_hub

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.py", *TOKENIZERS]
    kept = {key: value for key, value in options.items() if key != "trust_remote_code"}
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, **kept))
    except Exception:  # no network, no such model, no permission
        return None
    return folder if _whole(folder) else None


# ---- merging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merged:
    """What was measured on the way. Norms and cosines are of the task vectors, all tensors together."""

    norms: list[float]
    cosines: list[list[float]]
    initial: float  # norm of the initial model
    norm: float  # of the merged task vector, before η
    layers: int
    parameters: int
    dtype: str
    seconds: float


@dataclass
class _Layer:
    tensors: list[str] = field(default_factory=list)
    gram_MM: Tensor = field(default_factory=lambda: torch.zeros(0))
    coefficients: list[float] = field(default_factory=list)


def check_shares(weights: Sequence[float], runs: int, towards: float) -> None:
    if len(weights) != runs:
        raise ValueError(f"--weights must have one number for each run, {runs}; got {len(weights)}")
    if not all(0 <= w < math.inf for w in weights) or not sum(weights):
        raise ValueError(f"--weights must be at least 0 and not all 0; got {', '.join(f'{w:g}' for w in weights)}")
    if not 0 <= towards <= 1:
        raise ValueError(f"--towards must be between 0, the initial model, and 1, the merged one; got {towards:g}")


def merge(
    sources: Sequence[Source],
    init: Source,
    output: Path,
    *,
    weights: Sequence[float],
    method: str = "slerp",
    towards: float = 1.0,
    per: str = "layer",
    note: Callable[[str], None] = lambda text: None,
) -> Merged:
    """Write init + towards·(the task vectors, joined) into a folder, with the files of the first source beside it."""
    start = time.perf_counter()
    one_of("--method", method, METHODS)
    one_of("--per", per, PARTS)
    check_shares(weights, len(sources), towards)
    _check_tokens(sources, init)
    names = _common_names([*sources, init])
    shapes = _shapes([*sources, init], names)
    layers = _layers(names, per)
    types = {name: sources[0].dtype or shapes[name][1] for name in names}
    initial = _measure(layers, sources, init, types, note)
    join = {"slerp": spherical, "linear": linear}[method]
    total_MM, squared = torch.zeros(len(sources), len(sources), dtype=torch.float64), 0.0
    for layer in layers.values():
        c_M = join(layer.gram_MM, weights)
        layer.coefficients = (towards * c_M).tolist()
        total_MM += layer.gram_MM
        squared += float(c_M @ layer.gram_MM @ c_M)
    of = {name: layer.coefficients for layer in layers.values() for name in layer.tensors}
    sizes = {name: math.prod(shapes[name][0]) * types[name].itemsize for name in names}
    _write(output, sizes, lambda name: _joined(name, sources, init, of[name], types[name]), note)
    _copy_rest(sources[0].folder, output)
    norm_M = total_MM.diagonal().sqrt()
    cosine_MM = total_MM / (norm_M[:, None] * norm_M).clamp(min=1e-300)
    return Merged(
        norms=norm_M.tolist(),
        cosines=cosine_MM.tolist(),
        initial=math.sqrt(initial),
        norm=math.sqrt(max(squared, 0.0)),
        layers=len(layers),
        parameters=sum(math.prod(shape) for shape, _ in shapes.values()),
        dtype=", ".join(sorted({str(t).removeprefix("torch.") for t in types.values()})),
        seconds=time.perf_counter() - start,
    )


def _check_tokens(sources: Sequence[Source], init: Source) -> None:
    """All have the same vocabulary; the initial model may lack tokens that were added since."""
    first, files = sources[0], tokenizer_files(sources[0].folder)
    for other in (*sources[1:], init):
        theirs = tokenizer_files(other.folder)
        if not theirs or not files or theirs == files:
            continue
        here, there = _vocabulary(first), _vocabulary(other)
        if other is init:
            here, there = (
                {token: i for token, i in x.items() if token in y} for x, y in ((here, there), (there, here))
            )
        one, two = first.name, other.name
        if (text := clash(here, there)) is None and (text := clash(there, here)) is not None:
            one, two = two, one
        if text is not None:
            raise ValueError(
                f"{one} has another vocabulary than {two}: {text}; merge models that have the same tokenizer"
            )


def _vocabulary(source: Source) -> dict[str, int]:
    try:
        return vocabulary(source.folder, source.trusted)
    except Exception as error:  # of transformers and tokenizers: each has its own kinds
        raise ValueError(
            f"{source.name}: its tokenizer cannot be read, nor compared with the others' ({first_line(error)}); "
            "where they are the same, copy the files of one to all"
        ) from error


def _common_names(sources: Sequence[Source]) -> list[str]:
    """The tensors' names, which must be those of all. A tied head may be in the files or not."""
    first, names = sources[0], set(sources[0].files)
    for other in sources[1:]:
        differing = names ^ set(other.files)
        if differing == {"lm_head.weight"} and (first.tied or other.tied):
            names -= differing
        elif differing:
            raise ValueError(
                f"{first.name} and {other.name} are no models of one kind: only one of them has {min(differing)}"
            )
    return sorted(names)


def _shapes(sources: Sequence[Source], names: Iterable[str]) -> dict[str, tuple[list[int], torch.dtype]]:
    """Of the first source, once all have the same shapes."""
    shapes = {}
    for name in names:
        shapes[name] = sources[0].about(name)
        for other in sources[1:]:
            if (shape := other.about(name)[0]) != shapes[name][0]:
                raise ValueError(
                    f"{sources[0].name} and {other.name} are no models of one kind: {name} is {shapes[name][0]} in one "
                    f"and {shape} in the other"
                )
    return shapes


def _layers(names: Iterable[str], per: str) -> dict[str, _Layer]:
    layers: dict[str, _Layer] = {}
    for name in names:
        match = LAYER.match(name)
        key = {"model": "", "tensor": name, "layer": match[1] if match else name}[per]
        layers.setdefault(key, _Layer()).tensors.append(name)
    return layers


def _measure(
    layers: Mapping[str, _Layer],
    sources: Sequence[Source],
    init: Source,
    types: Mapping[str, torch.dtype],
    note: Callable[[str], None],
) -> float:
    """Fills each layer's Gram matrix, δ_i·δ_j in float64; gives the squared norm of the initial model."""
    squared = 0.0
    for i, (key, layer) in enumerate(layers.items()):
        note(f"measuring {i + 1} of {len(layers)}: {key}")
        layer.gram_MM = torch.zeros(len(sources), len(sources), dtype=torch.float64)
        for name in layer.tensors:
            for start_N, delta_MN in _chunks(name, sources, init, types[name]):
                layer.gram_MM += delta_MN @ delta_MN.T
                squared += float(start_N @ start_N)
    return squared


def _chunks(name: str, sources: Sequence[Source], init: Source, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """A tensor in pieces, in float64: of the initial model [N], and the task vectors [M,N]. None of whole numbers.

    The initial model is rounded to the runs' ``dtype``, as they began from it: its rounding was not learnt.
    """
    start, others = init.tensor(name).flatten(), [source.tensor(name).flatten() for source in sources]
    if not start.is_floating_point():
        return
    start = start.to(dtype)
    for at in range(0, len(start), CHUNK):
        piece_N = start[at : at + CHUNK].double()
        yield piece_N, torch.stack([other[at : at + CHUNK].double() - piece_N for other in others])


def _joined(name: str, sources: Sequence[Source], init: Source, c_M: Sequence[float], dtype: torch.dtype) -> Tensor:
    first = sources[0].tensor(name)
    if not first.is_floating_point():
        return first
    out = torch.empty(first.shape, dtype=dtype)
    flat, at = out.view(-1), 0
    for start_N, delta_MN in _chunks(name, sources, init, dtype):
        flat[at : at + len(start_N)] = start_N + torch.tensor(c_M, dtype=torch.float64) @ delta_MN
        at += len(start_N)
    if not bool(torch.isfinite(out).all()):
        raise ValueError(f"{name} is not finite once merged: one of the models is damaged")
    return out


def _write(folder: Path, sizes: Mapping[str, int], make: Callable[[str], Tensor], note: Callable[[str], None]) -> None:
    """Files of at most SHARD bytes, each written before the next is made; an index where there are several."""
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + size > SHARD:
            shards.append([])
        shards[-1].append(name)
    placed: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        note(f"writing {file}")
        save_file({name: make(name) for name in names}, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _copy_rest(folder: Path, output: Path) -> None:
    """Config, tokenizer, template, code: all that is no weight."""
    for path in sorted(folder.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or path.name.endswith(".index.json")
        ours = path.name in ("__init__.py", RECORD) or path.name.startswith(".")
        if path.is_file() and not weights and not ours:
            shutil.copy(path, output / path.name)
    if not any(next(output.glob(pattern), None) for pattern in TOKENIZERS):
        raise Explained(f"{folder} has no tokenizer files: copy those of the model it was made from into it")
