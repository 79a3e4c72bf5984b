"""A Hugging Face causal LM as a policy: load, log-probabilities of responses, save."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .kernels import linear_logp
from .models import BUILTIN


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
        self.linear = _head_is_linear(model)  # else the model's own logits are used

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

    def score(self, ids_BL: Tensor, start_B: Tensor, mask_BT: Tensor) -> Scored:
        """Log-probabilities and entropies of the responses in sequences padded on the right.

        The response of row b begins at ids_BL[b, start_B[b]]; mask_BT is true on its tokens.
        """
        row_N, t_N = mask_BT.nonzero(as_tuple=True)
        place_N = row_N * (ids_BL.shape[1] - 1) + start_B[row_N] + t_N - 1  # the state before the token
        target_N = ids_BL[row_N, start_B[row_N] + t_N]
        if self.linear:
            hidden_BLH = self.model.base_model(input_ids=ids_BL[:, :-1], use_cache=False).last_hidden_state
            hidden_NH = hidden_BLH.flatten(0, 1).index_select(0, place_N)
            weight_VH = self.model.get_output_embeddings().weight
            logp_N, entropy_N = linear_logp(hidden_NH, weight_VH, target_N, self.temperature)
        else:
            hidden_NH = None
            logits_NV = self.model(input_ids=ids_BL[:, :-1], use_cache=False).logits.flatten(0, 1)[place_N]
            logp_NV = (logits_NV.float() / self.temperature).log_softmax(-1)
            logp_N = logp_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1)
            entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
        zero_BT = torch.zeros(mask_BT.shape, dtype=logp_N.dtype, device=logp_N.device)
        return Scored(
            zero_BT.masked_scatter(mask_BT, logp_N), zero_BT.masked_scatter(mask_BT, entropy_N.detach()), hidden_NH
        )

    def head(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def save(self, folder: Path) -> None:
        """A plain Hugging Face folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@torch.no_grad()
def _head_is_linear(model: Any) -> bool:
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
