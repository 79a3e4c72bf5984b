"""A Hugging Face causal LM as a policy: load, log-probabilities of responses, save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .kernels import linear_logp
from .kernels.interface import configs_of
from .kernels.packed import Packing, pack, packed
from .models import BUILTIN

CHUNK_ELEMENTS = 2**25  # logits held at once where the head is not linear


@dataclass(frozen=True)
class Scored:
    """Of every response token, [B,T], zero elsewhere; hidden_NH, where the head is linear, are the states before it."""

    logp_BT: Tensor
    entropy_BT: Tensor
    hidden_NH: Tensor | None


class Policy:
    """``temperature`` is part of the policy: what is trained is the distribution that is sampled from."""

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.model.eval()  # dropout would make a policy differ from itself
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.linear = head_is_linear(model)  # else the model's own logits are used
        self._configs = configs_of(model)
        self.apart = self.linear or self._head_comes_apart()
        self.padded_because = self._misfit() if self.apart else "its head cannot be called apart from its layers"

    @property
    def packs(self) -> bool:
        """Whether sequences are laid end to end; else they are padded to one length."""
        return self.padded_because is None

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
    ) -> Policy:
        """``builtin``, a Hugging Face folder, or a hub id. Errors are one line."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what fails is said once, not at each retry
        where = str(BUILTIN) if name == "builtin" else str(Path(name).expanduser()) if name.startswith("~") else name
        looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(where).exists()
        if looks_local and not (Path(where) / "config.json").is_file():
            raise ValueError(f"{name} is no model folder: there is no config.json in it")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(where)
            model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=dtype)
        except Exception as error:  # of transformers, tokenizers, safetensors, the hub: each has its own kinds
            raise ValueError(f"cannot load the model {name!r}: {_first_line(error)}") from error
        return cls(model.to(device), tokenizer, temperature)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def context(self) -> int | None:
        """Tokens the model was made for, where it says so."""
        found = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @property
    def unknown_ids(self) -> set[int]:
        """Tokens that stand for text the tokenizer has no token for."""
        padding = {self.tokenizer.pad_token_id} - {self.tokenizer.eos_token_id}
        return (padding | {self.tokenizer.unk_token_id}) - {None}

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Those that are trained, by name."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def encode(self, prompt: str, chat: bool | None = None) -> list[int]:
        """Token ids of a prompt; in the chat template if there is one and chat is not False."""
        if chat or (chat is None and getattr(self.tokenizer, "chat_template", None)):
            message = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.tokenizer(prompt, verbose=False)["input_ids"]
        return list(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def pack(self, start_B: Tensor, mask_BT: Tensor, width: int, prompt_B: Tensor | None = None) -> Packing | None:
        """How ``score`` will lay out sequences [B, width]; None where they are padded. Waits for the device."""
        return pack(start_B, mask_BT, width, prompt_B) if self.packs else None

    def score(
        self,
        ids_BL: Tensor,
        start_B: Tensor,
        mask_BT: Tensor,
        prompt_B: Tensor | None = None,
        recompute: bool = False,
        packing: Packing | None = None,
    ) -> Scored:
        """Log-probabilities and entropies of the responses in sequences padded on the right.

        The response of row b begins at ids_BL[b, start_B[b]]; mask_BT is true on its tokens. Rows with the same number
        in prompt_B have the same prompt, which is then computed once. With ``recompute`` the backward pass computes
        each layer anew from its input, which is all that is kept of it. ``packing`` is what ``pack`` gave for the rest.
        """
        flat = ids_BL.flatten()
        within: Callable[[], AbstractContextManager[Any]] = nullcontext
        if packing is None:
            packing = self.pack(start_B, mask_BT, ids_BL.shape[1], prompt_B)
        if packing is not None:
            inputs = {"input_ids": flat[packing.token_N][None], "position_ids": packing.position_N[None]}
            state_N, target_N, place_N = packing.state_R, flat[packing.target_R], packing.place_R
            within = partial(packed, self._configs, packing)
        else:
            row_N, t_N = mask_BT.nonzero(as_tuple=True)
            inputs = {"input_ids": ids_BL[:, :-1]}
            state_N = row_N * (ids_BL.shape[1] - 1) + start_B[row_N] + t_N - 1  # the state before the token
            target_N, place_N = ids_BL[row_N, start_B[row_N] + t_N], row_N * mask_BT.shape[1] + t_N
        hidden_NH = None
        with within(), self._recomputing(within) if recompute else nullcontext():
            out = (self.model.base_model if self.apart else self.model)(**inputs, use_cache=False)
        if not self.apart:
            logp_N, entropy_N = _logp(out.logits.flatten(0, 1)[state_N], target_N, self.temperature)
        else:
            hidden_NH = out.last_hidden_state.flatten(0, 1).index_select(0, state_N)
            if self.linear:
                logp_N, entropy_N = linear_logp(hidden_NH, self.head(), target_N, self.temperature)
            else:
                logp_N, entropy_N = self._through_the_head(hidden_NH, target_N, type(out))
        zero_N = torch.zeros(mask_BT.numel(), device=logp_N.device)
        return Scored(
            zero_N.index_copy(0, place_N, logp_N.float()).view(mask_BT.shape),
            zero_N.index_copy(0, place_N, entropy_N.detach().float()).view(mask_BT.shape),
            hidden_NH if self.linear else None,
        )

    @contextmanager
    def _recomputing(self, within: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Activation checkpointing of decoder layers, which are computed anew ``within`` what they were computed in.

        transformers' own is for models in training mode, and would turn dropout on.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        def again(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with within():
                return inner(*args, **kwargs)

        layers = [m for m in self.model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(f"recompute: {type(self.model).__name__} has no layers that transformers can checkpoint")
        before = [vars(layer).get("forward") for layer in layers]
        try:
            for layer in layers:
                run = partial(again, layer.forward)
                layer.forward = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            yield
        finally:
            for layer, own in zip(layers, before, strict=True):
                _restore(layer, own)

    def _logits(self, hidden_NH: Tensor, kind: Callable[..., Any]) -> Tensor:
        """What the model makes of states after its layers, [N,V]: its head with bias, scale and cap."""
        base, ids = self.model.base_model, torch.zeros(1, len(hidden_NH), dtype=torch.long, device=hidden_NH.device)
        own = vars(base).get("forward")
        try:
            base.forward = lambda *args, **kwargs: kind(last_hidden_state=hidden_NH[None])
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            _restore(base, own)
        return logits

    def _through_the_head(self, hidden_NH: Tensor, target_N: Tensor, kind: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        """In chunks, whose logits are not kept for the backward pass where there are several."""

        def chunk(hidden_NH: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
            return _logp(self._logits(hidden_NH, kind), target_N, self.temperature)

        rows = max(1, CHUNK_ELEMENTS // self.model.get_output_embeddings().weight.shape[0])
        if len(hidden_NH) <= rows:
            return chunk(hidden_NH, target_N)
        parts = [
            checkpoint(chunk, h, t, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(torch.split(hidden_NH, rows), torch.split(target_N, rows), strict=True)
        ]
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])

    # ---- what the architecture allows: tried out, architectures differ -----------------------------------------------

    @torch.no_grad()
    def _head_comes_apart(self) -> bool:
        """Whether the model's logits can be had from the states after its layers."""
        ids = torch.arange(1, 5, device=self.device)[None] % self.model.get_input_embeddings().weight.shape[0]
        out = self.model.base_model(input_ids=ids, use_cache=False)
        full = self.model(input_ids=ids, use_cache=False).logits[0]
        if getattr(out, "last_hidden_state", None) is None:
            return False
        try:
            found = self._logits(out.last_hidden_state[0], type(out))
        except (AttributeError, TypeError):  # it asks its layers for more than their states
            return False
        return found.shape == full.shape and _near(found, full, 1e-4, 2e-2)

    @torch.no_grad()
    def _misfit(self) -> str | None:
        """Why sequences cannot be laid end to end, if so: a few tokens against the plain forward pass."""
        config = self.model.config.get_text_config()
        if getattr(config, "attention_chunk_size", None) is not None:
            return "attention in chunks"
        known = self.model.get_input_embeddings().weight.shape[0]
        ids_BL = (torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 5, 4], [9, 8, 7, 6, 5, 3]]) % known).to(self.device)
        start_B, prompt_B = (torch.tensor(x, device=self.device) for x in ([3, 3, 2], [1, 1, 0]))
        mask_BT = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]], dtype=torch.bool, device=self.device)
        row_N, t_N = mask_BT.nonzero(as_tuple=True)
        base = self.model.base_model
        expected_NH = base(input_ids=ids_BL, use_cache=False).last_hidden_state[row_N, start_B[row_N] + t_N - 1]
        packing = pack(start_B, mask_BT, ids_BL.shape[1], prompt_B)
        ids_N, position_N = ids_BL.flatten()[packing.token_N], packing.position_N
        try:
            with packed(self._configs, packing) as windows:
                out = base(input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)
        except Exception as error:  # whatever a forward pass raises that was made for other inputs
            return _first_line(error)
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

    def head(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def save(self, folder: Path) -> None:
        """A plain Hugging Face folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _logp(logits_NV: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_NV = (logits_NV.float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return logp_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1), entropy_N


def _restore(module: torch.nn.Module, forward: Any) -> None:
    """The module's own forward, or that of its class."""
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _near(found: Tensor, expected: Tensor, single: float, half: float) -> bool:
    """Within a share of the expected values' norm, which depends on the precision."""
    share = single if expected.dtype in (torch.float32, torch.float64) else half
    found, expected = found.float(), expected.float()
    return bool((found - expected).norm() <= share * expected.norm())


@torch.no_grad()
def head_is_linear(model: Any) -> bool:
    """Whether the logits are hidden·Wᵀ and nothing else, no bias, scale or cap: tried out, architectures differ.

    A bias and a cap are asked for too: one may be zero, the other do nothing to small logits, until they are trained.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
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


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
