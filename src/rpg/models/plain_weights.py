"""A model's weights by the names in its files: adapters merged into them, each tensor once."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .four_bits import FourBitLinear, make_dense


def stored_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As ``merged_state``, in the layout of the model's files where transformers holds them otherwise (experts)."""
    conversions: Any = sys.modules.get("transformers.core_model_loading")
    if conversions is None or not any(p.dim() > 2 for p in model.parameters()):
        return merged_state(model)
    return iter(conversions.revert_weight_conversion(model, dict(merged_state(model))).items())


def merged_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by the names they have in the plain model, each once: of tied ones the first.

    A layer with an adapter of PEFT gives the weights it has with the adapter merged into them, computed on the fly, one
    layer at a time. What is held in 4 bits is given as it is multiplied, dense.
    """
    new = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    lasting = frozenset(new)  # not of merged layers: those are gone when the next comes, and it may have their place
    for name, tensor in _walk(model, "", _tied(model)):
        if id(tensor) not in lasting or id(tensor) in new:
            new.discard(id(tensor))
            yield name, tensor.detach()


def _tied(model: Any) -> Tensor | None:
    config = getattr(model, "config", None)
    if config is None or not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return None
    embeddings = model.get_input_embeddings()
    weight: Tensor = getattr(embeddings, "base_layer", getattr(embeddings, "original_module", embeddings)).weight
    return weight


def _walk(module: nn.Module, prefix: str, tied: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    module = _plain(module, prefix, tied)
    skipped = module._non_persistent_buffers_set
    tensors = [*module._parameters.items(), *((k, v) for k, v in module._buffers.items() if k not in skipped)]
    yield from ((prefix + name, tensor) for name, tensor in tensors if tensor is not None)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", tied)


def _plain(module: Any, prefix: str, tied: Tensor | None) -> nn.Module:
    """The module; where PEFT has put something in its place, or it is held in 4 bits, what it amounts to."""
    if isinstance(module, FourBitLinear):
        return module.dense()
    layers: Any = sys.modules.get("peft.tuners.tuners_utils")
    copies: Any = sys.modules.get("peft.utils.other")
    if layers is not None and isinstance(module, layers.BaseTunerLayer):
        base, off = module.get_base_layer(), module.disable_adapters or module.merged
    elif copies is not None and isinstance(module, copies.ModulesToSaveWrapper):
        base, off = module.original_module, module.disable_adapters
    else:
        return module  # type: ignore[no-any-return]
    if not off and tied is not None and any(p is tied for p in base.parameters()):
        raise ValueError(
            f"peft.options: {prefix.rstrip('.')} shares its weights with another layer, which would not change with it"
        )
    if not off and isinstance(module, layers.BaseTunerLayer):
        module = copy.deepcopy(module)
        make_dense(module)
        module.merge(adapter_names=module.active_adapters)
        base = module.get_base_layer()
    elif not off:
        base = module.modules_to_save[module.active_adapters[0]]
    if isinstance(base, FourBitLinear):
        return base.dense()
    return base  # type: ignore[no-any-return]
