"""What the native engine holds, what it does when that is too much, and graphs that cannot be captured."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import tiny
from rollout.engines import PROMPTS, engine, flat, forward_logp
from rpg.kernels import decode
from rpg.kernels.decode import LayerCache
from rpg.rollout import NativeEngine, pages, self_check, slots
from rpg.rollout.pages import from_host, page_bytes, to_host

pytestmark = pytest.mark.usefixtures("graphs")


# ---- memory ----------------------------------------------------------------------------------------------------------


def short_of_memory(run, monkeypatch, most):
    """An engine on a device that has room for ``most`` slots."""
    plain, tried = run._generate, []

    def generate(prompts, n, how, seed, slots, *rest):
        tried.append(slots)
        if min(slots, n * len(prompts)) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(prompts, n, how, seed, slots, *rest)

    monkeypatch.setattr(run, "_generate", generate)
    return tried


def test_out_of_memory_halves_the_slots_and_gives_the_same_responses(llama, monkeypatch):
    expected = engine(llama, 64).generate(PROMPTS, n=4, max_new_tokens=9, seed=5)
    told = []
    run = engine(llama, 64, warn=told.append)
    tried = short_of_memory(run, monkeypatch, most=6)
    found = run.generate(PROMPTS, n=4, max_new_tokens=9, seed=5)
    assert [r.tokens for r in flat(found)] == [r.tokens for r in flat(expected)]
    assert tried == [64, 10, 5]  # of 20 responses
    assert told == [f"out of memory: sampling with {n} slots from here on" for n in (10, 5)]
    run.generate(PROMPTS, n=4, max_new_tokens=9, seed=6)
    assert tried == [64, 10, 5, 5]
    assert len(told) == 2


def test_out_of_memory_halves_the_pages_too(llama, monkeypatch):
    """Down to one slot, for which there are always pages."""
    if not engine.graphs:
        pytest.skip("there are no pages")
    expected = flat(engine(llama, 16, end_ids=NEVER).generate(PROMPTS, n=4, max_new_tokens=40, seed=5))
    run = short_of_pages(llama, 16, 400, end_ids=NEVER)
    short_of_memory(run, monkeypatch, most=1)
    found = flat(run.generate(PROMPTS, n=4, max_new_tokens=40, seed=5))
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert (run.slots, run.decoder.cache_tokens) == (1, 400 // 16)
    assert run.decoder.buffers.pages.count == 4 + 4  # one prompt and one response, of 64 tokens at most


def test_out_of_memory_with_a_single_slot_is_an_error(llama, monkeypatch):
    run = engine(llama, 2)
    short_of_memory(run, monkeypatch, most=0)
    with pytest.raises(torch.OutOfMemoryError):
        run.generate(PROMPTS, max_new_tokens=3)


def test_released_and_used_again(llama):
    run = engine(llama, 4)
    before = run.generate(PROMPTS, n=2, max_new_tokens=7, seed=5)
    run.release()
    assert run.generate(PROMPTS, n=2, max_new_tokens=7, seed=5) == before


def test_buffers_serve_every_call_that_fits(llama):
    """What was captured for them is good as long as they stay."""
    if not engine.graphs:
        pytest.skip("there are none")
    run = engine(llama, 16)
    run.generate(PROMPTS, n=4, max_new_tokens=9, seed=5)
    held = run.decoder.buffers
    run.generate(PROMPTS[:2], n=2, max_new_tokens=5, seed=5)
    run.generate(PROMPTS, n=8, max_new_tokens=64, seed=5)
    assert run.decoder.buffers is held
    run.generate([[3] * 65], n=2, max_new_tokens=5, seed=5)
    assert run.decoder.buffers is not held
    assert all(a >= b for a, b in zip(run.decoder.buffers.sizes, held.sizes, strict=True))
    assert run.timing.steps == 4


def test_room_for_prompts_that_are_expected(llama):
    if not engine.graphs:
        pytest.skip("there is none")
    run = engine(llama, 16)
    run.expect(100)
    run.generate([[3]], n=2, max_new_tokens=5, seed=5)
    held = run.decoder.buffers
    assert held.prompt_room == 128
    run.generate([[3] * 50], n=2, max_new_tokens=5, seed=5)
    assert run.decoder.buffers is held


def test_prompts_of_a_group_are_read_once(llama, monkeypatch):
    """And kept once, however many samples follow and however few slots there are."""
    if not engine.graphs:
        pytest.skip("reads the prompt of a group again where the group is cut by the end of the slots")
    seen = []
    run = engine(llama, 5)
    base, shapes = llama.base_model.forward, lambda **inputs: seen.append(inputs["input_ids"].shape)
    monkeypatch.setattr(llama.base_model, "forward", lambda **inputs: (shapes(**inputs), base(**inputs))[1])
    run.generate([PROMPTS[0], PROMPTS[2]], n=5, max_new_tokens=4, seed=1)
    assert [shape for shape in seen if shape[1] > 1] == [(1, 7), (1, 5)]
    assert run.decoder.buffers.prompts == 2


# ---- pages -----------------------------------------------------------------------------------------------------------


NEVER = [999]  # no such token


def short_of_pages(model, slots, tokens, page=16, **options):
    """An engine with small pages, too few for all slots."""
    run = engine(model, slots, cache_tokens=tokens, **options)
    run.decoder.page = page
    run.release()
    return run


@pytest.mark.parametrize("ends", [NEVER, [1, 7]], ids=["all as long", "of all lengths"])
@pytest.mark.parametrize("tokens", [80, 240, 16 * 84])
def test_responses_that_wait_for_pages_are_the_same(llama, tokens, ends):
    """Set back in the middle, some of them several times, and resumed: the same tokens and log-probabilities."""
    if not engine.graphs:
        pytest.skip("there are no pages")
    expected = flat(engine(llama, 16, end_ids=ends).generate(PROMPTS, n=4, max_new_tokens=50, seed=5))
    run = short_of_pages(llama, 16, tokens, end_ids=ends)
    found = flat(run.generate(PROMPTS, n=4, max_new_tokens=50, seed=5))
    assert [(r.tokens, r.finished) for r in found] == [(r.tokens, r.finished) for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=1e-5)
    pages = run.decoder.buffers.pages
    assert (run.timing.set_back > 0) == (ends is NEVER and tokens < 16 * 84)
    assert sorted(pages.free) == list(range(pages.count))  # each is given back once
    assert pages.prompt_pages == 0
    assert pages.count == max(4 + 2 * 4, tokens // 16)  # a response and two prompts of 64 fit


@pytest.mark.parametrize("pages", [0, 3])
def test_responses_that_the_host_has_no_room_for_begin_again(llama, pages):
    """After their first token, with the same random numbers: the same tokens, kept sets and log-probabilities."""
    if not engine.graphs:
        pytest.skip("there are no pages")
    how = {"n": 4, "max_new_tokens": 50, "seed": 5, "top_p": 0.8, "kept": True}
    expected = flat(engine(llama, 16, end_ids=NEVER).generate(PROMPTS, **how))
    run = short_of_pages(llama, 16, 240, end_ids=NEVER, host_bytes=0)
    run.generate(PROMPTS, n=1, max_new_tokens=2)
    run.decoder.host_bytes = pages * page_bytes(run.decoder.buffers.layers) + 1
    found = flat(run.generate(PROMPTS, **how))
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.kept) == (other.tokens, other.kept)
        assert one.logp == pytest.approx(other.logp, abs=1e-5)
    timing = run.timing
    assert 0 < timing.begun_again <= timing.set_back
    assert (timing.begun_again == timing.set_back) == (pages == 0)


def test_copies_on_the_host_are_of_a_few_pages_each(monkeypatch):
    layer = LayerCache.empty(40, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), True, page=4)
    assert page_bytes([layer, layer]) == 2 * 2 * (2 * 4 * 8 + 2 * 4 * 4)
    monkeypatch.setattr(pages, "AT_ONCE", 16)
    first, nothing, second = to_host([layer], [list(range(20)), [], list(range(20, 35))])
    assert [len(copy) for copy in first] == [16] * 4 + [4] * 4
    assert [len(copy) for copy in second] == [12] * 4 + [3] * 4
    assert nothing == []


def test_kept_sets_of_responses_that_wait(llama):
    if not engine.graphs:
        pytest.skip("there are no pages")
    how = {"n": 4, "max_new_tokens": 40, "seed": 5, "top_p": 0.8, "kept": True}
    run, other = short_of_pages(llama, 16, 240, end_ids=NEVER), engine(llama, 16, end_ids=NEVER)
    for one, two in zip(flat(run.generate(PROMPTS, **how)), flat(other.generate(PROMPTS, **how)), strict=True):
        assert one.kept == two.kept
    assert run.timing.set_back > 0


@pytest.mark.parametrize("at_once", [1, 512])
def test_what_is_set_back_comes_back_bit_for_bit(monkeypatch, at_once):
    """Into other pages; those of others stay as they are."""
    monkeypatch.setattr(pages, "BACK", at_once)
    generator = torch.Generator().manual_seed(0)
    layers = []
    for width, fp8 in ((8, False), (16, True)):
        layer = LayerCache.empty(6, torch.zeros(1, 2, 1, width), torch.zeros(1, 2, 1, width), fp8, page=4)
        page, place = torch.arange(6)[:, None], torch.arange(4)
        layer.put(page, place, *torch.randn(2, 6, 4, 2, width, generator=generator))
        layers.append(layer)
    before = [[part.clone() for part in layer.parts] for layer in layers]
    first, second, nothing = to_host(layers, [[4, 1], [3], []])
    from_host(layers, [[]], [nothing])
    for layer in layers:
        for part in layer.parts:
            part[[4, 1, 3]] = 0
    from_host(layers, [[4], [], [1, 3]], [second, nothing, first])
    for layer, was in zip(layers, before, strict=True):
        for part, old in zip(layer.parts, was, strict=True):
            assert torch.equal(part[[1, 3, 4, 0, 2, 5]], old[[4, 1, 3, 0, 2, 5]])


def test_a_cache_in_8_bits_draws_from_nearly_the_same_policy(llama):
    if not engine.graphs:
        with pytest.raises(
            ValueError,
            match=r"^a cache in 8 bits needs a GPU that has such numbers .*: leave rollout\.cache_dtype away$",
        ):
            NativeEngine(llama, tiny.tokenizer(), graphs=False, cache_dtype=torch.float8_e4m3fn)
        return
    run = engine(llama, 8, cache_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"a cache of torch\.float16 is not known"):
        engine(llama, cache_dtype=torch.float16)
    worst = 0.0
    for prompt, group in zip(PROMPTS, run.generate(PROMPTS, n=3, max_new_tokens=14, seed=3), strict=True):
        for rollout in group:
            off = (forward_logp(llama, prompt, rollout.tokens) - torch.tensor(rollout.logp)).abs()
            assert off[0] < 1e-4  # drawn before anything was rounded
            worst = max(worst, float(off.max()))
    assert 1e-4 < worst < 0.5
    assert run.decoder.buffers.layers[0].keys_CGTD.dtype == torch.float8_e4m3fn


def test_a_response_set_back_in_8_bits_is_the_same(llama):
    if not engine.graphs:
        pytest.skip("there are no pages")
    how = {"n": 4, "max_new_tokens": 40, "seed": 5}
    run = short_of_pages(llama, 16, 240, cache_dtype=torch.float8_e4m3fn, end_ids=NEVER)
    other = engine(llama, 16, cache_dtype=torch.float8_e4m3fn, end_ids=NEVER)
    assert [r.tokens for r in flat(run.generate(PROMPTS, **how))] == [
        r.tokens for r in flat(other.generate(PROMPTS, **how))
    ]
    assert run.timing.set_back > 0


# ---- on a GPU, as far as a CPU can tell ------------------------------------------------------------------------------


def test_what_the_kernels_cannot_do_is_decoded_step_by_step(llama, monkeypatch):
    expected = engine(llama, 5).generate(PROMPTS, n=2, max_new_tokens=7, seed=5)

    def refuse(*_):
        raise ValueError("query heads must be 1 to 16")

    monkeypatch.setattr("rpg.rollout.slots.decode_attention", refuse)
    told = []
    run = engine(llama, 5, falls_back=True, warn=told.append)
    assert told == ["decoding step by step, which is slow: query heads must be 1 to 16"] * engine.graphs
    assert run.decoder is None
    found = run.generate(PROMPTS, n=2, max_new_tokens=7, seed=5)
    assert [r.tokens for r in flat(found)] == [r.tokens for r in flat(expected)]


def noting(monkeypatch, fails=False):
    """``samples`` of every call of attention, where sharing is said to pay whatever the sizes are."""
    noted, own = [], slots.decode_attention

    def decode_attention(*given):
        noted.append(given[-1])
        if fails and given[-1] > 1:
            raise ValueError("out of resource: shared memory")
        return own(*given)

    monkeypatch.setattr(slots, "decode_attention", decode_attention)
    monkeypatch.setattr(decode, "AGAIN_BYTES", 0.0)
    return noted


@pytest.mark.parametrize("n", [1, 3, 4, 8])
def test_prompts_are_shared_where_there_are_samples_of_one(llama, monkeypatch, n):
    if not engine.graphs:
        pytest.skip("its steps are not captured")
    noted = noting(monkeypatch)
    run = engine(llama, 8)
    noted.clear()
    run.generate(PROMPTS, n=n, max_new_tokens=7, seed=5)
    assert set(noted) == {n if n >= 4 else 1}
    monkeypatch.undo()
    noted = noting(monkeypatch)
    monkeypatch.setattr(decode, "AGAIN_BYTES", 20e6)  # more than these tiny prompts
    run.generate(PROMPTS, n=n, max_new_tokens=7, seed=5)
    assert set(noted) == {1}


def test_a_chip_that_cannot_share_prompts_reads_them_for_each_row(llama, monkeypatch):
    if not engine.graphs:
        pytest.skip("its steps are not captured")
    expected = engine(llama, 8).generate(PROMPTS, n=4, max_new_tokens=7, seed=5)
    noted, told = noting(monkeypatch, fails=True), []
    run = engine(llama, 8, warn=told.append)
    found = run.generate(PROMPTS, n=4, max_new_tokens=7, seed=5)
    assert told == ["prompts are read for each row, which is slower: out of resource: shared memory"]
    assert noted.count(4) == 1
    assert [r.tokens for r in flat(found)] == [r.tokens for r in flat(expected)]


class FakeCuda:
    """Graphs of a model that asks the host on the way: torch raises at the capture's end and stays on its stream."""

    def __init__(self, monkeypatch, error=RuntimeError):
        self.stream, self.recording, self.error = SimpleNamespace(device_index=3), [], error
        self.own, self.drawing = self.stream, "as ever"
        generator = SimpleNamespace(clone_state=lambda: "as ever", graphsafe_set_state=self.draw)
        monkeypatch.setattr(torch.cuda, "default_generators", {3: generator})
        for name in ("graph", "current_stream", "set_stream", "graph_pool_handle", "CUDAGraph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, getattr(self, name), raising=False)

    @contextmanager
    def graph(self, graph, pool):
        self.stream = SimpleNamespace(device_index=3)
        self.recording.append(pool)
        self.drawing = "in a graph only"
        yield
        raise self.error("CUDA error: operation failed due to a previous error during capture")

    def draw(self, state):
        self.drawing = state

    def current_stream(self):
        return self.stream

    def set_stream(self, stream):
        self.stream = stream

    def graph_pool_handle(self):
        return 0, 7

    def CUDAGraph(self):
        return object()

    def synchronize(self):
        assert self.stream is self.own

    def _cuda_endAllocateToPool(self, device, pool):
        assert device == 3
        self.recording.remove(pool)

    def _cuda_releasePool(self, device, pool):
        assert (device, pool) == (3, (0, 7))


def test_a_capture_that_fails_leaves_nothing_behind(llama, monkeypatch):
    if not engine.graphs:
        pytest.skip("there are none")
    told = []
    run = engine(llama, 5, warn=told.append)
    expected = run.generate(PROMPTS, n=2, max_new_tokens=7, seed=5)
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(run.decoder, "_decode", unless_recording(cuda, run.decoder._decode))
    run.decoder.capture = True
    for _ in range(2):
        assert run.generate(PROMPTS, n=2, max_new_tokens=7, seed=5) == expected
    reason = "CUDA error: operation failed due to a previous error during capture"
    assert told == [f"decoding without CUDA graphs, which is slow: {reason}"]
    assert (cuda.stream, cuda.recording, cuda.drawing) == (cuda.own, [], "as ever")


def test_a_capture_that_runs_out_of_memory_leaves_nothing_behind(llama, monkeypatch):
    if not engine.graphs:
        pytest.skip("there are none")
    run = engine(llama, 5)
    cuda = FakeCuda(monkeypatch, torch.OutOfMemoryError)
    monkeypatch.setattr(run.decoder, "_decode", unless_recording(cuda, run.decoder._decode))
    run.decoder.capture = True
    with pytest.raises(torch.OutOfMemoryError):  # with a single slot, too
        run.generate(PROMPTS, n=2, max_new_tokens=7, seed=5)
    assert run.slots == 1
    assert (cuda.stream, cuda.recording, cuda.drawing) == (cuda.own, [], "as ever")


def unless_recording(cuda, decode):
    """What is captured is not done."""
    return lambda *step: None if cuda.recording else decode(*step)


def test_the_models_device_is_the_current_one(llama, monkeypatch):
    """Triton launches on the current device, and graphs are captured on a stream of it."""
    current = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    run, seen = engine(llama, 4), []
    parameters = list(map(id, llama.parameters()))
    run.generate(PROMPTS, max_new_tokens=3, progress=lambda _: seen.append(id(current[-1])) if current else None)
    assert seen
    assert set(seen) <= set(parameters)


def test_a_device_on_which_8_bits_are_read_wrong_is_refused(llama, monkeypatch):
    """What the check sees is in kernels/decode_checks.py; here it says that something is wrong."""
    if not engine.graphs:
        pytest.skip("there is no such cache")
    seen = []
    monkeypatch.setattr(self_check, "has_triton", lambda x: True)
    monkeypatch.setattr(self_check, "error_in_8_bits", lambda *about: (seen.append(about), 0.001)[1])
    engine(llama, 8, cache_dtype=torch.float8_e4m3fn)
    assert seen == [(llama.config.head_dim, torch.float32, torch.device("cpu"))]
    for error in (0.6, float("inf"), float("nan")):
        monkeypatch.setattr(self_check, "error_in_8_bits", lambda *about, error=error: error)
        with pytest.raises(ValueError, match=rf"cannot run LlamaForCausalLM: attention .* 8 bits is wrong by {error}"):
            engine(llama, 8, cache_dtype=torch.float8_e4m3fn)
        engine(llama, 8)
