"""Mutants of a module: small code changes made by cosmic-ray's operators and by seven of our own.

Changes that cannot affect a result are excluded by rule: annotations, docstrings and messages, decorators and their
arguments, printing and raising, assertions, imports, paths, private constants of a module (sizes of buffers,
patterns), and numbers that hardly change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import parso
from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

Position = tuple[int, int]

_BINARY = (
    ("Add", "Sub"), ("Sub", "Add"), ("Mul", "Div"), ("Mul", "Add"), ("Div", "Mul"), ("FloorDiv", "Mul"),
    ("Mod", "Mul"), ("Mod", "FloorDiv"), ("Pow", "Mul"), ("BitOr", "BitAnd"), ("BitAnd", "BitOr"),
    ("RShift", "LShift"), ("LShift", "RShift"), ("BitXor", "BitOr"),
)  # fmt: skip
_COMPARISONS = (
    ("Lt", "LtE"), ("LtE", "Lt"), ("Gt", "GtE"), ("GtE", "Gt"), ("Lt", "Gt"), ("Gt", "Lt"), ("LtE", "Gt"),
    ("GtE", "Lt"), ("Eq", "NotEq"), ("NotEq", "Eq"), ("Is", "IsNot"), ("IsNot", "Is"),
)  # fmt: skip
_FROM_COSMIC_RAY = (
    *(f"ReplaceBinaryOperator_{one}_{other}" for one, other in _BINARY),
    *(f"ReplaceComparisonOperator_{one}_{other}" for one, other in _COMPARISONS),
    "NumberReplacer",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "AddNot",
    "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ZeroIterationForLoop",
)
# Calls whose arguments are text for readers.
_MESSAGES = re.compile(
    r"(print|say|_say|warn|warning|error|info|debug|write_line|Finding|ConfigError|\w+Error|Damaged|perf_counter)"
)
# Methods without arguments that may be dropped from a tensor, a string or a list.
_PASSED_THROUGH = {
    "abs", "bool", "clone", "contiguous", "copy", "cpu", "detach", "double", "exp", "flatten", "float", "int", "log",
    "long", "lower", "sqrt", "square", "squeeze", "strip",
}  # fmt: skip
_OTHER_TYPES = {
    "float32": "bfloat16", "float64": "float32", "bfloat16": "float32", "float16": "bfloat16", "int64": "int32",
    "long": "int32",
}  # fmt: skip
_OTHER_REDUCTIONS = {'"sum"': '"mean"', '"mean"': '"sum"', "MAX": "SUM", "SUM": "MAX", "AVG": "SUM", "MIN": "MAX"}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_KEYWORDS_OF_NO_MATTER = ("strict", "daemon", "encoding", "indent", "flush", "place", "fix")
_PATH = re.compile(r"[\"']|\b(folder|path|name|directory|root|staged|beside|MANIFEST|\w+_dir)\b")


class _OnTexts(Operator):
    """Replaces a node's text."""

    def replacements(self, node: Any) -> Iterator[str]:
        """The texts that may replace the node."""
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterator[tuple[Position, Position]]:
        for _ in self.replacements(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        text = list(self.replacements(node))[index]
        prefix = node.get_first_leaf().prefix
        return parso.python.tree.Name(text, node.start_pos, prefix)

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


class DropStatement(_OnTexts):
    """Drops a call whose result is unused, or an assignment to an attribute or item."""

    def replacements(self, node: Any) -> Iterator[str]:
        if node.parent is None or node.parent.type != "simple_stmt":
            return
        if node.type == "expr_stmt":
            target, operator = node.children[0], node.children[1]
            is_changed = getattr(operator, "value", "").endswith("=") and operator.value != "="
            if (target.type == "atom_expr" and operator.type == "operator") or is_changed:
                yield "pass"
        elif node.type == "atom_expr" and node.children[-1].get_code().startswith("("):
            yield "pass"


class DropKeyword(_OnTexts):
    """Drops a keyword argument."""

    def replacements(self, node: Any) -> Iterator[str]:
        if node.type == "argument" and node.children[1].get_code().strip() == "=":
            yield "**{}"


class SwapMinMax(_OnTexts):
    """Swaps `min` and `max`, `all` and `any`."""

    def replacements(self, node: Any) -> Iterator[str]:
        if node.type == "name" and node.value in _SWAPPED:
            following = node.get_next_leaf()
            if following is not None and following.value == "(":
                yield _SWAPPED[node.value]


class DropCondition(_OnTexts):
    """Drops one side of `and` or `or`."""

    def replacements(self, node: Any) -> Iterator[str]:
        if node.type in ("and_test", "or_test"):
            for index in range(0, len(node.children), 2):
                kept = [
                    child for i, child in enumerate(node.children) if i not in (index, index + (-1 if index else 1))
                ]
                yield "".join(child.get_code() for child in kept).strip()


class DropMethod(_OnTexts):
    """Drops a method call, so that `x.detach()` becomes `x`."""

    def replacements(self, node: Any) -> Iterator[str]:
        if node.type != "atom_expr":
            return
        for index in range(1, len(node.children) - 1):
            name, call = node.children[index : index + 2]
            if call.get_code().strip() == "()" and name.get_code().strip().removeprefix(".") in _PASSED_THROUGH:
                kept = [*node.children[:index], *node.children[index + 2 :]]
                yield "".join(child.get_code() for child in kept).strip()


class OtherType(_OnTexts):
    """Replaces a torch dtype by a narrower or wider one."""

    def replacements(self, node: Any) -> Iterator[str]:
        if node.type == "name" and node.value in _OTHER_TYPES:
            dot = node.get_previous_leaf()
            if dot.value == "." and dot.get_previous_leaf().value == "torch":
                yield _OTHER_TYPES[node.value]


class OtherReduction(_OnTexts):
    """Replaces a reduction, such as a sum by a mean or a maximum by a sum."""

    def replacements(self, node: Any) -> Iterator[str]:
        is_member = node.type == "name" and node.get_previous_leaf() and node.get_previous_leaf().value == "."
        if (is_member or node.type == "string") and node.value in _OTHER_REDUCTIONS:
            yield _OTHER_REDUCTIONS[node.value]


_OWN = (DropStatement, DropKeyword, SwapMinMax, DropCondition, DropMethod, OtherType, OtherReduction)
OPERATORS: dict[str, Operator] = {
    **{name: get_operator(f"core/{name}")() for name in _FROM_COSMIC_RAY},
    **{kind.__name__: kind() for kind in _OWN},
}


@dataclass(frozen=True)
class Mutant:
    """One change to one module.

    Attributes:
        module: Path relative to the repository root.
        line: First changed line.
        operator: Kind of change.
        occurrence: Index among the places for that kind in the module.
        before, after: The changed lines, without indentation.
    """

    module: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str


class _Sites(Visitor):
    """Collects every place that an operator can change, by its start position."""

    def __init__(self) -> None:
        self.found: list[tuple[Position, str, int]] = []
        self._counts = dict.fromkeys(OPERATORS, 0)

    def visit(self, node: Any) -> Any:
        for name, operator in OPERATORS.items():
            for start, _ in operator.mutation_positions(node):
                if not _cannot_matter(node, start):
                    self.found.append((start, name, self._counts[name]))
                self._counts[name] += 1
        return node


def sites(source: str) -> dict[Position, list[tuple[str, int]]]:
    """The possible kinds of change and their occurrence numbers at each place of a module."""
    visitor = _Sites()
    visitor.walk(get_ast(source))
    by_place: dict[Position, list[tuple[str, int]]] = {}
    for place, name, occurrence in sorted(visitor.found):
        by_place.setdefault(place, []).append((name, occurrence))
    return by_place


def mutated(source: str, operator: str, occurrence: int) -> str | None:
    """The module's source with that change; None if nothing changes or the result is not valid Python."""
    changed = mutate_code(source, OPERATORS[operator], occurrence)
    if changed is None or changed == source:
        return None
    try:
        compile(changed, "mutant", "exec")
    except (SyntaxError, ValueError):
        return None
    return changed


def described(module: str, source: str, changed: str, operator: str, occurrence: int) -> Mutant:
    """The mutant with its differing lines."""
    old, new = source.splitlines(), changed.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    from_end = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), 0)
    before, after = old[first : len(old) - from_end], new[first : len(new) - from_end]
    return Mutant(
        module, first + 1, operator, occurrence, " ".join(map(str.strip, before)), " ".join(map(str.strip, after))
    )


def _cannot_matter(node: Any, start: Position) -> bool:
    if node.type == "number" and _hardly_changes(node.value):
        return True
    if node.parent is not None and node.parent.type == "parameters":
        return True  # the star before keywords is not a product
    if node.type == "term" and _PATH.search(node.get_code()):
        return True  # a path's `/` fails immediately as any other operator
    if node.type == "if_stmt" and "TYPE_CHECKING" in node.children[1].get_code():
        return True
    if node.type == "atom_expr" and any(_is_message(part) for part in node.children if part.type == "trailer"):
        return True
    child, parent = None, node
    while parent is not None:
        if _is_inside_what_cannot(child, parent):
            return True
        child, parent = parent, parent.parent
    return False


def _is_inside_what_cannot(child: Any, node: Any) -> bool:
    if node.type in ("tfpdef", "decorator", "assert_stmt", "raise_stmt", "fstring", "import_from", "import_name"):
        return True
    if node.type == "argument":
        return node.children[0].get_code().strip() in _KEYWORDS_OF_NO_MATTER
    if child is None:
        return False
    return (
        (node.type == "annassign" and child is node.children[1])
        or (node.type == "funcdef" and child is node.annotation)
        or (node.type == "trailer" and _is_message(node))
        or (node.type == "file_input" and _is_private_constant(child))
    )


def _hardly_changes(text: str) -> bool:
    try:
        value = float(eval(text))  # a literal from the module itself
    except (SyntaxError, TypeError, ValueError):
        return True
    return abs(value) >= 1000


def _is_message(trailer: Any) -> bool:
    if trailer.children[0].get_code().strip() != "(":
        return False
    before = trailer.get_previous_leaf()
    return before is not None and _MESSAGES.fullmatch(before.value) is not None


def _is_private_constant(statement: Any) -> bool:
    text = statement.get_code().lstrip()
    return re.match(r"(_[A-Z_0-9]+\b|__all__)[^=\n]*=", re.sub(r"^(#.*\n|\s)+", "", text)) is not None
