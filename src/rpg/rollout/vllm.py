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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..console import first_line, install
from ..kernels.sample_torch import uniform_table
from ..models.plain_weights import stored_state
from .engine import NotFinite, Rollout, Sampling, in_groups, nothing_to_sample
from .kept import KeptIds, TooManyKept
from .self_check import check_engine

CPU_CACHE = 2**30  # bytes of keys and values on a CPU, where nothing is said of them
GPU_SHARE = 0.4  # of a GPU's memory for vLLM's weights, keys and values: the rest is the trainer's
MOST_KEPT = 1024  # tokens of a kept set that vLLM is asked for
TIED = 16  # and so many more, in case that some are tied with the last
SET_HERE = ("model", "skip_tokenizer_init", "load_format", "logprobs_mode", "generation_config")


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
        options = dict(options or {})
        if taken := sorted(set(options).intersection(SET_HERE)):
            raise ValueError(f"rollout.vllm.{taken[0]} is set by the engine and cannot be given")
        if int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1)) != 1:
            raise ValueError("rollout.vllm: one GPU only; the weights are updated within this process")
        self.name, self.asleep = type(model).__name__, False
        self.vllm = import_vllm()
        self.stale = True  # the weights are not the policy's
        try:
            self.llm = self._start(options, longest, slots)
            _spare(model)
            self.longest = int(self.llm.llm_engine.model_config.max_model_len)
            self.can_sleep = bool(self.llm.llm_engine.model_config.enable_sleep_mode)
            check_engine(model, lambda prompts: self.generate(prompts, 2, 2), min(6, self.longest - 3))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of pydantic, torch and vLLM's own kinds
            raise ValueError(f"vLLM cannot run {self.name}: {_reason(error)}") from error
        self.stale = True  # a checkpoint may be loaded into the policy before the first call

    def _start(self, options: dict[str, Any], longest: int, slots: int) -> Any:
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
            "max_logprobs": MOST_KEPT + TIED,
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
                **usual | options,
            )

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
        min_p: float = 0.0,
        kept: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Rollout]]:
        """See ``Engine``."""
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_p, kept)
        if sampling.gives_kept:
            check_kept(top_k)
        if nothing_to_sample(prompt_ids, n):
            return [[] for _ in prompt_ids]
        if (most := max(map(len, prompt_ids)) + max_new_tokens) > self.longest:
            raise ValueError(
                f"a prompt and its response of up to {most} tokens do not fit into rollout.vllm.max_model_len="
                f"{self.longest}"
            )
        self._ready()
        repeated = [prompt for prompt in prompt_ids for _ in range(n)]
        seeds = (int(x * 2**53) for x in uniform_table(seed, prompt_ids, n, 1)[:, 0].tolist())
        with _unchanged():
            requests = [(prompt, self._sampling_params(sampling, s)) for prompt, s in zip(repeated, seeds, strict=True)]
            completions = self._run(requests, progress)
        return in_groups([self._rollout(completion, sampling) for completion in completions], n)

    def _sampling_params(self, sampling: Sampling, seed: int) -> Any:
        kind = sys.modules["vllm.sampling_params"].RequestOutputKind
        return self.vllm.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.temperature else 1.0,
            top_k=sampling.top_k if sampling.temperature else 0,
            min_p=sampling.min_p if sampling.temperature else 0.0,
            seed=seed,
            logprobs=self._logprobs(sampling),
            flat_logprobs=True,
            stop_token_ids=self.stops,
            ignore_eos=True,  # end_ids has all of them
            detokenize=False,
            output_kind=kind.FINAL_ONLY,
        )

    def _logprobs(self, sampling: Sampling) -> int:
        """How many to ask for: of the token itself alone, or of all that were kept, which may be tied with the last."""
        size = self.model.get_input_embeddings().weight.shape[0]
        return min(sampling.top_k + TIED, size) if sampling.gives_kept else 0

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

    def _rollout(self, completion: Any, sampling: Sampling) -> Rollout:
        tokens, told = list(completion.token_ids), completion.logprobs
        logp = [float(told.logprobs[i]) for i in told.start_indices]  # a position's first is the token's own
        if not all(map(math.isfinite, logp)):
            raise NotFinite
        kept = self._kept(told, self._logprobs(sampling)) if sampling.gives_kept else None
        return Rollout(tokens, logp if sampling.temperature else [0.0] * len(tokens), tokens[-1] in self.end_ids, kept)

    def _kept(self, told: Any, asked: int) -> KeptIds:
        """Processed log-probabilities are −inf outside of the kept set; of the largest that were asked for."""
        ids, inside = np.array(told.token_ids, dtype=np.int32), np.isfinite(told.logprobs)
        spans = [slice(*ends) for ends in zip(told.start_indices, told.end_indices, strict=True)]
        sets = [np.unique(ids[span][inside[span]]) for span in spans]  # the token stands there twice
        largest = max(map(len, sets))
        if largest >= asked < self.model.get_input_embeddings().weight.shape[0]:
            raise TooManyKept(f"vLLM gave {asked}, and more are tied with the last")
        return KeptIds(np.concatenate(sets), np.array([len(some) for some in sets], dtype=np.int32))


def check_kept(top_k: int) -> None:
    """vLLM tells the log-probabilities of so many tokens a state: a set without a bound it cannot tell."""
    if not 0 < top_k <= MOST_KEPT:
        raise ValueError(
            "rollout.engine=vllm tells which tokens were kept only where rollout.top_k bounds them: give "
            f"--rollout.top_k 100 beside top_p or min_p (at most {MOST_KEPT}), or --rollout.engine native"
        )


def _load(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Runs in vLLM's worker. On a CPU a layer multiplies with a packed copy of its weights. A head that is tied to the
    embeddings does not renew its copy by itself: no weight was loaded by its name."""
    worker.reload_weights(weights_iterator=weights)
    for module in worker.get_model().modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


# ---- vLLM itself -----------------------------------------------------------------------------------------------------


def import_vllm() -> Any:
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
        raise ValueError(f"rollout.engine=vllm needs vLLM: {install('rpg-rl[vllm]')}") from error
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
    if callable(errors := getattr(error, "errors", None)) and (complaints := errors()):
        return " ".join(str(complaints[0].get("msg", "")).split())
    return first_line(error)
