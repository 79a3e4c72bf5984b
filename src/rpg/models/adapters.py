"""Adapters of PEFT in a model: a few trained weights beside frozen ones. The model stays a plain transformers model."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..console import flat_text, install, nearest
from .four_bits import layers, save_bits, saved_bits

WRAPPER = "_peft_wrapper"  # in a model's __dict__, not among its modules: the PeftModel around it
BASE_BITS = "_base_bits"  # there too, of an adapter from a folder: how its model was held when it was trained
STARTS = (True, False, "gaussian", "orthogonal")  # of LoRA, that leave the model's own weights as they are
DEFAULTS: dict[str, dict[str, Any]] = {
    "lora": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"},
}
UNFIT = {
    "adalora": "it moves ranks between layers in a loop of its own",
    "adaption_prompt": "it puts tokens before those of the model",
    "poly": "it needs the number of a task with every input",
    "xlora": "it runs the model twice for every input",
    "shadow": "it runs a second model beside the first",
}
SPELT = {"dora": ("lora", {"use_dora": True}), "rslora": ("lora", {"use_rslora": True})}


class AdapterSettings(Protocol):
    """``peft`` in a run's settings."""

    @property
    def method(self) -> str | None: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def base_bits(self) -> int | None: ...


def attach(model: Any, method: str, options: Mapping[str, Any], base: str) -> Any:
    """Put a new adapter into the model and freeze the rest; the same model. ``base``: its name, for files.

    The adapter's weights have the model's dtype: with bfloat16 the optimiser keeps float32 ones (MixedOptimizer).
    They begin as the same numbers in every process.
    """
    peft = _peft()
    config = make_config(method, options)
    dtype = model.dtype
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        with _fitting(method), tempfile.TemporaryDirectory() as folder:
            wrapper = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
            wrapper.peft_config["default"].save_pretrained(folder)  # some settings train but cannot be read again
            peft.PeftConfig.from_pretrained(folder)
    return _wrapped(wrapper, dtype, base)


@contextmanager
def _fitting(method: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each method has checks of its own
        text = flat_text(error).rstrip(".")
        raise ValueError(f"peft.method {method} does not fit this model: {text}; check peft.options") from error


def restore(model: Any, folder: Path) -> Any:
    """Put the adapter that lies in a folder into its model."""
    peft, dtype = _peft(), model.dtype
    config = peft.PeftConfig.from_pretrained(str(folder))
    _check_fit(config.peft_type.lower())
    _check_start(config)
    base = config.base_model_name_or_path
    vars(model)[BASE_BITS] = saved_bits(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wrapper = peft.PeftModel.from_pretrained(
                model, str(folder), config=config, is_trainable=True, autocast_adapter_dtype=False
            )
        except Exception as error:
            raise ValueError(f"the adapter in {folder} cannot be loaded: {flat_text(error)}") from error
    return _wrapped(wrapper, dtype, base)


def _wrapped(wrapper: Any, dtype: torch.dtype, base: str) -> Any:
    model = wrapper.get_base_model()
    wrapper.peft_config["default"].base_model_name_or_path = base
    vars(model)[WRAPPER] = wrapper
    for p in model.parameters():
        if p.requires_grad and p.dtype != dtype and p.is_floating_point():
            p.data = p.data.to(dtype)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the adapter has no weights to train: check peft.options.target_modules")
    return model.eval()


def adapted(model: Any) -> bool:
    """Whether there is an adapter in the model."""
    return WRAPPER in vars(model)


def base_bits(model: Any) -> int | None:
    """What the adapter's folder says of the model it is for."""
    bits: int | None = vars(model).get(BASE_BITS)
    return bits


def method_of(model: Any) -> str:
    return str(vars(model)[WRAPPER].peft_config["default"].peft_type.value).lower()


def weights(model: Any) -> dict[str, Tensor]:
    """The adapter's trained weights by name, not copied."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Within, the model is what it is without its adapter."""
    layers = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    trained = [(p, p.requires_grad) for p in model.parameters()]  # which PEFT changes on the way
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for p, was in trained:
            p.requires_grad_(was)


@torch.no_grad()
def began_as_nothing(model: Any) -> bool:
    """Whether the model with its new adapter is the model with it off, whatever the adapter then learns: tried out.

    Some begin as something (PiSSA), and some cannot be switched off. One that changes nothing at all is refused.
    """
    tokens = [*range(1, 7), *(getattr(vars(model)[WRAPPER].peft_config["default"], "token_indices", None) or [])[:8]]
    ids = torch.tensor([tokens], device=model.device) % model.get_input_embeddings().weight.shape[0]
    moved = {name: x + 0.1 for name, x in weights(model).items()}

    def off_and_on() -> tuple[Tensor, Tensor]:
        with switched_off(model):
            off = model(input_ids=ids, use_cache=False).logits.float()
        return off, model(input_ids=ids, use_cache=False).logits.float()

    with _fitting(method_of(model)):
        before, on = off_and_on()
        with swapped_in(model, moved):
            after, changed = off_and_on()
        if torch.equal(on, changed):
            raise ValueError("its weights do not change what the model computes")
    share = 1e-4 if model.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.equal(before, after) and bool((on - before).norm() <= share * on.norm())


@contextmanager
def swapped_in(model: Any, others: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the adapter's weights are these, in the places of its own."""
    places = weights(model)
    values = [others[name] for name in places]
    before = [x.clone() for x in places.values()]
    with torch.no_grad():
        try:
            torch._foreach_copy_(list(places.values()), values)
            yield
        finally:
            torch._foreach_copy_(list(places.values()), before)


def save(model: Any, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, as PEFT reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # the model's own embeddings are never trained; "auto" would ask the hub whether they were
        vars(model)[WRAPPER].save_pretrained(str(folder), save_embedding_layers=False)
    save_bits(model, folder)


# ---- settings --------------------------------------------------------------------------------------------------------


def make_config(method: str, options: Mapping[str, Any]) -> Any:
    """The method's config in PEFT."""
    peft = _peft()
    kind, implied = SPELT.get(method.lower(), (method.lower(), {}))
    kinds = {x.value.lower(): x for x in peft.PeftType}
    if kind not in kinds:
        raise ValueError(f"peft.method: there is no {method!r}{_nearest(kind, [*kinds, *SPELT])}")
    _check_fit(kind)
    config_class = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kinds[kind]]
    names = [field.name for field in dataclasses.fields(config_class)]
    for name, value in options.items():
        if name not in names:
            raise ValueError(f"peft.options: {kind} has no option {name!r}{_nearest(name, names)}")
        if "dropout" in name and value:
            raise ValueError(f"peft.options.{name} must be 0: with dropout a policy would differ from itself")
    settings = {**DEFAULTS.get(kind, {}), **implied, **options, "task_type": "CAUSAL_LM"}
    try:
        config = config_class(**settings)
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"peft.options of {kind}: {flat_text(error)}") from error
    _check_start(config)
    return config


def check_same(model: Any, method: str | None, options: Mapping[str, Any]) -> None:
    """That an adapter which came with the model is what the settings ask for."""
    if method is None:
        return
    wanted, loaded = make_config(method, options), vars(model)[WRAPPER].peft_config["default"]
    if wanted.peft_type != loaded.peft_type:
        raise ValueError(
            f"peft.method is {method}, but the model is a {method_of(model)} adapter: leave peft.method out"
        )
    for name in options:
        now, then = getattr(wanted, name), getattr(loaded, name)
        if name != "target_modules" and now != then:  # those are spelt out once they are known
            raise ValueError(f"peft.options.{name} is {now}, but the model is an adapter made with {then}")


def check_bits(bits: int | None, method: str | None, options: Mapping[str, Any]) -> None:
    """Weights in 4 bits are never trained, nor rewritten: LoRA alone is beside them."""
    if bits is None:
        return
    if method is None:
        raise ValueError("peft.base_bits is for the frozen model under an adapter: give --peft.method lora")
    _check_beside(make_config(method, options))


def check_base(model: Any, bits: int | None) -> None:
    """The same of an adapter that is in its model. It goes on beside the weights that it was trained on."""
    if bits is not None and base_bits(model) != bits:
        raise ValueError("the model is an adapter that was trained beside unrounded weights: leave peft.base_bits out")
    if layers(model):
        _check_beside(vars(model)[WRAPPER].peft_config["default"])


def _check_beside(config: Any) -> None:
    kind = str(config.peft_type.value).lower()
    if kind != "lora" or config.use_dora:
        raise ValueError(f"peft.base_bits goes with plain LoRA, not {'dora' if kind == 'lora' else kind}: take lora")
    if config.modules_to_save:
        raise ValueError("peft.options.modules_to_save trains whole layers, which peft.base_bits rounds: leave it out")
    if config.init_lora_weights not in STARTS:
        raise ValueError(
            f"peft.options.init_lora_weights {config.init_lora_weights} rewrites the model's weights, which "
            "peft.base_bits rounds: leave it out"
        )


def _check_fit(kind: str) -> None:
    peft = _peft()
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind.upper())]
    if issubclass(config, peft.PromptLearningConfig):
        raise ValueError(f"peft.method {kind} learns a prompt, which sampling here does not know of: take lora")
    if kind in UNFIT:
        raise ValueError(f"peft.method {kind} does not work here: {UNFIT[kind]}; take lora")


def _check_start(config: Any) -> None:
    """Its weights are of no use without those of the model that it began with, which are not in its files."""
    start = str(getattr(config, "init_lora_weights", ""))
    if start.startswith("pissa_niter"):
        raise ValueError(f"peft.options.init_lora_weights: {start} changes the model at random: take pissa")


def _nearest(name: str, names: list[str]) -> str:
    near = nearest(name, names, 0.5)
    return f"; did you mean {near}?" if near else f"; there are {', '.join(sorted(names))}"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"an adapter needs the package peft: {install('rpg-rl[peft]')}") from error
    return peft
