"""Mutants of the formulas, and a runner that asks the project's own tests to kill them. See test_mutations.py.

``python tests/loss/mutations.py objective`` prints one JSON line per mutant of src/rpg/loss/objective.py. A process
that has imported torch, and never called backward, forks a child per mutant. The child swaps one node of one syntax
tree, imports ``rpg`` from the trees and calls the test functions until one fails. Without arguments the process stays:
it reads what to run, a line each, so that many modules cost its imports once.
"""

import ast
import importlib.abc
import importlib.util
import itertools
import json
import os
import signal
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import hypothesis
import numpy.random  # noqa: F401  loaded here once, not in every child
import pytest
import scipy.special  # noqa: F401
import torch
import transformers  # noqa: F401

TESTS = Path(__file__).parent
PACKAGE = TESTS.parents[1] / "src" / "rpg"
ORACLES = {  # the tests that a module's mutants are shown, quick ones first
    "objective": ("mutation_oracles", "errors", "exact", "policy_loss"),
    "policy_loss": (
        "mutation_oracles",
        "errors",
        "gates",
        "exact",
        "mismatch",
        "clip",
        "clip_bounds",
        "policy_loss",
        "metrics",
    ),
    "terms": ("mutation_oracles", "errors", "gates", "exact", "clip", "clip_bounds", "policy_loss", "metrics"),
    "clip": ("mutation_oracles", "errors", "clip", "clip_bounds", "policy_loss", "metrics"),
    "mismatch": ("mutation_oracles", "errors", "exact", "mismatch"),
    "gates": ("gates",),
    "control_variate": ("mutation_oracles", "policy_loss", "exact"),
    "loss/methods/shared": ("methods",),
    "loss/methods/rpg_paper": ("methods",),
    "loss/methods/policy_gradients": ("methods",),
    "loss/methods/weights": ("methods",),
    "loss/methods/baselines": ("methods",),
    "advantages": ("baselines", "advantages"),
    "anchor": ("anchor",),
    "kernels/kept": ("kernels/kept_oracle",),
    "kernels/sample_torch": ("kernels/kept_oracle",),
    "kernels/logp": ("kernels/kept_oracle",),
    "rollout/kept": ("training/kept_stored",),
    "training/batch": ("training/kept_stored",),
}
ONLY = {  # of these modules the mutants of the functions and classes whose names begin so
    "kernels/kept": ("Kept", "Columns", "Gathered", "_"),
    "kernels/sample_torch": ("truncate", "sample_kept"),
    "kernels/logp": ("softmax_logp", "_run"),
    "rollout/kept": ("KeptIds", "KeptStore", "KeptPool"),
    "training/batch": ("Batch.kept", "Batch._kept_ids", "_kept"),
}
CPU_LIMIT_S = 60  # a mutant may loop for ever: that is a failure too

# Not formulas: what is refused, how a draw is seeded, how Lambert's W is iterated (KL3's limits pin its values).
SKIPPED = (
    "__post_init__",
    "_check_parts",
    "_check_low_high",
    "_check_dual",
    "_check_level",
    "_check_looks",
    "only_here",
    "_shuffled",
    "lambert_w",
)
FLIPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
FLIPS |= {ast.And: ast.Or, ast.Or: ast.And}
COMPARISONS = {
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Lt: (ast.GtE, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
# What a row of the table chooses: names, switches and rules, each swapped for another of its kind.
NAMES = [
    *(("fkl", "rkl"), ("ufkl", "urkl"), ("k2", "k3"), ("token-mean", "seq-mean-token-mean"), ("old", "initial")),
    *(("sequence", "sequence-mean"), ("seq-mean-token-sum", "constant"), ("group-mean", "group-mean-std")),
    *(("leave-one-out", "greedy-baseline"), ("batch-whitening", "reward-to-go"), ("ref_logp", "keep")),
]
SWAPS = {name: other for pair in NAMES for name, other in (pair, pair[::-1])}
SWITCHES = (
    "dynamic_sampling",
    "overlong_penalty",
    "kl_in_clip",
    "curvature_gate",
    "scale_by_signal",
    "whiten",
    "baseline",
)
RULES = {"DualClip": "RPGClip", "RPGClip": "DualClip", "Box": "LogBox", "LogBox": "Box", "Unweighted": "Taper"}
RULES |= {"Taper": "Unweighted"}
DROPPED = ("detach", "neg", "neg_", "exp", "log", "square", "abs", "cumsum", "flip")  # x.exp() -> x
AXIS = ("sum", "any", "cumsum", "flip", "unsqueeze", "log_softmax", "softmax", "gather", "topk", "cat")


@dataclass(frozen=True)
class Mutant:
    """``holder.field`` (or its element ``index``) is replaced by ``node``."""

    name: str
    holder: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def apply(self):
        if self.index is None:
            setattr(self.holder, self.field, self.node)
        else:
            getattr(self.holder, self.field)[self.index] = self.node


def replacements(node, parents):
    """What may stand in place of an expression."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in FLIPS:
            yield ast.BinOp(node.left, FLIPS[type(node.op)](), node.right)
        elif isinstance(node.op, ast.Mult):
            yield from (node.left, node.right)
        elif isinstance(node.op, (ast.Div, ast.Pow)):
            yield node.left
    elif isinstance(node, ast.UnaryOp) and not is_axis(node, parents):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(FLIPS[type(node.op)](), node.values)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for flipped in COMPARISONS.get(type(node.ops[0]), ()):
            yield ast.Compare(node.left, [flipped()], node.comparators)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        yield ast.Constant(node.value + 1)
        if not (isinstance(parents[-1], ast.UnaryOp) and is_axis(parents[-1], parents[:-1])):
            yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "math")):
            yield node.func.value
    elif isinstance(node, ast.keyword) and node.arg == "alpha":  # torch.add(x, y, alpha=k)
        yield ast.keyword("alpha", ast.UnaryOp(ast.USub(), node.value))


def choices(node, parents):
    """Another choice in a row of the table of methods."""
    is_argument = isinstance(parents[-1], (ast.Call, ast.keyword, ast.Tuple))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_argument and node.value in SWAPS:
        yield ast.Constant(SWAPS[node.value])
    elif isinstance(node, ast.keyword) and node.arg in SWITCHES and isinstance(node.value, ast.Constant):
        yield ast.keyword(node.arg, ast.Constant(not node.value.value))
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "clip" and node.attr in RULES:
        yield ast.Attribute(node.value, RULES[node.attr], ast.Load())


def is_axis(node, parents):
    """The -1 of x.sum(-1): an axis counted from the other end is the same axis."""
    caller = parents[-2] if isinstance(parents[-1], ast.keyword) else parents[-1]
    name = getattr(caller.func, "attr", "") if isinstance(caller, ast.Call) else ""
    return name in AXIS and isinstance(node.operand, ast.Constant)


def mutants(tree, rows=False):
    """Every mutant of a module, named by function, expression before and after, in order of appearance.

    With ``rows`` also those that choose otherwise in a row of the table of methods.
    """
    found, seen = [], {}

    def visit(node, parents, where):
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Raise, ast.Assert)):
                    continue
                inner = where
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    if child.name in SKIPPED:
                        continue
                    inner = [*where, child.name]
                elif not where and isinstance(child, ast.AnnAssign):
                    inner = [child.target.id]
                others = choices(child, [*parents, node]) if rows else ()
                for new in (*replacements(child, [*parents, node]), *others):
                    site = (node, field, index if isinstance(value, list) else None)
                    name = f"{'.'.join(inner) or 'module'}: {describe(site, child, new, parents)}"
                    seen[name] = seen.get(name, 0) + 1
                    name = name if seen[name] == 1 else f"{name} (#{seen[name]})"
                    found.append(Mutant(name, *site, new))
                visit(child, [*parents, node], inner)

    visit(tree, [], [])
    return found


def function_of(mutant):
    return "" if mutant is None else mutant.name.split(":")[0]


def path_of(module):
    """ "clip" is of the loss, "kernels/kept" says where it is: its path under the package, without the suffix."""
    return module if "/" in module else f"loss/{module}"


def of_module(module):
    return of_tree(module, ast.parse((PACKAGE / f"{path_of(module)}.py").read_text()))


def of_tree(module, tree):
    wanted = ONLY.get(module, ("",))
    return [
        mutant
        for mutant in mutants(tree, rows=module.startswith("loss/methods/"))
        if function_of(mutant).startswith(wanted)
    ]


def describe(site, old, new, parents):
    """The mutated expression; a bare constant is shown with the expression around it."""
    holder, field, index = site
    bare = isinstance(old, (ast.Constant, ast.keyword)) or ast.unparse(old).lstrip("-").isdigit()
    if not bare:
        return f"{ast.unparse(old)} -> {ast.unparse(new)}"
    if isinstance(holder, ast.arguments):
        return f"default {ast.unparse(old)} -> {ast.unparse(new)}"
    around = [n for n in (*parents, holder) if isinstance(n, (ast.expr, ast.stmt))]
    around = [n for n in around if not isinstance(n, (ast.UnaryOp, ast.Slice, ast.Tuple))]
    mutant = Mutant("", holder, field, index, new)
    before = ast.unparse(around[-1])
    mutant.apply()
    after = ast.unparse(around[-1])
    Mutant("", holder, field, index, old).apply()
    return f"{before} -> {after}"


# ---- running --------------------------------------------------------------------------------------------------------


class Trees(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``rpg`` from syntax trees."""

    def __init__(self):
        self.trees = {}
        for path in PACKAGE.rglob("*.py"):
            parts = ["rpg", *path.relative_to(PACKAGE).with_suffix("").parts]
            package = parts[-1] == "__init__"
            self.trees[".".join(parts[:-1] if package else parts)] = (path, ast.parse(path.read_text()), package)
        self.codes = {name: compile(tree, str(path), "exec") for name, (path, tree, _) in self.trees.items()}

    def find_spec(self, name, path=None, target=None):
        if name not in self.trees:
            return None
        path, _, package = self.trees[name]
        spec = importlib.util.spec_from_loader(name, self, origin=str(path), is_package=package)
        spec.has_location = True  # some modules look for what lies beside them
        return spec

    def exec_module(self, module):
        exec(self.codes[module.__name__], module.__dict__)

    def swap(self, name, mutant):
        path, tree, _ = self.trees[name]
        mutant.apply()
        self.codes[name] = compile(ast.fix_missing_locations(tree), str(path), "exec")


def cases(module):
    """(label, call) of every test function of a module, its parametrisation multiplied out or cut to SINGLE."""
    for name, function in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        axes = []
        for names, values in (m.args for m in getattr(function, "pytestmark", []) if m.name == "parametrize"):
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
            axes.append([dict(zip(names, v if len(names) > 1 else [v], strict=True)) for v in values])
        for chosen in itertools.product(*axes):
            arguments = {k: v for one in chosen for k, v in one.items()}
            if all(arguments.get(k, v) == v for k, v in getattr(module, "SINGLE", {}).items()):
                yield f"{name}{list(arguments.values())}", lambda f=function, a=arguments: f(**a)


def first_failure(sources, promising):
    """The label of the first test that fails, or None. Those that ``promising`` counts most are tried first."""
    tests = []
    for name, code in sources.items():
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = code.co_filename
        try:
            exec(code, module.__dict__)
        except Exception as error:
            return f"import of {name}: {type(error).__name__}"
        if hasattr(module, "SEEDS"):
            module.SEEDS = range(1)
        tests += [(f"{name}::{label}", call) for label, call in cases(module)]
    for label, call in sorted(tests, key=lambda test: -promising[test[0]]):
        try:
            call()
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception):
            return label
    return None


def full_name(module):
    return "rpg." + path_of(module).replace("/", ".")


def test_file(name):
    """ "clip" is tests/loss/test_clip.py, "kernels/kept" is tests/kernels/test_kept.py."""
    folder, _, stem = name.rpartition("/")
    return (TESTS.parent / folder if folder else TESTS) / f"test_{stem}.py"


def in_child(finder, module, mutant, sources, promising):
    """(pid, fd to read the outcome from). The child does not return."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        if mutant is not None:
            finder.swap(full_name(module), mutant)
        os.write(write, json.dumps(first_failure(sources, promising)).encode())
    except BaseException as error:  # of this runner, not of a test
        os.write(write, json.dumps({"broken": repr(error)}).encode())
    finally:
        os._exit(0)


def brief_hypothesis():
    """Few examples, always the same, no shrinking: a mutant only has to fail."""
    thorough, phases = hypothesis.settings, (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    quick = {"max_examples": 8, "derandomize": True, "database": None, "phases": phases}
    hypothesis.settings = lambda **given: thorough(**(given | quick))


def warm_up():
    """What the first use costs, half a second each, is paid here once and not in every child."""
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))

    @hypothesis.settings(max_examples=8)
    @hypothesis.given(hypothesis.strategies.floats(0, 1))
    def use(x):
        assert x >= 0

    use()


def ready():
    """The finder, once a process."""
    assert not any(name.split(".")[0] == "rpg" for name in sys.modules), "rpg must be imported in the children only"
    torch.set_num_threads(1)
    finder = Trees()
    sys.meta_path.insert(0, finder)
    brief_hypothesis()
    warm_up()
    return finder


def run(finder, module, jobs, every=1, skipped=(), passed=()):
    """Yields (name of the mutant or None for the untouched source, what killed it or None); one mutant of ``every``.

    The tests in ``passed`` were seen to pass with the untouched source: that is not tried again.
    """
    files = [test_file(name) for name in ORACLES[module]]
    sources = {file.stem: compile(file.read_text(), str(file), "exec") for file in files}
    waiting = [m for m in of_tree(module, finder.trees[full_name(module)][1]) if m.name not in skipped]
    waiting, running = [*([] if set(ORACLES[module]) <= set(passed) else [None]), *waiting[::every]], {}
    killers = defaultdict(Counter)  # function -> what killed its mutants: mostly that also kills the next one
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            promising = sum(killers.values(), Counter())
            for label, count in killers[function_of(mutant)].items():
                promising[label] += 1000 * count
            pid, fd = in_child(finder, module, mutant, sources, promising)
            running[pid] = (mutant, fd)
        pid, status = os.wait()
        mutant, fd = running.pop(pid)
        told = os.read(fd, 65536)
        os.close(fd)
        killed_by = json.loads(told) if told else f"crash or timeout, wait status {status}"
        assert not isinstance(killed_by, dict), (mutant, killed_by)
        killers[function_of(mutant)][killed_by] += 1
        yield (None if mutant is None else mutant.name), killed_by


def serve(finder):
    """``[module, jobs, every, skipped]`` a line; a line of outcomes for each."""
    passed = set()
    for line in sys.stdin:
        module, *how = json.loads(line)
        outcomes = list(run(finder, module, *how, passed=passed))
        if (None, None) in outcomes:
            passed |= set(ORACLES[module])
        print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve(ready())
    else:
        module, jobs, every, skipped = [*sys.argv[1:], *("2", "1", "[]")[len(sys.argv) - 2 :]]
        for name, killed_by in run(ready(), module, int(jobs), int(every), json.loads(skipped)):
            print(json.dumps([name, killed_by]), flush=True)
