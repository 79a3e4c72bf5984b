"""What the native engine holds, what it does when that is too much, and graphs that cannot be captured."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rollout.engines import PROMPTS, engine, flat

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


# ---- on a GPU, as far as a CPU can tell ------------------------------------------------------------------------------


def test_what_the_kernels_cannot_do_is_decoded_step_by_step(llama, monkeypatch):
    expected = engine(llama, 5).generate(PROMPTS, n=2, max_new_tokens=7, seed=5)

    def refuse(*_):
        raise ValueError("query heads must be 1 to 16")

    monkeypatch.setattr("rpg.rollout.graphs.decode_attention", refuse)
    told = []
    run = engine(llama, 5, falls_back=True, warn=told.append)
    assert told == ["decoding step by step, which is slow: query heads must be 1 to 16"] * engine.graphs
    assert run.decoder is None
    found = run.generate(PROMPTS, n=2, max_new_tokens=7, seed=5)
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
