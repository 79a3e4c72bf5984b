"""The same batch through `rpg train` and through verl's engine with the plugin: the same loss, the same gradients."""

import pytest

import rpg
from engine_verl.verl_engine import REFUSED, Job, needs_verl, sharing
from integrations.equivalence import Case, preset_case, same, through_rpg_train

pytestmark = needs_verl

CASES = [preset_case(name) for name in rpg.algorithms() if name not in REFUSED]
CASES += [
    Case("rpg-reinforce-urkl", {"beta": 0.1, "high": 0.1}),
    Case("rpg-reinforce-urkl", {"mismatch": "tis"}),
    Case("gspo", {"mismatch": "mis"}),
    Case("rpg-reinforce-urkl", {"mismatch": "exact"}),
    Case("grpo", {"mismatch": "exact"}),
    Case("rpg-reinforce-urkl", old="sampler"),
    Case("grpo", old="sampler"),
    Case("rpg-reinforce-rkl", {"beta": 0.1}, reference="frozen"),
    Case("rpg-ufkl", {"beta": 0.1}, reference="every"),
    Case("dr-grpo", {"constant": 7.0}),
    Case("rloo", {"reduction": "token-mean"}),
    Case("rloo", {"advantage": {"beta": 0.3}}),
    Case("topr", {"advantage": {"constant": 0.25}}),
]
SHAPES = [(1, 1), (1, 4), (2, 4)]  # processes, micro-batches of each


def label(case):
    options = [str(value) if isinstance(value, dict) else name for name, value in case.options.items()]
    return "-".join([case.name, *options, *({case.reference, case.old} - {"auto", "trainer"})])


@pytest.fixture(scope="module")
def through_verl(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("verl"), CASES, SHAPES)
    sharing(CASES)
    return job.results()


@pytest.mark.parametrize("i", range(len(CASES)), ids=map(label, CASES))
def test_verl_and_rpg_train_agree(through_verl, i):
    expected = through_rpg_train(CASES[i])
    for ranks, accumulation in SHAPES:
        same(through_verl[i, ranks, accumulation][:2], expected)


def test_metrics_are_the_mini_batchs_however_it_was_cut(through_verl):
    i = next(i for i, case in enumerate(CASES) if case.name == "grpo")
    whole = through_verl[i, 1, 1][2]
    for name in ("kl/old", "kl/ref", "clip/high", "ratio/max", "entropy_sampled"):
        for ranks, accumulation in SHAPES:
            assert through_verl[i, ranks, accumulation][2][f"actor/rpg/{name}"] == pytest.approx(
                whole[f"actor/rpg/{name}"], rel=1e-5
            ), name
    assert whole["actor/rpg/kl/ref"] > 0
