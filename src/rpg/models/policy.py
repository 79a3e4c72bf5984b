"""Policy: a Hugging Face causal LM that is trained. Prompts to tokens, log-probabilities of responses, saving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..console import first_line
from ..kernels import linear_logp
from ..kernels.custom_attention import configs_of
from ..kernels.head_with_loss import head_with_loss
from ..kernels.kept import Kept
from ..kernels.packed import Packing, pack, packed
from . import BUILTIN, adapters
from .architecture import head_alone, head_comes_apart, head_is_linear, restore_forward, why_not_packed
from .blocks import Block, LossOf, gradients, in_rows
from .loading import complete, end_ids_of, load

OF_TOKENIZER = (  # what apply_chat_template takes for itself
    *("add_generation_prompt", "continue_final_message", "tokenize", "sanitize_control_tokens", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
)
CHUNK_ELEMENTS = 2**25  # logits held at once where the head is not linear
Within = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Scored:
    """Of every response token, [B,T], zero elsewhere; hidden_NH, where the head is linear, are the states before it."""

    logp_BT: Tensor
    entropy_BT: Tensor
    hidden_NH: Tensor | None


class Policy:
    """``temperature`` is part of the policy: what is trained is the distribution that is sampled from."""

    entropy_gradient = False  # whether ``score`` gives entropies with their gradient

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.model.eval()  # dropout would make a policy differ from itself
        complete(tokenizer, model)
        self.adapted = adapters.adapted(model)  # only an adapter is trained
        self.fresh = False  # with that adapter off it is the model that it began as
        self.linear = head_is_linear(model)  # logits are hidden·Wᵀ; else the model's own are used
        self.apart = self.linear or head_comes_apart(model)  # the head can be called apart from the layers
        self.padded_because = why_not_packed(model) if self.apart else "its head cannot be called apart from its layers"
        self._configs = configs_of(model)
        self._system_read = False  # whether the chat template is known to show the system prompt

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
        options: Mapping[str, Any] | None = None,
        peft: adapters.AdapterSettings | None = None,
    ) -> Policy:
        """``builtin``, a Hugging Face folder or hub id, a .gguf file, an adapter's folder: see models/loading.py.

        With a method in ``peft`` an adapter is put into the model and trained alone. Where the name is an adapter's, it
        is that one which is trained. ``peft.base_bits`` 4: beside weights in 4 bits.
        """
        method, settings, bits = (None, {}, None) if peft is None else (peft.method, peft.options, peft.base_bits)
        adapters.check_bits(bits, method, settings)
        model, tokenizer = load(name, dtype=dtype, device=device, options=options, base_bits=bits)
        if settings and method is None and not adapters.adapted(model):
            raise ValueError("peft.options without a method: give --peft.method lora")
        fresh = False
        if adapters.adapted(model):
            adapters.check_same(model, method, settings)
            adapters.check_base(model, bits)
        elif method is not None:
            model = adapters.attach(model, method, settings, _lasting(name, (options or {}).get("subfolder")))
            fresh = adapters.began_as_nothing(model)
        policy = cls(model, tokenizer, temperature)
        policy.fresh = fresh
        return policy

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def context(self) -> int | None:
        """Tokens the model was made for, where it says so."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None

    @property
    def unknown_ids(self) -> set[int]:
        """Tokens that stand for text the tokenizer has no token for."""
        marks = {*self._model_ends(), self.tokenizer.bos_token_id, None}  # these may stand for padding too
        return {self.tokenizer.pad_token_id, self.tokenizer.unk_token_id} - marks

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Those that are trained, by name."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    @property
    def chats(self) -> bool:
        """Whether it has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    # ---- prompts and texts -------------------------------------------------------------------------------------------

    def encode(
        self,
        prompt: str,
        chat: bool | None = None,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a prompt; in the chat template if there is one and chat is not False.

        ``system`` is the system prompt, ``options`` go to the template: enable_thinking=False, say.
        """
        has = self.chats
        if chat is False or (chat is None and not has):
            if system:
                raise ValueError("a system prompt needs the model's chat template: leave task.system empty")
            ids, ends = list(self.tokenizer(prompt, verbose=False)["input_ids"]), self._model_ends()
            while len(ids) > 1 and ids[-1] in ends:  # which some tokenizers append
                ids.pop()
            return ids
        if not has:
            raise ValueError("the model has no chat template: give --task.chat false, or a model made for chat")
        for name in options or {}:
            if name in OF_TOKENIZER:
                raise ValueError(f"task.chat_options.{name} is no option of the chat template: leave it out")
        said = [{"role": "user", "content": prompt}]
        ids = self.encode_chat(said, system, options)
        if system and not self._system_read:
            if ids == self.encode_chat(said, system + ".", options):
                raise ValueError("the model's chat template ignores the system prompt: leave task.system empty")
            self._system_read = True
        return ids

    def encode_chat(
        self, said: Sequence[Mapping[str, str]], system: str | None = None, options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """A conversation through the chat template: messages with a role, user or assistant, and their content."""
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        try:  # the template writes the first token itself, where there is one: none is added
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, **(options or {})
            )
        except Exception as error:  # whatever a template raises
            fix = "leave task.system empty" if system else "give --task.chat false, or check task.chat_options"
            raise ValueError(f"the model's chat template fails: {first_line(error)}; {fix}") from error
        return list(ids)

    def end_ids(self, extra: str | None = None) -> list[int]:
        """Tokens that end a response: the tokenizer's, those of the model's configs, and ``extra``, texts of one token
        each with spaces between."""
        if extra and not extra.strip():
            raise ValueError("rollout.end_tokens: white space cannot be named: it stands between tokens")
        ends = self._model_ends()
        for text in (extra or "").split():
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) != 1 or self.tokenizer.decode(ids).strip() != text:
                raise ValueError(f"rollout.end_tokens: {text!r} is not one token of this model")
            ends += ids
        if not ends:
            raise ValueError("the model has no end token: name one with --rollout.end_tokens")
        return sorted(set(ends))

    def _model_ends(self) -> list[int]:
        return end_ids_of(self.tokenizer, self.model.generation_config, self.model.config.get_text_config())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, special tokens such as <think> included; not the model's own end, beginning and padding tokens."""
        read = [t for t in tokens if t not in self._unread]
        # of a list the tokenizer looks at each token
        return str(self.tokenizer.decode(np.array(read, dtype=np.int64), skip_special_tokens=False))

    @cached_property
    def _unread(self) -> set[int | None]:
        return {*self._model_ends(), self.tokenizer.pad_token_id, self.tokenizer.bos_token_id}

    # ---- log-probabilities -------------------------------------------------------------------------------------------

    def pack(self, start_B: Tensor, mask_BT: Tensor, width: int, prompt_B: Tensor | None = None) -> Packing | None:
        """How ``score`` will lay out sequences [B, width]; None where they are padded. Waits for the device, unless the
        tensors are on the host."""
        return pack(start_B, mask_BT, width, prompt_B, self.device) if self.packs else None

    def score(
        self,
        ids_BL: Tensor,
        start_B: Tensor,
        mask_BT: Tensor,
        prompt_B: Tensor | None = None,
        recompute: bool = False,
        packing: Packing | None = None,
        kept: Kept | None = None,
    ) -> Scored:
        """Log-probabilities and entropies of the responses in sequences padded on the right.

        The response of row b begins at ids_BL[b, start_B[b]]; mask_BT is true on its tokens. Rows with the same number
        in prompt_B have the same prompt, which is then computed once. With ``recompute`` the backward pass computes
        each layer again from its input, all that is kept of it. ``packing`` is what ``pack`` gave for the rest.
        ``kept``: of every response token, row by row, the set it was drawn from; all is then over that set alone.
        """
        inputs, state_N, target_N, place_N, within = self._laid_out(ids_BL, start_B, mask_BT, prompt_B, packing)
        logp_N, entropy_N, hidden_NH = self._compute(
            inputs, state_N, target_N, within, recompute, None if kept is None else kept.to(self.device)
        )
        shape = mask_BT.shape
        return Scored(in_rows(logp_N, place_N, shape), in_rows(self._entropy(entropy_N), place_N, shape), hidden_NH)

    def learn(
        self,
        ids_BL: Tensor,
        start_B: Tensor,
        mask_BT: Tensor,
        prompt_B: Tensor | None = None,
        recompute: bool = False,
        packing: Packing | None = None,
        *,
        blocks: Sequence[Block],
        loss_of: LossOf,
        sum_VH: Tensor | None,
    ) -> Scored:
        """``score`` and the backward pass of a loss, with the logits computed once: see kernels/head_with_loss.py.

        ``loss_of`` is asked for the loss of one block after the other, and gradients are those of the sum. The head's,
        where it is trained, is added to ``sum_VH``; what else it has (tied embeddings) goes where gradients go. The
        head must be linear.
        """
        inputs, state_N, target_N, place_N, within = self._laid_out(ids_BL, start_B, mask_BT, prompt_B, packing)
        hidden_NH = self._states(self._body(inputs, within, recompute), state_N)

        def gradient_of(i: int, logp_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, Tensor | None]:
            return gradients(blocks[i], loss_of, logp_N, entropy_N, place_N, mask_BT, self.entropy_gradient)

        tokens = [block.tokens for block in blocks]
        done = head_with_loss(hidden_NH, self.head(), target_N, tokens, gradient_of, sum_VH, self.temperature)
        if hidden_NH.requires_grad:
            hidden_NH.backward(done.d_hidden_NH)  # type: ignore[no-untyped-call]
        shape = mask_BT.shape
        return Scored(in_rows(done.logp_N, place_N, shape), in_rows(done.entropy_N, place_N, shape), None)

    def _laid_out(
        self, ids_BL: Tensor, start_B: Tensor, mask_BT: Tensor, prompt_B: Tensor | None, packing: Packing | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Within]:
        """The model's inputs; of each response token, row by row, the state that predicts it, itself, and its place in
        mask_BT; and what the model is to be called in."""
        flat = ids_BL.flatten()
        if packing is None:
            packing = self.pack(start_B, mask_BT, ids_BL.shape[1], prompt_B)
        if packing is not None:
            inputs = {"input_ids": flat[packing.token_N][None], "position_ids": packing.position_N[None]}
            within = partial(packed, self._configs, packing)
            return inputs, packing.state_R, flat[packing.target_R], packing.place_R, within
        row_N, t_N = mask_BT.nonzero(as_tuple=True)
        state_N = row_N * (ids_BL.shape[1] - 1) + start_B[row_N] + t_N - 1  # the state before the token
        target_N, place_N = ids_BL[row_N, start_B[row_N] + t_N], row_N * mask_BT.shape[1] + t_N
        return {"input_ids": ids_BL[:, :-1]}, state_N, target_N, place_N, nullcontext

    def _entropy(self, entropy_N: Tensor) -> Tensor:
        return entropy_N if self.entropy_gradient else entropy_N.detach()

    def _compute(
        self,
        inputs: dict[str, Tensor],
        state_N: Tensor,
        target_N: Tensor,
        within: Within,
        recompute: bool,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """logp_N, entropy_N and, where the head is linear, hidden_NH: all of ``score`` that touches weights."""
        out = self._body(inputs, within, recompute)
        if not self.apart:
            logits_NV = out.logits.flatten(0, 1)[state_N]
            return *_logp(logits_NV, target_N, self.temperature, kept, self.entropy_gradient), None
        hidden_NH = self._states(out, state_N)
        if self.linear:
            return *linear_logp(hidden_NH, self.head(), target_N, self.temperature, kept), hidden_NH
        return *self._through_the_head(hidden_NH, target_N, kept, type(out)), None

    def _body(self, inputs: dict[str, Tensor], within: Within, recompute: bool) -> Any:
        """What the model gives, without its head where that can be called apart."""
        with within(), self._recomputing(within) if recompute else nullcontext():
            return (self.model.base_model if self.apart else self._call)(**inputs, use_cache=False)

    @staticmethod
    def _states(out: Any, state_N: Tensor) -> Tensor:
        hidden_NH: Tensor = out.last_hidden_state.flatten(0, 1).index_select(0, state_N)
        return hidden_NH

    def _call(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    @contextmanager
    def _recomputing(self, within: Within) -> Iterator[None]:
        """Activation checkpointing of decoder layers, which are computed again ``within`` what they were computed in.

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
            for layer, forward in zip(layers, before, strict=True):
                restore_forward(layer, forward)

    def _through_the_head(
        self, hidden_NH: Tensor, target_N: Tensor, kept: Kept | None, kind: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """In chunks, whose logits are not kept for the backward pass where there are several."""

        def chunk(hidden_NH: Tensor, target_N: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor]:
            logits_NV = head_alone(self.model, self._call, hidden_NH, kind)
            return _logp(logits_NV, target_N, self.temperature, kept, self.entropy_gradient)

        rows = max(1, CHUNK_ELEMENTS // self.model.get_output_embeddings().weight.shape[0])
        if len(hidden_NH) <= rows:
            return chunk(hidden_NH, target_N, kept)
        hidden, target = torch.split(hidden_NH, rows), torch.split(target_N, rows)
        sets = [None] * len(hidden) if kept is None else kept.split(rows)
        chunks = [
            checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(hidden, target, sets, strict=True)
        ]
        return torch.cat([logp for logp, _ in chunks]), torch.cat([entropy for _, entropy in chunks])

    def head(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def head_parameter(self) -> Tensor:
        """The head as the optimiser knows it."""
        return self.head()

    def rest(self) -> None:
        """After passes without gradients: give back what is held for a backward pass."""

    def save(self, folder: Path) -> None:
        """A plain Hugging Face folder; of an adapter, one as PEFT writes it."""
        if self.adapted:
            adapters.save(self.model, folder)
        else:
            self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _logp(
    logits_NV: Tensor, target_N: Tensor, temperature: float, kept: Kept | None, gradient: bool
) -> tuple[Tensor, Tensor]:
    """``gradient``: of the entropy too."""
    outside_NV = None if kept is None else kept.outside(logits_NV.shape[1])
    z_NV = logits_NV.float() / temperature
    logp_NV = (z_NV if outside_NV is None else z_NV.masked_fill(outside_NV, -torch.inf)).log_softmax(-1)
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        finite_NV = logp_NV if outside_NV is None else logp_NV.masked_fill(outside_NV, 0.0)
        entropy_N = -(logp_NV.exp() * finite_NV).sum(-1)
    return logp_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1), entropy_N


def _lasting(name: str, subfolder: str | None) -> str:
    """A model's name, such that it is found from any folder."""
    path = BUILTIN if name == "builtin" else Path(name).expanduser()
    inner = path / (subfolder or "")
    path = inner if inner.is_dir() else path
    return str(path.resolve()) if path.exists() else name
