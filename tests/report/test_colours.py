"""A method has one colour, on every page."""

from pathlib import Path

import rpg
from rpg import report
from rpg.report.labels import METHODS, styles
from rpg.report.runs import RunData
from rpg.report.scores import group_by_experiment


def colours(*methods, **variants):
    """label -> what its dot and lines look like, on a page with these methods."""
    runs = [RunData(name, Path(name), config={"algorithm": name, "optim": {"lr": 1}}) for name in methods]
    runs += [
        RunData(f"{name}-{lr}", Path(name), config={"algorithm": name, "optim": {"lr": lr}})
        for name, rates in variants.items()
        for lr in rates
    ]
    experiments = group_by_experiment(runs)
    return {e.label: style for e, style in zip(experiments, styles(experiments), strict=True)}


def test_a_method_has_one_colour_on_every_page():
    assert sorted(METHODS) == sorted(rpg.algorithms()), "a new method goes to the end: the others keep their colours"
    every = colours(*rpg.algorithms())
    assert len(set(every.values())) == len(every), "all of them can be told apart"
    for some in (["dapo", "grpo"], ["grpo", "gspo", "rpg-urkl"], ["ppo", "dapo"], ["skywork-or1", "cispo"]):
        assert colours(*some) == {name: every[name] for name in some}
        assert colours(*reversed(some)) == colours(*some)
    own = colours("mine.py:method", "dapo")["mine.py:method"]
    assert colours("grpo", "mine.py:method", "ppo")["mine.py:method"] == own
    assert max(s.colour for s in every.values()) < 10
    css = Path(report.__file__).with_name("page.css").read_text()
    assert all(f".c{s.colour} " in css and (f".d{s.form} " in css or s.form == 0) for s in every.values())


def test_variants_of_a_method_share_its_colour_beside_others_and_have_their_own_alone():
    beside = colours("grpo", dapo=[1, 2, 3])
    assert len({style.colour for label, style in beside.items() if "dapo" in label}) == 1
    assert len(set(beside.values())) == 4
    assert len({style.colour for style in colours(dapo=[1, 2, 3, 4]).values()}) == 4
    assert len(set(colours(dapo=range(50)).values())) == 50
