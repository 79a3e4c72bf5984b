"""What a model's architecture allows: tried out on a few tokens, as architectures differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..console import first_line
from ..kernels.custom_attention import configs_of
from ..kernels.packed import pack, packed


@torch.no_grad()
def head_is_linear(model: Any) -> bool:
    """Whether the logits are hidden·Wᵀ and nothing else, no bias, scale or cap: tried out, architectures differ.

    A bias and a cap are asked for too: one may be zero, the other do nothing to small logits, until they are trained.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    if next(head.children(), None) is not None:  # an adapter, perhaps, that adds nothing until it is trained
        return False
    if getattr(head, "bias", None) is not None or getattr(config, "final_logit_softcapping", None) is not None:
        return False
    ids = torch.arange(1, 5, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    full = model(input_ids=ids, use_cache=False).logits.float()
    hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
    if hidden is None:
        return False
    by_hand = (hidden @ head.weight.T).float()
    near = (1e-4 if head.weight.dtype in (torch.float32, torch.float64) else 2e-2) * float(full.abs().max())
    return full.shape == by_hand.shape and bool((full - by_hand).abs().max() <= near)


@torch.no_grad()
def head_comes_apart(model: Any) -> bool:
    """Whether the model's logits can be had from the states after its layers."""
    ids = torch.arange(1, 5, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    out = model.base_model(input_ids=ids, use_cache=False)
    expected = model(input_ids=ids, use_cache=False).logits[0]
    if getattr(out, "last_hidden_state", None) is None:
        return False
    try:
        logits = head_alone(model, model, out.last_hidden_state[0], type(out))
    except (AttributeError, TypeError):  # it asks its layers for more than their states
        return False
    return logits.shape == expected.shape and _near(logits, expected, 1e-4, 2e-2)


def head_alone(model: Any, call: Callable[..., Any], hidden_NH: Tensor, kind: Callable[..., Any]) -> Tensor:
    """What the model makes of states after its layers, [N,V]: its head with bias, scale and cap.

    ``call`` calls the model; its layers then only give these states, in an output of this ``kind``.
    """
    base, ids = model.base_model, torch.zeros(1, len(hidden_NH), dtype=torch.long, device=hidden_NH.device)
    before = vars(base).get("forward")
    try:
        base.forward = lambda *args, **kwargs: kind(last_hidden_state=hidden_NH[None])
        logits: Tensor = call(input_ids=ids, use_cache=False).logits[0]
    finally:
        restore_forward(base, before)
    return logits


def restore_forward(module: torch.nn.Module, forward: Any) -> None:
    """What was the module's own forward, or that of its class."""
    if forward is None:
        del module.forward
    else:
        module.forward = forward


@torch.no_grad()
def why_not_packed(model: Any) -> str | None:
    """Why sequences cannot be laid end to end, if so: a few tokens against the plain forward pass."""
    config = model.config.get_text_config()
    if getattr(config, "attention_chunk_size", None) is not None:
        return "attention in chunks"
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.device
    ids_BL = (torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 5, 4], [9, 8, 7, 6, 5, 3]]) % vocabulary).to(device)
    start_B, prompt_B = (torch.tensor(x, device=device) for x in ([3, 3, 2], [1, 1, 0]))
    mask_BT = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]], dtype=torch.bool, device=device)
    row_N, t_N = mask_BT.nonzero(as_tuple=True)
    base = model.base_model
    expected_NH = base(input_ids=ids_BL, use_cache=False).last_hidden_state[row_N, start_B[row_N] + t_N - 1]
    packing = pack(start_B, mask_BT, ids_BL.shape[1], prompt_B)
    ids_N, position_N = ids_BL.flatten()[packing.token_N], packing.position_N
    try:
        with packed(configs_of(model), packing) as windows:
            out = base(input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)
    except Exception as error:  # whatever a forward pass raises that was made for other inputs
        return first_line(error)
    kinds = getattr(config, "layer_types", None) or []
    narrow = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None) is not None)
    layers = getattr(config, "num_hidden_layers", len(windows))
    if len(windows) != layers or not layers:
        return f"{len(windows)} of its {layers} layers call the attention interface"
    if narrow and not any(windows):
        return "its attention layers do not say what their window is"
    if not _near(out.last_hidden_state[0, packing.state_R], expected_NH, 1e-3, 0.1):
        return "its states are not those of the plain forward pass"
    return None


def _near(values: Tensor, expected: Tensor, single: float, half: float) -> bool:
    """Within a share of the expected values' norm, which depends on the precision."""
    share = single if expected.dtype in (torch.float32, torch.float64) else half
    values, expected = values.float(), expected.float()
    return bool((values - expected).norm() <= share * expected.norm())
