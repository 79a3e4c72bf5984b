"""What sampling that runs ahead asks of the host and of the device besides decoding steps: counted, not timed.

By the GPU's way of steps, which cost nothing here: a row ends by the number that would decide its token.
"""

from types import SimpleNamespace

import pytest
import torch

import tiny
from rpg.kernels.step import DEAD, LENGTH, SLOT, TOKEN
from rpg.models.policy import Policy
from rpg.rollout import NativeEngine
from rpg.rollout.stream import GraphStream
from rpg.run.config import Config, RolloutConfig
from rpg.tasks import Problem, Scores
from rpg.training.progress import SamplingPosition
from rpg.training.samples.collect import Sampler
from rpg.training.samples.stream import StreamCollector
from rpg.training.setup import method_of

SLOTS, PROMPTS, SAMPLES, TOKENS, END, STEPS = 256, 16, 8, 320, 1, 8
HAZARD = 1 / 180  # of an end: with the limit responses have 150 tokens on average


class CountedSteps:
    """In place of the decoder's: counted, and what a row draws is an end or no end."""

    def __init__(self, decoder, monkeypatch):
        self.decoder, self.steps, self.rows, self.passes, self.prompts = decoder, 0, 0, 0, 0
        monkeypatch.setattr(decoder, "step", self.step)
        monkeypatch.setattr(decoder, "read", self.read)

    def read(self, prompts, rows):
        self.passes, self.prompts = self.passes + 1, self.prompts + len(prompts)
        logits = torch.zeros(len(prompts), tiny.VOCABULARY)
        logits[:, 5] = 50
        return logits

    def step(self, rows, *_):
        b = self.decoder.buffers
        state = b.state_5S[:, :rows]
        live = state[LENGTH] > DEAD
        slot, new = state[SLOT, live].long(), state[LENGTH, live].long() + 1
        ends = b.uniform_SR[slot, new] < HAZARD
        token, over = torch.where(ends, END, 7).int(), ends | (new + 1 >= TOKENS)
        b.tokens_SR[slot, new], b.logp_SR[slot, new] = token, -0.5
        b.count_S[slot[over]], b.ended_S[slot[over]] = (new[over] + 1).int(), ends[over].int()
        state[LENGTH, live], state[TOKEN, live] = torch.where(over, DEAD, new).int(), token
        self.steps, self.rows = self.steps + 1, self.rows + int(live.count_nonzero())


def scored(items):
    """Half of the problems have right and wrong responses."""
    solved = [int(answer) < 2 if int(answer) % 4 in (0, 1) else len(text) % 2 == 1 for text, answer, _ in items]
    return Scores([float(s) for s in solved], {}, [], solved)


@pytest.fixture(params=["dapo"])
def run(request, monkeypatch):
    model, tokenizer = tiny.make("llama-tied", max_position_embeddings=512), tiny.tokenizer()
    engine = NativeEngine(model, tokenizer, SLOTS, graphs=True, end_ids=[END])
    engine.expect(8)
    settings = RolloutConfig(prompts=PROMPTS, samples=SAMPLES, max_new_tokens=TOKENS, slots=SLOTS, ahead=1.0)
    config = Config(algorithm=request.param, rollout=settings)
    problems = [Problem(f"w{2 + i % 30} w{2 + i // 30} w{3 + i % 7}", str(i % 4)) for i in range(900)]
    sampler = Sampler(Policy(model, tokenizer), engine, SimpleNamespace(score=scored), config)
    collector = StreamCollector(
        config, method_of(config), sampler, SimpleNamespace(train=problems), SamplingPosition(keep_rate=0.5)
    )
    yield SimpleNamespace(collector=collector, counted=CountedSteps(engine.decoder, monkeypatch))
    collector.close()


def test_slots_are_full_and_prompts_are_read_in_few_passes(run):
    collector, counted = run.collector, run.counted
    collector.collect(1)  # fills the slots
    counted.steps = counted.rows = counted.passes = counted.prompts = 0
    found = [collector.collect(step) for step in range(2, 2 + STEPS)]
    responses = [r for experience in found for group in experience.sampled for r in group.responses]
    tokens = sum(len(r.rollout.tokens) for r in responses)
    assert 0.8 < tokens / len(responses) / 150 < 1.2  # what is counted is what was meant
    assert counted.rows / counted.steps / SLOTS > 0.75  # 0.83; 0.32 where what is ready takes the place of what goes on
    assert counted.steps < 1.4 * tokens / SLOTS
    assert counted.passes <= 0.03 * counted.steps  # 0.020; 0.038 in lots of an eighth of the slots
    assert counted.prompts / counted.passes > 6.5  # 8.6; 3.9 where groups are read as they come, 5 in eighths
    for experience in found:
        assert len(experience.groups) == PROMPTS
        assert experience.more["groups/ready"] < PROMPTS
    assert max(experience.more["groups/under_way"] for experience in found) <= 2 * PROMPTS * 4


@pytest.mark.parametrize("run", ["grpo"], indirect=True)
def test_where_slots_are_left_over_prompts_are_not_read_as_they_come(run):
    """Without dynamic sampling so few groups are under way that slots are always free."""
    for step in range(1, 2 + STEPS):
        run.collector.collect(step)
    assert run.counted.rows / run.counted.steps / SLOTS < 0.6
    assert run.counted.prompts / run.counted.passes > 5  # 7.3; 2.6 where they are


def test_nothing_waits_for_steps_that_have_just_begun(run, monkeypatch):
    """Between their beginning and the look at them nothing is asked of the device, and most of what the host has to do
    is done."""
    running, asked, looks, starts, fed = [], [], [], [], []
    for name in ("tolist", "item", "cpu", "__bool__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda x, *args, plain=plain, name=name: (asked.append(name) if running else None, plain(x, *args))[1],
        )
    start, look, feed = GraphStream._start_steps, GraphStream._look, StreamCollector.begin
    monkeypatch.setattr(GraphStream, "_start_steps", lambda s: (start(s), starts.append(1), running.append(1)))
    monkeypatch.setattr(GraphStream, "_look", lambda s: (running.clear(), looks.append(1), look(s)))
    monkeypatch.setattr(StreamCollector, "begin", lambda s, n: (fed.append(bool(running)), feed(s, n))[1])
    for step in range(1, 5):
        run.collector.collect(step)
    assert asked == []
    assert len(looks) <= len(starts) + 1  # one look for all that has happened, and one for the very first tokens
    assert 7 < run.counted.steps / len(starts) <= 8
    assert fed.count(False) == 1  # the first


@pytest.mark.parametrize("cache", ["kept", "recomputed"])
def test_from_a_checkpoint_it_goes_on_as_it_would_have_in_place(cache):
    """By the GPU's way of steps: also with groups that ended in the steps after the last word on whether to stop."""
    model, tokenizer, carried = tiny.make("llama-tied", max_position_embeddings=256), tiny.tokenizer(), []
    problems = [Problem(f"w{2 + i % 30} w{2 + i // 30}", str(i % 4)) for i in range(900)]

    def made():
        engine = NativeEngine(model, tokenizer, 24, graphs=True, end_ids=[7, 39])
        settings = RolloutConfig(prompts=4, samples=4, max_new_tokens=60, slots=24, ahead=1.0, cache=cache)
        config = Config(algorithm="dapo", rollout=settings)
        sampler = Sampler(Policy(model, tokenizer), engine, SimpleNamespace(score=scored), config)
        task, position = SimpleNamespace(train=problems), SamplingPosition(keep_rate=0.5)
        return StreamCollector(config, method_of(config), sampler, task, position)

    found = []
    for by_checkpoint in (False, True):
        collector, steps = made(), []
        for step in range(1, 9):
            groups = collector.collect(step).groups
            steps.append([(g.number, [(r.rollout.tokens, r.rollout.versions) for r in g.responses]) for g in groups])
            carried.append(any(group.over for group in collector.under_way))
            values, tensors = collector.state()
            if by_checkpoint:
                position = collector.position
                collector.close()
                collector = made()
                collector.position = position
                collector.load(values, tensors)
        collector.close()
        found.append(steps)
    assert found[0] == found[1]
    assert any(carried)
    assert any(len(set(versions)) > 1 for step in found[0] for _, group in step for _, versions in group)
