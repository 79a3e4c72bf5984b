"""vLLM as an engine: in this process, with a copy of the weights that ``sync`` brings up to date in place.

vLLM is given the model's config alone, never its files: the weights of the policy are pushed into it by name (it fuses
them itself), so that what was read from a hub, a folder or a GGUF file, or trained since, goes the same way.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.sample_torch import uniforms
from .engine import NotFinite, Rollout, Sampling

CPU_CACHE = 2**30  # bytes of keys and values on a CPU, where nothing is said of them
GPU_SHARE = 0.4  # of a GPU's memory for vLLM's weights, keys and values: the rest is the trainer's
OWN = ("model", "skip_tokenizer_init", "load_format", "logprobs_mode", "generation_config")  # options the engine sets


class VllmEngine:
    """``longest``: tokens of a prompt and its response at most. ``options`` go to vLLM's ``LLM``.

    Sample j of a prompt draws with a seed of its own, made of the seed, the prompt's tokens and j. The logits it draws
    from are computed beside other sequences, on which their last bits depend: the same call gives the same tokens; with
    other prompts beside, or other slots, they are the same but where two tokens are all but tied.

    A process can have one at a time: ``close`` it before making another.
    """

    def __init__(
        self,
        model: Any,
        end_ids: Sequence[int],
        longest: int,
        slots: int = 256,
        options: Mapping[str, Any] | None = None,
    ):
        self.model, self.end_ids = model, sorted(set(end_ids))
        if not self.end_ids:
            raise ValueError("the model has no end token: name one with rollout.end_tokens")
        size = model.get_input_embeddings().weight.shape[0]
        self.stops = [i for i in self.end_ids if i < size]  # a tokenizer may have more tokens than its model
        given = dict(options or {})
        if taken := sorted(set(given).intersection(OWN)):
            raise ValueError(f"rollout.vllm.{taken[0]} is set by the engine and cannot be given")
        if int(given.get("tensor_parallel_size", 1)) * int(given.get("pipeline_parallel_size", 1)) != 1:
            raise ValueError("rollout.vllm: one GPU only; the weights are updated within this process")
        self.name, self.asleep = type(model).__name__, False
        self.vllm = _import()
        self.stale = True  # the weights are not the policy's
        try:
            self.llm = self._start(given, longest, slots)
            _spare(model)
            self.longest = int(self.llm.llm_engine.model_config.max_model_len)
            self.can_sleep = bool(self.llm.llm_engine.model_config.enable_sleep_mode)
            worst = self._try_out()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of pydantic, torch and vLLM's own kinds
            raise ValueError(f"vLLM cannot run {self.name}: {_reason(error)}") from error
        if not worst <= (0.02 if model.dtype in (torch.float32, torch.float64) else 0.5):
            raise ValueError(f"vLLM cannot run {self.name}: its log-probabilities are wrong by {worst:.2g}")
        self.stale = True  # a checkpoint may be loaded into the policy before the first call

    def _start(self, given: dict[str, Any], longest: int, slots: int) -> Any:
        from vllm.platforms import current_platform

        config = copy.deepcopy(self.model.config)
        config.architectures = [self.name]
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        usual: dict[str, Any] = {
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": longest,
            "max_num_seqs": slots,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        if current_platform.is_cpu():
            usual["enforce_eager"] = True  # compiling takes longer than it gives
            if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
                usual["kv_cache_memory_bytes"] = CPU_CACHE
        else:
            usual |= {"gpu_memory_utilization": GPU_SHARE, "enable_sleep_mode": True}
        with tempfile.TemporaryDirectory() as folder, _unchanged():
            config.save_pretrained(folder)
            return self.vllm.LLM(
                folder,
                skip_tokenizer_init=True,  # tokens in, tokens out
                load_format="dummy",
                logprobs_mode="processed_logprobs",  # of what is sampled from: tempered and truncated
                generation_config="vllm",  # no penalties of the model's own
                **usual | given,
            )

    def _try_out(self) -> float:
        """How far a few tokens are from the model's plain forward pass: what vLLM computes otherwise is refused."""
        known = self.model.get_input_embeddings().weight.shape[0]
        prompts = [[i % known for i in range(1, min(7, self.longest - 2))], [3 % known]]
        training = self.model.training
        self.model.eval()
        try:
            found = self.generate(prompts, 2, 2)
            return max(self._error(p, r) for p, group in zip(prompts, found, strict=True) for r in group)
        finally:
            self.model.train(training)

    @torch.inference_mode()
    def _error(self, prompt: Sequence[int], rollout: Rollout) -> float:
        ids = torch.tensor([[*prompt, *rollout.tokens]], device=self.model.device)
        logp_TV = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        logp_T = logp_TV.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
        return float((logp_T - torch.tensor(rollout.logp)).abs().max())

    # ---- weights and memory ------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """The policy's weights have changed. They are copied when the next responses are sampled."""
        self.stale = True

    def expect(self, longest_prompt: int) -> None:
        """Nothing to do: room for ``longest`` was made at the start."""

    def release(self) -> None:
        """On a GPU keys and values are dropped and the weights go to the CPU; the next call brings them back."""
        if self.can_sleep and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def close(self) -> None:
        """Give back everything. vLLM's groups of processes are global: those of a next engine would go with these."""
        self.llm.llm_engine.engine_core.shutdown()

    def _ready(self) -> None:
        """Awake, with the policy's weights, and without keys and values of others."""
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False
        if not self.stale:
            return
        with torch.no_grad():
            self.llm.collective_rpc(_load, args=(stored_state(self.model),))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the weights before")
        self.stale = False

    # ---- responses ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int = 1,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Rollout]]:
        """See ``Engine``."""
        how = Sampling(max_new_tokens, temperature, top_p, top_k)
        if not prompt_ids or n < 1:
            return [[] for _ in prompt_ids]
        if any(not prompt for prompt in prompt_ids):
            raise ValueError("a prompt is empty: it needs at least one token")
        if (most := max(map(len, prompt_ids)) + max_new_tokens) > self.longest:
            raise ValueError(
                f"a prompt and its response of up to {most} tokens do not fit into rollout.vllm.max_model_len="
                f"{self.longest}"
            )
        self._ready()
        with _unchanged():
            found = self._run([(prompt, self._params(how, s)) for prompt, s in _seeds(seed, prompt_ids, n)], progress)
        flat = [self._rollout(completion, temperature) for completion in found]
        return [flat[i : i + n] for i in range(0, len(flat), n)]

    def _params(self, how: Sampling, seed: int) -> Any:
        kind = sys.modules["vllm.sampling_params"].RequestOutputKind
        return self.vllm.SamplingParams(
            max_tokens=how.max_new_tokens,
            temperature=how.temperature,
            top_p=how.top_p if how.temperature else 1.0,
            top_k=how.top_k if how.temperature else 0,
            seed=seed,
            logprobs=0,  # of the token itself, of no other
            stop_token_ids=self.stops,
            ignore_eos=True,  # end_ids has all of them
            detokenize=False,
            output_kind=kind.FINAL_ONLY,
        )

    def _run(self, requests: list[tuple[Sequence[int], Any]], progress: Callable[[int], None] | None) -> list[Any]:
        """The completions, in order. What interrupts it leaves no request behind."""
        engine = self.llm.llm_engine
        done: dict[str, Any] = {}
        names = [str(i) for i in range(len(requests))]
        try:
            for name, (prompt, params) in zip(names, requests, strict=True):
                engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
            while engine.has_unfinished_requests():
                before = len(done)
                done |= {out.request_id: out.outputs[0] for out in engine.step() if out.finished}
                if progress is not None and len(done) > before:
                    progress(len(done))
        except BaseException:
            engine.abort_request(names)
            while engine.has_unfinished_requests():
                engine.step()
            raise
        return [done[name] for name in names]

    def _rollout(self, completion: Any, temperature: float) -> Rollout:
        tokens = list(completion.token_ids)
        logp = [float(at[token].logprob) for at, token in zip(completion.logprobs, tokens, strict=True)]
        if not all(map(math.isfinite, logp)):
            raise NotFinite("the model's logits are not finite: its weights, or a number on the way, overflowed")
        return Rollout(tokens, logp if temperature else [0.0] * len(tokens), tokens[-1] in self.end_ids)


def _seeds(seed: int, prompts: Sequence[Sequence[int]], n: int) -> Iterator[tuple[Sequence[int], int]]:
    """Each prompt n times, each time with a seed of its own. A prompt that comes again goes on with others."""
    seen: Counter[tuple[int, ...]] = Counter()
    for prompt in prompts:
        name = tuple(prompt)
        for j in range(seen[name], seen[name] + n):
            yield prompt, int(uniforms(seed, prompt, j, 1)[0] * 2**53)
        seen[name] += n


# ---- weights, by the names of the model's files ----------------------------------------------------------------------


def stored_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As ``merged_state``, in the layout of the model's files where transformers holds them otherwise (experts)."""
    conversions: Any = sys.modules.get("transformers.core_model_loading")
    if conversions is None or not any(p.dim() > 2 for p in model.parameters()):
        return merged_state(model)
    return iter(conversions.revert_weight_conversion(model, dict(merged_state(model))).items())


def merged_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by the names they have in the plain model, each once: of tied ones the first.

    A layer with an adapter of PEFT gives the weights it has with the adapter merged into them, computed on the fly, one
    layer at a time.
    """
    new = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    own = frozenset(new)  # not of merged layers: those are gone again when the next comes, and it may have their place
    for name, tensor in _walk(model, "", _tied(model)):
        if id(tensor) not in own or id(tensor) in new:
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
    own = [*module._parameters.items(), *((k, v) for k, v in module._buffers.items() if k not in skipped)]
    yield from ((prefix + name, tensor) for name, tensor in own if tensor is not None)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", tied)


def _plain(module: Any, prefix: str, tied: Tensor | None) -> nn.Module:
    """The module; where PEFT has put something in its place, what it amounts to."""
    layers: Any = sys.modules.get("peft.tuners.tuners_utils")
    copies: Any = sys.modules.get("peft.utils.other")
    if layers is not None and isinstance(module, layers.BaseTunerLayer):
        base, off = module.get_base_layer(), module.disable_adapters or module.merged
    elif copies is not None and isinstance(module, copies.ModulesToSaveWrapper):
        base, off = module.original_module, module.disable_adapters
    else:
        found: nn.Module = module
        return found
    if not off and tied is not None and any(p is tied for p in base.parameters()):
        raise ValueError(
            f"peft.options: {prefix.rstrip('.')} shares its weights with another layer, which would not change with it"
        )
    if not off and isinstance(module, layers.BaseTunerLayer):
        module = copy.deepcopy(module)
        module.merge(adapter_names=module.active_adapters)
        base = module.get_base_layer()
    elif not off:
        base = module.modules_to_save[module.active_adapters[0]]
    plain: nn.Module = base
    return plain


def _load(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Runs in vLLM's worker. On a CPU a layer multiplies with a packed copy of its weights, which a head that is tied
    to the embeddings does not make anew by itself: no weight was loaded by its name."""
    worker.reload_weights(weights_iterator=weights)
    for module in worker.get_model().modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


# ---- vLLM itself -----------------------------------------------------------------------------------------------------


def _import() -> Any:
    """vllm, quiet and within this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise ValueError(f"rollout.engine=vllm: vLLM does not import here: {error}") from error
        raise ValueError("rollout.engine=vllm needs vLLM: pip install 'rpg-rl[vllm]'") from error
    except (ImportError, RuntimeError, OSError) as error:
        raise ValueError(f"rollout.engine=vllm: vLLM does not import here: {_reason(error)}") from error
    return vllm


@contextmanager
def _unchanged() -> Iterator[None]:
    """vLLM uses torch's generator and, on a CPU, forbids to set the number of threads: both as before."""
    set_threads, state = torch.set_num_threads, torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.random.set_rng_state(state)


def _spare(model: nn.Module) -> None:
    """Where vLLM has no code of its own for a model it takes transformers' and changes its classes, those of the
    trainer's model with them: these are to go on as they were."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__call__ is not nn.Module.__call__ and not hasattr(kind, "do_not_compile"):
            setattr(kind, "do_not_compile", True)  # noqa: B010  # an attribute that vLLM looks for


def _reason(error: BaseException) -> str:
    """In one line; of pydantic's the first complaint."""
    if callable(found := getattr(error, "errors", None)) and (complaints := found()):
        return " ".join(str(complaints[0].get("msg", "")).split())
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
