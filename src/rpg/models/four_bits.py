"""Linear layers whose frozen weights are held in 4 bits (kernels/nf4.py), under an adapter that is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import nf4

FILE = "adapter_base.json"  # beside an adapter: how the model was held that it was trained on


class FourBitLinear(nn.Linear):
    """A linear layer to all who ask for its shape, bias or ``weight``, which is made dense when it is read."""

    def __init__(self, layer: nn.Linear, device: torch.device | str):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype
        packed, scale = nf4.quantise(layer.weight.detach().to(device))
        self.packed: Tensor
        self.scale: Tensor
        self.register_buffer("packed", packed, persistent=False)  # files hold the model's own weights, or none
        self.register_buffer("scale", scale, persistent=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return nf4.dequantise(self.packed, self.scale, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return nf4.linear(input, self.packed, self.scale, self.bias)

    def dense(self) -> nn.Linear:
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.bias = self.bias
        return layer


def quantise_layers(model: Any, device: torch.device | str) -> None:
    """Hold the linear layers in 4 bits on this device, one after the other. Those of an adapter and the head stay as
    they are, and those whose rows are no whole blocks. Of the dense model the device has one matrix at a time."""
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)  # inside of an adapter
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head and ".lora_" not in name and nf4.fits(layer.weight):
            model.set_submodule(name, FourBitLinear(layer, device))


def make_dense(model: Any) -> None:
    """What was rounded as ordinary layers again: for PEFT, which merges in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, FourBitLinear):
            model.set_submodule(name, layer.dense())


def layers(model: Any) -> list[FourBitLinear]:
    return [layer for layer in model.modules() if isinstance(layer, FourBitLinear)]


def packed_weights(model: Any) -> int:
    """Weights that are held in 4 bits."""
    return sum(layer.in_features * layer.out_features for layer in layers(model))


def packed_bytes(model: Any) -> int:
    return sum(layer.packed.nbytes + layer.scale.nbytes for layer in layers(model))


def largest_dense(model: Any) -> int:
    """Bytes of the largest matrix while it is dense."""
    sizes = (layer.in_features * layer.out_features * layer.dtype.itemsize for layer in layers(model))
    return max(sizes, default=0)


def save_bits(model: Any, folder: Path) -> None:
    """So that whoever loads the adapter has it on the weights that it was trained on."""
    if layers(model):
        text = json.dumps({"base_bits": 4, "format": "nf4", "block": nf4.BLOCK}) + "\n"
        (folder / FILE).write_text(text, encoding="utf-8")


def saved_bits(folder: Path) -> int | None:
    """Of the adapter in this folder; None: on the weights as they are."""
    if not (folder / FILE).is_file():
        return None
    about = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if about != {"base_bits": 4, "format": "nf4", "block": nf4.BLOCK}:
        raise ValueError(f"{folder / FILE} is not of a kind that this rpg knows: {about}")
    return 4
