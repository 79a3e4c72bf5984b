"""The kernels that frame a decoding step against their torch counterparts; run by Triton's interpreter."""

import torch

from rpg.kernels import step

ROWS, SLOTS, ROOM = 300, 310, 9  # more rows than a block has lanes


def books(seed):
    g = torch.Generator().manual_seed(seed)
    state = torch.zeros(5, 320, dtype=torch.int32)[:, :ROWS]  # a view, as in a step with fewer rows than slots
    state[step.PROMPT_LENGTH] = torch.randint(1, 50, (ROWS,), generator=g)
    state[step.SLOT] = torch.randperm(SLOTS, generator=g)[:ROWS]
    state[step.LENGTH] = torch.randint(-2, 7, (ROWS,), generator=g)
    state[step.TOKEN] = torch.randint(0, 99, (ROWS,), generator=g)
    return state, torch.rand(SLOTS, ROOM, dtype=torch.float64, generator=g)


def torch_only(function, *args):
    before, step.has_triton = step.has_triton, lambda x: False
    try:
        return function(*args)
    finally:
        step.has_triton = before


def check_begin_step():
    state, uniform = books(0)
    found, expected = step.begin_step(state, uniform), torch_only(step.begin_step, state, uniform)
    alive = state[step.LENGTH] >= 0
    assert alive.any()
    assert not alive.all()
    for name, a, b in zip(("ids", "position", "uniform"), found, expected, strict=True):
        assert torch.equal(a[alive], b[alive]), name
    by_hand = uniform[state[step.SLOT, alive].long(), state[step.LENGTH, alive].long() + 1]
    assert torch.equal(found[2][alive], by_hand)
    assert torch.equal(found[0][alive, 0], state[step.TOKEN, alive].long())
    assert torch.equal(found[1][alive, 0], (state[step.PROMPT_LENGTH] + state[step.LENGTH])[alive].long())


def check_end_step():
    g = torch.Generator().manual_seed(1)
    token, logp = torch.randint(0, 99, (ROWS,), generator=g), torch.randn(ROWS, generator=g)
    results = []
    for run in (lambda f, *args: f(*args), torch_only):
        state, _ = books(0)
        tables = torch.full((SLOTS, ROOM), -7, dtype=torch.int32), torch.full((SLOTS, ROOM), 7.0)
        ends = torch.full((2, SLOTS), -9, dtype=torch.int32)
        run(
            step.end_step, token, logp, state, *tables, ends[0], ends[1],
            torch.tensor([6], dtype=torch.int32), torch.tensor([3, 40, 41, -1]),
        )  # fmt: skip
        results.append((state, *tables, ends))
    for name, a, b in zip(("state", "tokens", "logp", "ends"), *results, strict=True):
        assert torch.equal(a, b), name
    before, (after, tokens, _, (count, ended)) = books(0)[0], results[0]
    for row in range(ROWS):  # one by one, by hand
        length, slot, drawn = int(before[step.LENGTH, row]), int(before[step.SLOT, row]), int(token[row])
        if length == step.DEAD:
            assert after[step.LENGTH, row] == step.DEAD
            assert (tokens[slot] == -7).all()
            continue
        assert tokens[slot, length + 1] == drawn == after[step.TOKEN, row]
        over = drawn in (3, 40, 41) or length + 2 >= 6
        assert after[step.LENGTH, row] == (step.DEAD if over else length + 1)
        assert count[slot] == (length + 2 if over else -9)
        assert ended[slot] == (int(drawn in (3, 40, 41)) if over else -9)
