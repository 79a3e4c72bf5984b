"""Python to JavaScript, as much of it as a loss is written in: the page runs the source of the library, not a copy.

``translate(definitions)`` takes functions, classes and constants and gives their JavaScript, read from their syntax
trees. Operators become calls of runtime.js (``a * b`` is ``mul(a, b)``), whose Tensor is one number and its derivative.
What it does not know it refuses, so that nothing is translated wrongly in silence.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable
from types import ModuleType
from typing import Any

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.BitAnd: "and", ast.BitOr: "or",
    ast.USub: "neg", ast.Invert: "not", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq",
    ast.NotEq: "ne",
}  # fmt: skip
RESERVED = {"case", "const", "default", "delete", "enum", "export", "function", "let", "new", "switch", "this", "var"}
GETTERS = ("property", "cached_property")


class Untranslatable(Exception):
    """Python that this page's JavaScript has no word for."""


def translate(module: ModuleType, *names: str, only: Iterable[str] = ()) -> str:
    """The named definitions of a module, in its order. ``only``: of a class, these methods and no others."""
    tree = ast.parse(inspect.getsource(module))
    found = {name: node for node in tree.body for name in _defined(node) if name in names}
    if missing := set(names) - set(found):
        raise Untranslatable(f"{module.__name__} has no {', '.join(sorted(missing))}")
    writer = _Writer(frozenset(only))
    texts = [(node, writer.statement(node)) for node in dict.fromkeys(found.values())]
    return "\n".join(
        text if isinstance(node, ast.FunctionDef | ast.ClassDef) else f"const {text}" for node, text in texts
    )


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]


def _word(name: str) -> str:
    return f"{name}_" if name in RESERVED else name


class _Writer:
    """JavaScript of a node: a method for each kind of statement, by its name, and one match for expressions."""

    def __init__(self, only: frozenset[str]) -> None:
        self.only = only

    def refuse(self, node: ast.AST) -> Untranslatable:
        return Untranslatable(f"{type(node).__name__}: {ast.unparse(node)[:200]}")

    # ---- statements --------------------------------------------------------------------------------------------------

    def block(self, body: Iterable[ast.stmt]) -> str:
        lines = [line for node in body if (line := self.statement(node))]
        return "{\n" + textwrap.indent("\n".join(lines), " ") + "\n}"

    def statement(self, node: ast.stmt) -> str:
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise self.refuse(node)
        return str(method(node))

    def _Pass(self, node: ast.Pass) -> str:
        return ""

    def _Break(self, node: ast.Break) -> str:
        return "break;"

    def _Expr(self, node: ast.Expr) -> str:
        return "" if isinstance(node.value, ast.Constant) else f"{self.value(node.value)};"

    def _Return(self, node: ast.Return) -> str:
        return f"return {'null' if node.value is None else self.value(node.value)};"

    def _Raise(self, node: ast.Raise) -> str:
        match node.exc:
            case ast.Call(func=ast.Name(id=kind), args=[text]):
                return f"throw raised({kind!r}, {self.value(text)});"
            case ast.Name(id=kind):
                return f"throw raised({kind!r}, '');"
        raise self.refuse(node)

    def _Assert(self, node: ast.Assert) -> str:
        return f"if (!({self.value(node.test)})) throw raised('AssertionError', {ast.unparse(node.test)!r});"

    def _Assign(self, node: ast.Assign) -> str:
        return f"{' = '.join(self.target(t) for t in node.targets)} = {self.value(node.value)};"

    def _AnnAssign(self, node: ast.AnnAssign) -> str:
        return f"{self.target(node.target)} = {self.value(node.value)};" if node.value else ""

    def _AugAssign(self, node: ast.AugAssign) -> str:
        place = self.target(node.target)
        return f"{place} = {OPERATORS[type(node.op)]}({place}, {self.value(node.value)});"

    def _If(self, node: ast.If) -> str:
        rest = f" else {self.block(node.orelse)}" if node.orelse else ""
        return f"if ({self.value(node.test)}) {self.block(node.body)}{rest}"

    def _For(self, node: ast.For) -> str:
        return f"for ({self.target(node.target)} of {self.value(node.iter)}) {self.block(node.body)}"

    def _Match(self, node: ast.Match) -> str:
        text = f"const matched = {self.value(node.subject)};\n"
        for case in node.cases:
            tests, bound = self.pattern(case.pattern, "matched")
            if case.guard is not None:
                raise self.refuse(node)
            body = [f"{name} = {place};" for name, place in bound] + [self.statement(s) for s in case.body]
            text += f"if ({' && '.join(tests) or 'true'}) {{\n" + "\n".join(body) + "\n} else "
        return "{" + text + "{}}"

    def pattern(self, node: ast.pattern, place: str) -> tuple[list[str], list[tuple[str, str]]]:
        """The tests that a value must pass, and the names that it is given."""
        match node:
            case ast.MatchValue(value=value):
                return [f"eq({place}, {self.value(value)})"], []
            case ast.MatchSequence(patterns=patterns):
                inner = [self.pattern(p, f"{place}[{i}]") for i, p in enumerate(patterns)]
                return [t for tests, _ in inner for t in tests], [n for _, names in inner for n in names]
            case ast.MatchClass(cls=cls, patterns=[], kwd_patterns=[]):
                return [f"isinstance({place}, {self.value(cls)})"], []
            case ast.MatchAs(pattern=inside, name=name):
                tests, names = self.pattern(inside, place) if inside else ([], [])
                return tests, names + ([(name, place)] if name else [])
        raise self.refuse(node)

    # ---- functions and classes ---------------------------------------------------------------------------------------

    def function(self, node: ast.FunctionDef, method: bool = False) -> str:
        """Parameters and body. Names that the body assigns are declared at its top, as Python has them."""
        arguments = node.args.posonlyargs + node.args.args
        defaults = [None] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
        if node.args.kwonlyargs or node.args.vararg or node.args.kwarg:
            raise self.refuse(node)
        pairs = list(zip(arguments, defaults, strict=True))[1 if method else 0 :]
        parameters = [_word(a.arg) + (f" = {self.value(d)}" if d is not None else "") for a, d in pairs]
        own = {a.arg for a in arguments}
        local = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        local |= {n.name for n in ast.walk(node) if isinstance(n, ast.MatchAs) and n.name}
        inside = {n.id for c in ast.walk(node) if isinstance(c, ast.comprehension) for n in ast.walk(c.target)
                  if isinstance(n, ast.Name)}  # fmt: skip
        declared = sorted(map(_word, local - own - inside))
        body = self.block(node.body)
        return f"({', '.join(parameters)}) " + (f"{{ let {', '.join(declared)};\n{body[1:]}" if declared else body)

    def _FunctionDef(self, node: ast.FunctionDef) -> str:
        return f"function {_word(node.name)}{self.function(node)}"

    def _ClassDef(self, node: ast.ClassDef) -> str:
        """Fields go into ``static fields``, class variables onto the prototype, properties become getters."""
        base = next((self.value(b) for b in node.bases if ast.unparse(b) != "NamedTuple"), "Data")
        parts, after, fields = [], [], []
        for item in node.body:
            match item:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                    if "ClassVar" in ast.unparse(annotation):
                        assert value is not None
                        after.append(f"{node.name}.prototype.{name} = {self.value(value)};")
                    else:
                        fields.append(f"[{name!r}, {'null' if value is None else f'() => {self.value(value)}'}]")
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if not self.only:
                    after.append(f"{node.name}.prototype.{name} = {self.value(value)};")
                case ast.FunctionDef(name=name) if not self.only or name in self.only:
                    getter = any(ast.unparse(d) in GETTERS for d in item.decorator_list)
                    parts.append(f"{'get ' if getter else ''}{name}{self.function(item, method=True)}")
                case ast.FunctionDef() | ast.Expr() | ast.Assign():  # not asked for; the docstring
                    pass
                case _:
                    raise self.refuse(item)
        if fields:
            parts.insert(0, f"static fields = [...{base}.fields, {', '.join(fields)}];")
        body = textwrap.indent("\n".join(parts), " ")
        return "\n".join([f"class {node.name} extends {base} {{\n{body}\n}}", *after])

    # ---- expressions -------------------------------------------------------------------------------------------------

    def target(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return _word(name)
            case ast.Tuple(elts=elements):
                return f"[{', '.join(map(self.target, elements))}]"
        raise self.refuse(node)

    def value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=value):
                return self.constant(value)
            case ast.Name(id=name):
                return "this" if name == "self" else _word(name)
            case ast.Attribute(value=inside, attr=name):
                return f"{self.value(inside)}.{name}"
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return f"[{', '.join(map(self.value, elements))}]"
            case ast.Starred(value=inside):
                return f"...{self.value(inside)}"
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return "dict({" + ", ".join(f"[{self.value(k)}]: {self.value(v)}" for k, v in pairs if k) + "})"
            case ast.Subscript(value=inside, slice=index) if not isinstance(index, ast.Slice):
                return f"{self.value(inside)}[{self.value(index)}]"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                if isinstance(op, ast.BitOr):  # of types, in isinstance
                    return f"or({self.value(left)}, {self.value(right)})"
                return f"{OPERATORS[type(op)]}({self.value(left)}, {self.value(right)})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"!({self.value(operand)})"
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
                return f"{OPERATORS[type(op)]}({self.value(operand)})"
            case ast.BoolOp(op=op, values=values):
                return f"({(' && ' if isinstance(op, ast.And) else ' || ').join(map(self.value, values))})"
            case ast.IfExp(test=test, body=body, orelse=other):
                return f"({self.value(test)} ? {self.value(body)} : {self.value(other)})"
            case ast.Compare(left=left, ops=ops, comparators=rights):
                return self.comparison([left, *rights], ops)
            case ast.Lambda(args=arguments, body=body):
                return f"(({', '.join(_word(a.arg) for a in arguments.args)}) => {self.value(body)})"
            case ast.GeneratorExp(elt=element, generators=[each]) | ast.ListComp(elt=element, generators=[each]):
                place = f"({self.target(each.target)})"
                kept = "".join(f".filter({place} => {self.value(test)})" for test in each.ifs)
                return f"[...{self.value(each.iter)}]{kept}.map({place} => {self.value(element)})"
            case ast.JoinedStr(values=values):
                return "[" + ", ".join(map(self.value, values)) + '].join("")'
            case ast.FormattedValue(value=inside, conversion=conversion, format_spec=spec):
                style = (
                    ast.literal_eval(ast.unparse(spec).removeprefix("f")) if spec else "r" if conversion == 114 else ""
                )
                return f"format({self.value(inside)}, {style!r})"
            case ast.Call():
                return self.call(node)
        raise self.refuse(node)

    def constant(self, value: Any) -> str:
        if isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
        words = {None: "null", True: "true", False: "false"}
        return words[value] if value is None or isinstance(value, bool) else repr(value)

    def comparison(self, values: list[ast.expr], ops: list[ast.cmpop]) -> str:
        tests = []
        for left, op, right in zip(values, ops, values[1:], strict=False):
            a, b = self.value(left), self.value(right)
            match op:
                case ast.Is():
                    tests.append(f"({a} === {b})")
                case ast.IsNot():
                    tests.append(f"({a} !== {b})")
                case ast.In():
                    tests.append(f"contains({b}, {a})")
                case ast.NotIn():
                    tests.append(f"!contains({b}, {a})")
                case _:
                    tests.append(f"{OPERATORS[type(op)]}({a}, {b})")
        return tests[0] if len(tests) == 1 else f"({' && '.join(tests)})"

    def call(self, node: ast.Call) -> str:
        """A class is called through ``make``, as JavaScript wants ``new``; arguments by name go last, as ``named``."""
        arguments = [self.value(a) for a in node.args]
        if node.keywords:
            pairs = (f"{k.arg}: {self.value(k.value)}" for k in node.keywords if k.arg)
            arguments.append(f"named({{{', '.join(pairs)}}})")
        match node.func:
            case ast.Attribute(value=sep, attr="join"):
                return f"[...{arguments[0]}].join({self.value(sep)})"
            case ast.Name(id=name) if name[:1].isupper() or (name[:1] == "_" and name[1:2].isupper()):
                return f"new {name}({', '.join(arguments)})"
        return f"{self.value(node.func)}({', '.join(arguments)})"
