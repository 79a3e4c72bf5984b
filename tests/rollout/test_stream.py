"""Responses under way when decoding stops, that go on later: the same tokens, from whichever weights there are."""

from collections import deque

import pytest
import torch

import tiny
from rollout.engines import PROMPTS, engine, forward_logp
from rpg.kernels.step import DEAD, LENGTH
from rpg.rollout import Sampling, stream
from rpg.rollout.flight import Partial, Underway

pytestmark = pytest.mark.usefixtures("graphs")
N = 3


def begin(prompts=PROMPTS, n=N):
    return [Underway.begin(i, prompt, 100 + i, n) for i, prompt in enumerate(prompts)]


def decode(run, groups, feed, tokens=12, **options):
    return run.decode(groups, len(groups[0].parts) if groups else N, Sampling(tokens), feed, **options)


def whole(run, prompts=PROMPTS, n=N, tokens=12):
    return [run.generate([prompt], n, tokens, seed=100 + i)[0] for i, prompt in enumerate(prompts)]


def test_streamed_responses_are_those_of_generate(llama):
    """Few slots, groups given one by one as others end, in the order in which they end."""
    run = engine(llama, slots=4)
    queue, over = deque(begin()), []

    def feed(done, under_way):
        over.extend(done)
        return [queue.popleft() for _ in range(min(len(queue), 2 - under_way))]

    assert decode(run, [], feed) == []
    assert 0.5 < run.busy <= 1
    assert sorted(group.number for group in over) == list(range(len(PROMPTS)))
    responses = whole(run)
    for group in over:
        expected = responses[group.number]
        assert [part.tokens for part in group.parts] == [rollout.tokens for rollout in expected]
        assert [rollout.finished for rollout in group.rollouts()] == [rollout.finished for rollout in expected]
        for part, rollout in zip(group.parts, expected, strict=True):
            assert part.logp == pytest.approx(rollout.logp, abs=1e-5)
            assert part.versions == [0] * len(part.tokens)


@pytest.mark.parametrize("keep", [False, True], ids=["computed anew", "kept"])
@pytest.mark.parametrize("slots", [4, 64])
def test_stopped_again_and_again_it_gives_the_same(llama, keep, slots):
    """With the weights as they were nothing changes, even when another engine goes on, or somebody uses this one."""
    run, groups, over, version = engine(llama, slots=slots), begin(), [], 0
    while groups:
        asked = []

        def feed(done, under_way, asked=asked):
            asked.append(under_way)
            over.extend(done)
            return None if len(asked) > 1 else []

        groups = decode(run, groups, feed, tokens=40, version=version, keep_cache=keep)
        if version % 2:
            run.generate([[9, 9, 3]], 5, 7, seed=1)
        elif version == 2:
            run = engine(llama, slots=slots)
        version += 1
    assert version > 2
    responses = whole(run, tokens=40)
    for group in over:
        for part, rollout in zip(group.parts, responses[group.number], strict=True):
            assert part.tokens == rollout.tokens
            assert part.logp == pytest.approx(rollout.logp, abs=1e-4)
            assert part.versions == sorted(part.versions)
    assert any(len(set(part.versions)) > 1 for group in over for part in group.parts)


def test_tokens_are_of_the_weights_that_drew_them():
    """Computed anew, a response's second half is drawn as if the new weights had written its first half too."""
    old, new = tiny.make("llama-tied"), tiny.make("llama-tied", spread=0.3)
    run = engine(old, slots=64)
    first = decode(run, begin(), lambda done, under_way: None if done else [], tokens=40, version=3)
    assert first
    old.load_state_dict(new.state_dict())
    over = []
    assert decode(run, first, lambda done, under_way: over.extend(done) or [], tokens=40, version=4) == []
    before = tiny.make("llama-tied")
    mixed = 0
    for group in over:
        for part in group.parts:
            cut = part.versions.count(3)
            by_old = forward_logp(before, group.prompt, part.tokens)
            by_new = forward_logp(new, group.prompt, part.tokens)
            expected = torch.cat([by_old[:cut], by_new[cut:]])
            assert torch.allclose(torch.tensor(part.logp), expected, atol=1e-4)
            mixed += 0 < cut < len(part.tokens)
    assert mixed > 3


def test_kept_keys_are_those_of_the_old_weights():
    old, new = tiny.make("llama-tied"), tiny.make("llama-tied", spread=0.3)
    run = engine(old, slots=64)
    first = decode(run, begin(), lambda done, under_way: None if done else [], tokens=40, keep_cache=True)
    run.copy_cache()
    anew = [Underway(g.number, g.prompt, g.seed, [Partial(**vars(p) | {"cache": []}) for p in g.parts]) for g in first]
    held = [Underway(g.number, g.prompt, g.seed, [Partial(**vars(p)) for p in g.parts], g.cache) for g in first]
    old.load_state_dict(new.state_dict())
    found = []
    for groups in (anew, held):
        over = []
        decode(run, groups, lambda done, under_way, over=over: over.extend(done) or [], tokens=40)
        found.append({group.number: group.parts for group in over})
    assert any(a.logp != b.logp for i in found[0] for a, b in zip(found[0][i], found[1][i], strict=True))


@pytest.mark.parametrize("slots", [4, 64])
def test_kept_keys_stay_where_they_are(llama, monkeypatch, slots):
    """Step by step, in place and by way of the host: the same tokens, and groups end in the same order."""
    copied, plain = [], stream.to_host
    monkeypatch.setattr(stream, "to_host", lambda *args: copied.append(1) or plain(*args))
    ends = []
    for by_host in (False, True):
        run, groups, over, version, asked = engine(llama, slots=slots), begin(), [], 0, []

        def feed(done, under_way, over=over, asked=asked):
            asked.append(under_way)
            over.extend(done)
            return None if len(asked) % 2 == 0 else []

        while groups:
            groups = decode(run, groups, feed, tokens=40, version=version, keep_cache=True)
            if by_host:
                run.copy_cache()
                run.stopped = None
            version += 1
        assert version > 2
        assert bool(copied) == (by_host and run.decoder is not None)
        ends.append([(group.number, [(part.tokens, part.versions) for part in group.parts]) for group in over])
    assert ends[0] == ends[1]


def test_a_prompt_longer_than_expected(llama):
    run = engine(llama, slots=4)
    more = [[Underway.begin(1, [7] * 70, 8, N)]]
    over = []

    def feed(done, under_way):
        over.extend(done)
        return more.pop() if more else []

    decode(run, [Underway.begin(0, [5, 6], 7, N)], feed)
    assert sorted(group.number for group in over) == [0, 1]
    assert over[-1].parts[0].tokens == run.generate([over[-1].prompt], N, 12, seed=over[-1].seed)[0][0].tokens


def test_out_of_memory_goes_on_with_half_the_slots(llama, monkeypatch):
    told = []
    run = engine(llama, slots=16, warn=told.append)
    plain = run._stream

    def stream(*args):
        made, steps = plain(*args), []
        advance = made._advance

        def tight():
            steps.append(run.slots)
            if run.slots > 4 and len(steps) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            advance()

        monkeypatch.setattr(made, "_advance", tight)
        return made

    monkeypatch.setattr(run, "_stream", stream)
    over = []
    assert decode(run, begin(), lambda done, under_way: over.extend(done) or [], tokens=40) == []
    assert told == [f"out of memory: sampling with {n} slots from here on" for n in (8, 4)]
    responses = whole(run, tokens=40)
    for group in over:
        assert [p.tokens for p in group.parts] == [r.tokens for r in responses[group.number]]


@pytest.mark.parametrize("where", ["made", "given"])
def test_out_of_memory_before_anything_is_decoded_loses_nothing(llama, monkeypatch, where):
    """Neither where the buffers do not fit, nor where the tables of groups that have just been given do not."""
    told, left = [], [2]
    run = engine(llama, slots=16, warn=told.append)
    plain = run._stream

    def tight():
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    def stream_(*args):
        if where == "made":
            tight()
        made = plain(*args)
        if where == "given":
            table = stream.uniform_table
            monkeypatch.setattr(stream, "uniform_table", lambda *args: tight() or table(*args))
        return made

    monkeypatch.setattr(run, "_stream", stream_)
    over = []
    assert decode(run, begin(), lambda done, under_way: over.extend(done) or []) == []
    assert len(told) == 2
    assert sorted(group.number for group in over) == list(range(len(PROMPTS)))


def test_responses_of_any_lengths_go_on_beside_each_other():
    """One is at its end when the others still have far to go, on the last page there is for it."""
    model = tiny.make("llama-tied", max_position_embeddings=256)
    run, over = engine(model, slots=8, end_ids=[39]), []
    (expected,) = run.generate([[5, 6, 7]], 2, 64, seed=3)
    assert len(expected[0].tokens) > 61
    group = Underway.begin(0, [5, 6, 7], 3, 2)
    for part, rollout, size in zip(group.parts, expected, (61, 5), strict=True):
        part.tokens, part.logp, part.versions = rollout.tokens[:size], rollout.logp[:size], [0] * size
    assert decode(run, [group], lambda done, under_way: over.extend(done) or [], tokens=64) == []
    assert [part.tokens for part in over[0].parts] == [rollout.tokens for rollout in expected]


def test_some_keys_are_kept_and_some_are_not(llama):
    """After memory ran out, those that found no slot again come without."""
    run, over = engine(llama, slots=64), []
    groups = decode(run, begin(), lambda done, under_way: None if done else [], tokens=40, keep_cache=True)
    assert len(groups) > 1
    for part in groups[-1].parts:
        part.cache = []
    groups[-1].cache = []
    assert decode(run, groups, lambda done, under_way: over.extend(done) or [], tokens=40, keep_cache=True) == []
    responses = whole(run, tokens=40)
    for group in over:
        assert [p.tokens for p in group.parts] == [r.tokens for r in responses[group.number]]


def test_out_of_memory_while_results_are_read_gives_no_tokens_beyond_an_end(llama, monkeypatch):
    """Rows that have ended on the device are not yet known to have."""
    run, over, hits = engine(llama, slots=16), [], []
    plain = run._stream

    def stream_(*args):
        made = plain(*args)
        look = getattr(made, "_look", None)

        def tight():
            if not hits and min(made.buffers.state_5S[LENGTH, : len(made.live)].tolist()) == DEAD and made.steps:
                hits.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory")
            look()

        if look is not None:
            monkeypatch.setattr(made, "_look", tight)
        return made

    monkeypatch.setattr(run, "_stream", stream_)
    decode(run, begin(), lambda done, under_way: over.extend(done) or [], tokens=40)
    assert len(hits) == engine.graphs
    responses = whole(run, tokens=40)
    for group in over:
        assert [p.tokens for p in group.parts] == [r.tokens for r in responses[group.number]]
        assert [p.ended for p in group.parts] == [r.finished for r in responses[group.number]]
