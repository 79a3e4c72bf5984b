"""Merging: the formulas in float64, models on disk tensor by tensor, and what is refused."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rpg
import tiny
from rpg import cli
from rpg.models import merge as merging
from rpg.models.merge import Source, arc, linear, merge, spherical
from rpg.models.policy import Policy
from rpg.run import checkpoint
from rpg.run.config import PeftConfig

KEYS = ("model.embed_tokens.weight", "model.layers.0.a", "model.layers.0.b", "model.layers.1.a", "model.norm.weight")


def slerp(x, y, share):
    """The definition, for two vectors."""
    angle = torch.acos((x @ y / (x.norm() * y.norm())).clamp(-1, 1))
    return (torch.sin((1 - share) * angle) * x + torch.sin(share * angle) * y) / torch.sin(angle)


def vectors(m, n=7, seed=0):
    return torch.randn(m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made(folder, tensors, tied=False, files=1):
    """A folder that looks like a model's, in one file or several."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    (folder / "tokenizer.json").write_text("{}")
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return Source(folder.name, folder)
    placed = {name: f"part-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in tensors if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return Source(folder.name, folder)


def weights_like(seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return {key: torch.randn(3, 4, dtype=torch.float64, generator=g).to(dtype) for key in KEYS}


# ---- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_two_vectors_are_the_closed_form(share):
    x_2N = vectors(2)
    c_2 = spherical(x_2N @ x_2N.T, [1 - share, share])
    assert torch.allclose(c_2 @ x_2N, slerp(*x_2N, share), rtol=0, atol=1e-14)


def test_more_are_joined_one_after_the_other():
    x_4N, weights = vectors(4), [1.0, 2.0, 0.5, 1.5]
    expected = x_4N[0]
    for m, so_far in ((1, 3.0), (2, 3.5), (3, 5.0)):
        expected = slerp(expected, x_4N[m], weights[m] / so_far)
    assert torch.allclose(spherical(x_4N @ x_4N.T, weights) @ x_4N, expected, rtol=0, atol=1e-13)
    equal = [spherical(x_4N @ x_4N.T, [w] * 4) for w in (1.0, 7.0)]
    assert torch.allclose(*equal, rtol=0, atol=1e-15)


def test_equal_opposite_and_zero_vectors():
    x = vectors(1)[0]
    for other, share, expected in ((x, 0.3, x), (-x, 0.25, x / 2), (-x, 0.5, 0 * x), (0 * x, 0.25, 0.75 * x)):
        both = torch.stack([x, other])
        assert torch.allclose(torch.tensor(arc(both @ both.T, share)).double() @ both, expected, atol=1e-12)
    near = torch.stack([x, x + 1e-5 * vectors(1, seed=1)[0]])  # where the sine is small and the line is not taken
    assert torch.allclose(spherical(near @ near.T, [1, 1]) @ near, near.mean(0), rtol=0, atol=1e-9)


def test_on_the_sphere_lengths_stay_and_on_a_line_they_shrink():
    x_2N = torch.nn.functional.normalize(vectors(2), dim=-1)
    gram = x_2N @ x_2N.T
    assert float((spherical(gram, [1, 1]) @ x_2N).norm()) == pytest.approx(1, abs=1e-14)
    assert torch.equal(linear(gram, [1, 3]), torch.tensor([0.25, 0.75]).double())
    assert float((linear(gram, [1, 1]) @ x_2N).norm()) == pytest.approx(math.sqrt((1 + float(gram[0, 1])) / 2))


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["layer", "tensor", "model"])
@pytest.mark.parametrize("method", ["slerp", "linear"])
def test_a_folder_is_the_formula(method, per, tmp_path, monkeypatch):
    """In pieces, from several files, into several files."""
    monkeypatch.setattr(merging, "CHUNK", 5)
    monkeypatch.setattr(merging, "SHARD", 250)
    start, *others = (weights_like(seed) for seed in (0, 1, 2, 3))
    sources = [made(tmp_path / f"m{i}", tensors, files=1 + i) for i, tensors in enumerate(others)]
    out = tmp_path / "out"
    out.mkdir()
    told = merge(sources, made(tmp_path / "init", start), out, weights=[1, 2, 1], method=method, towards=0.3, per=per)
    groups = {
        "layer": [KEYS[:1], KEYS[1:3], KEYS[3:4], KEYS[4:]],
        "tensor": [(key,) for key in KEYS],
        "model": [KEYS],
    }[per]
    written = Source("out", out)
    assert len(set(written.files.values())) == 3
    squared = 0.0
    for keys in groups:
        d1, d2, d3 = (torch.cat([(other[k] - start[k]).flatten() for k in keys]) for other in others)
        expected = slerp(slerp(d1, d2, 2 / 3), d3, 1 / 4) if method == "slerp" else (d1 + 2 * d2 + d3) / 4
        squared += float(expected @ expected)
        init = torch.cat([start[k].flatten() for k in keys])
        found = torch.cat([written.tensor(k).flatten() for k in keys])
        assert torch.allclose(found, init + 0.3 * expected, rtol=0, atol=1e-13)
    deltas = torch.stack([torch.cat([(other[k] - start[k]).flatten() for k in KEYS]) for other in others])
    assert told.norms == pytest.approx(deltas.norm(dim=-1).tolist())
    cosine = torch.nn.functional.cosine_similarity(deltas[:, None], deltas[None], dim=-1)
    assert torch.allclose(torch.tensor(told.cosines).double(), cosine)
    assert (told.norm, told.layers) == (pytest.approx(math.sqrt(squared)), len(groups))
    assert told.initial == pytest.approx(torch.cat([x.flatten() for x in start.values()]).norm().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ends_are_the_models_to_the_bit_and_the_type_stays(dtype, tmp_path):
    start, one, two = (weights_like(seed, dtype) for seed in (0, 1, 2))
    init, *runs = (made(tmp_path / name, x) for name, x in (("init", start), ("one", one), ("two", two)))
    for towards, weights, expected in ((0, [1, 1], start), (1, [1, 0], one), (1, [0, 3], two)):
        out = tmp_path / f"out-{towards}-{weights[0]}"
        out.mkdir()
        merge(runs, init, out, weights=weights, towards=towards)
        found = load_file(out / "model.safetensors")
        assert all(torch.equal(found[key], expected[key]) for key in KEYS)
        assert found[KEYS[0]].dtype == dtype


def test_a_checkpoint_of_half_precision_brings_the_optimisers_float32_weights(tmp_path):
    """And began from the initial model as that precision has it."""
    start, one = weights_like(0, torch.float32), weights_like(1, torch.float32)
    rounded = {key: x.bfloat16() for key, x in one.items()}
    run = made(tmp_path / "step-000001" / "model", rounded)
    (tmp_path / "step-000001" / "trainer").mkdir()
    masters = {f"{key}/master": x for key, x in one.items()} | {f"{KEYS[2]}/master": one[KEYS[2]] + 1}
    save_file(masters, tmp_path / "step-000001" / "trainer" / "optimizer.safetensors")
    (out := tmp_path / "out").mkdir()
    told = merge([run], made(tmp_path / "init", start), out, weights=[1], towards=0.5)
    found = load_file(out / "model.safetensors")
    for key in KEYS:
        trained = rounded[key] if key == KEYS[2] else one[key]  # one that is not what was rounded is not believed
        assert torch.equal(found[key], (0.5 * start[key].bfloat16().double() + 0.5 * trained.double()).bfloat16())
    began = torch.cat([start[key].bfloat16().double().flatten() for key in KEYS])
    assert told.initial == pytest.approx(float(began.norm()), rel=1e-12)


def test_a_tied_head_may_be_written_or_not(tmp_path):
    start, one = weights_like(0), weights_like(1)
    head = {"lm_head.weight": one[KEYS[0]].clone()}
    (out := tmp_path / "out").mkdir()
    merge([made(tmp_path / "one", one | head, tied=True)], made(tmp_path / "init", start, True), out, weights=[1])
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    with pytest.raises(ValueError, match=r"two and more are no models of one kind: only one of them has lm_head\.we"):
        merge([made(tmp_path / "two", one | head)], made(tmp_path / "more", start), out, weights=[1])


def test_models_of_other_kinds_are_refused(tmp_path):
    start, one = weights_like(0), weights_like(1)
    wide = one | {KEYS[3]: torch.zeros(3, 5, dtype=torch.float64)}
    broken = one | {KEYS[3]: torch.full((3, 4), math.inf, dtype=torch.float64)}
    init = made(tmp_path / "init", start)
    cases = {
        r"wide and init are no models of one kind: model\.layers\.1\.a is \[3, 5\] in one and \[3, 4\]": wide,
        r"fewer and init are no models of one kind: only one of them has model\.norm\.weight": dict(
            list(one.items())[:-1]
        ),
        r"model\.layers\.1\.a is not finite once merged": broken,
    }
    (out := tmp_path / "out").mkdir()
    for name, (text, tensors) in zip(("wide", "fewer", "broken"), cases.items(), strict=True):
        with pytest.raises(ValueError, match=text):
            merge([made(tmp_path / name, tensors)], init, out, weights=[1])


def test_models_of_other_tokens_are_refused(tmp_path):
    """Files that differ but have the same vocabulary are no reason; the initial model may lack what was added."""
    names = ("init", "one", "two", "more", "swapped")
    sources = {name: made(tmp_path / name, weights_like(seed)) for seed, name in enumerate(names)}
    for name, source in sources.items():
        tokenizer = tiny.tokenizer()
        if name == "two":
            tokenizer.padding_side = "right" if tokenizer.padding_side == "left" else "left"
        if name == "more":
            tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(source.folder)
    file = tmp_path / "swapped" / "tokenizer.json"
    document = json.loads(file.read_text())
    numbers = document["model"]["vocab"]
    x, y = list(numbers)[-2:]
    numbers[x], numbers[y] = numbers[y], numbers[x]
    file.write_text(json.dumps(document))

    def join(init, *runs):
        (out := tmp_path / f"out-{len(list(tmp_path.iterdir()))}").mkdir()
        return merge([sources[name] for name in runs], sources[init], out, weights=[1] * len(runs))

    assert join("init", "one", "two").norm > 0
    assert join("init", "more").norm > 0
    for init, runs, text in (
        (
            "init",
            ("one", "more"),
            r"more has another vocabulary than one: '<new>' is token \d+ here and none there; merge",
        ),
        (
            "init",
            ("more", "one"),
            r"more has another vocabulary than one: '<new>' is token \d+ here and none there; merge",
        ),
        ("init", ("one", "swapped"), r"one has another vocabulary than swapped: .* is token \d+ here and \d+ there"),
        ("swapped", ("one",), r"one has another vocabulary than swapped"),
    ):
        with pytest.raises(ValueError, match=text):
            join(init, *runs)


# ---- runs and commands -----------------------------------------------------------------------------------------------

SMALL = {
    "steps": 1, "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 8}, "eval": {"problems": 2, "k": 1},
    "log": {"view": "none", "report": False, "tensorboard": False, "samples": 0}, "device": "cpu",
}  # fmt: skip


def test_two_rounds_of_warp(tmp_path, capsys, monkeypatch):
    """Runs, merged, moved towards the beginning, trained on from there, merged again: each loads with transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    model = "builtin"
    for turn in ("first", "second"):
        runs = [f"{turn}-{seed}" for seed in (0, 1)]
        for seed, run in enumerate(runs):
            more = {"rollout.dynamic": False, "rollout.overlong": False, "optim.minibatches": 1}
            rpg.train(model=model, output=run, seed=seed, **SMALL, **more)
        assert cli.main(["merge", *runs, "-o", f"merged/{turn}", "--towards", "0.3"]) == 0
        printed = capsys.readouterr().out
        assert f"wrote merged/{turn}: rpg eval merged/{turn}, rpg train --model merged/{turn}" in printed
        assert "0.3 of the way from the initial model" in printed
        record = json.loads((tmp_path / "merged" / turn / "merge.json").read_text())
        assert (record["init"], record["models"], record["towards"]) == (model, runs, 0.3)
        start = Source("init", merging.BUILTIN if model == "builtin" else tmp_path / model)
        ends = [Source(run, tmp_path / run / "checkpoints" / "step-000001" / "model") for run in runs]
        out = Source(turn, tmp_path / "merged" / turn)
        name = "model.embed_tokens.weight"
        d1, d2 = ((end.tensor(name) - start.tensor(name)).double().flatten() for end in ends)
        assert d1.norm() > 0
        expected = start.tensor(name).double() + 0.3 * slerp(d1, d2, 0.5).view_as(start.tensor(name))
        assert torch.allclose(out.tensor(name).double(), expected, rtol=0, atol=1e-6)
        loaded = AutoModelForCausalLM.from_pretrained(out.folder)
        assert torch.equal(loaded.get_input_embeddings().weight, out.tensor(name))
        assert AutoTokenizer.from_pretrained(out.folder).encode("1+2")
        model = f"merged/{turn}"
    assert [path.name for path in sorted((tmp_path / "merged").iterdir())] == ["first", "second"]  # nothing beside it


def test_an_adapter_is_merged_as_the_model_it_amounts_to(tmp_path):
    pytest.importorskip("peft")
    Policy(tiny.make("llama-tied"), tiny.tokenizer()).save(tmp_path / "base")
    for seed in (0, 1):
        policy = Policy.load(str(tmp_path / "base"), peft=PeftConfig("lora", {"r": 2}))
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, p in policy.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=g))
        policy.save(tmp_path / f"lora-{seed}")
    told = rpg.merge([tmp_path / "lora-0"], tmp_path / "whole", init=str(tmp_path / "base"))
    assert told.norms[0] > 0
    ids = torch.tensor([[1, 2, 3, 4]])
    adapted, whole = (Policy.load(str(tmp_path / name)).model(ids).logits for name in ("lora-0", "whole"))
    assert torch.allclose(adapted, whole, atol=1e-5)
    both = rpg.merge([tmp_path / f"lora-{i}" for i in (0, 1)], tmp_path / "both", init=str(tmp_path / "base"))
    assert abs(both.cosines[0][1]) < 0.5
    assert not (tmp_path / "both" / "adapter_config.json").exists()


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "file", "text"),
    [
        (cut, "part-0.safetensors", "part-0.safetensors is damaged (SafetensorError: "),
        (cut, "model.safetensors.index.json", "model.safetensors.index.json is damaged (JSONDecodeError: "),
        (Path.unlink, "part-1.safetensors", "part-1.safetensors is missing, the model is not whole: fetch it again"),
    ],
)
def test_a_file_that_is_damaged_or_missing_is_one_line_that_names_it(damage, file, text, tmp_path, capsys):
    folder = tmp_path / "whole"
    made(folder, weights_like(1), files=2)
    made(tmp_path / "init", weights_like(0))
    damage(folder / file)
    assert cli.main(["merge", str(folder), "-o", str(tmp_path / "out"), "--init", str(tmp_path / "init")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rpg merge: {folder}/{text}")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["last", "best", "3"])
def test_a_checkpoint_that_is_damaged_is_one_line_and_no_earlier_one_is_taken(which, tmp_path, capsys):
    """Whoever merges the last one of each run does not want one of them from before."""
    run = tmp_path / "run"
    for step in (2, 3):
        checkpoint.save(
            run / "checkpoints", step, lambda folder: made(folder / "x", weights_like(0)), {}, {"evals": []}
        )
    (run / "config.yaml").write_text("model: builtin\n")
    cut(run / "checkpoints" / "step-000003" / "model" / "x" / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cli.main(["merge", str(run), "-o", str(tmp_path / "out"), "--checkpoint", which]) == 2
    said = capsys.readouterr().err
    assert "step-000003" in said
    assert "model/x/model.safetensors has 100 bytes instead of" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["builtin", "-o", "out"], "builtin is no run, so what it began from is not known: give --init MODEL"),
        (["builtin", "-o", "out", "--init", "builtin", "--weights", "1,2"], "--weights must have one number for each"),
        (["builtin", "-o", "out", "--init", "builtin", "--weights", "-1"], "--weights must be at least 0 and not all"),
        (["builtin", "-o", "out", "--init", "builtin", "--towards", "nan"], "--towards must be between 0, the initial"),
        (["builtin", "-o", "out", "--init", "builtin", "--towards", "-1"], "and 1, the merged one; got -1"),
        (["builtin", "-o", "out", "--init", "builtin", "--towards", "1.5"], "and 1, the merged one; got 1.5"),
        (["builtin", "-o", "out", "--init", "builtin", "--method", "slrp"], "Did you mean 'slerp'?"),
        (["builtin", "-o", "full", "--init", "builtin"], "full exists already: give another folder with -o"),
        (["./none", "-o", "out", "--init", "builtin"], "./none does not exist: give a run's folder"),
        (["a", "/nope", "-o", "out"], "/nope does not exist: give a run's folder, a model folder or a hub id"),
        (["a", "b", "-o", "out"], "the runs began from different models, builtin and ./other: give --init MODEL"),
        (["a", "-o", "out"], "a has no checkpoint yet"),
    ],
)
def test_mistakes_are_one_line(line, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name, model in (("a", "builtin"), ("b", "./other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"model: {model}\n")
        (tmp_path / name / "run.id").touch()
    assert cli.main(["merge", *line]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
