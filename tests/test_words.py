"""The rules of names and docstrings that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for package in ("hetero_connector", "ownership", "cuda", "examples", "benchmarks", "scripts")
    for path in sorted((ROOT / package).rglob("*.py"))
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
RIDDLE = re.compile(r"(What|Of|Whether|Where|When|How|Those|As|Whose|Who)\b")
"""A docstring is a sentence with a verb: it does not open with one of these words."""
UNCLEAR = re.compile(
    r"\b(nobody|somebody|someone|beside|lets? go|gives? back|stands? back|company)\b", re.IGNORECASE
)
"""Words that readers had to translate."""
QUERY = re.compile(r"_?(is|has|can)_|__len__$|__bool__$|__contains__$")
CHANGES = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"}
    | {"popleft", "remove", "setdefault", "update"}
)
"""Methods of lists, sets, dictionaries and queues that change them."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string that stands alone, so also those of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def queries(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield properties, and methods whose names ask a question."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = {x.id for x in node.decorator_list if isinstance(x, ast.Name)}
            if "property" in decorators or QUERY.match(node.name):
                yield node


def of_self(node: ast.expr) -> bool:
    """Return True for `self.x`, `self.x.y`, `self.x[...]` and so on."""
    inner = node
    while isinstance(inner, ast.Attribute | ast.Subscript):
        inner = inner.value
    return inner is not node and isinstance(inner, ast.Name) and inner.id == "self"


def changes(function: ast.FunctionDef) -> Iterator[int]:
    """Yield the lines in which the method changes its object."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript):
            is_written = isinstance(node.ctx, ast.Store | ast.Del)
            if is_written and of_self(node):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_change = node.func.attr in CHANGES
            if is_change and of_self(node.func.value):
                yield node.lineno


@cache
def riddles_and_changes(path: Path) -> tuple[list[str], list[str]]:
    """Return the wrong docstrings and the wrong queries of a file, each after its `file:line`.

    The tree is not kept: a thousand of them make garbage collection slower than parsing.
    """
    tree = ast.parse(path.read_text())
    riddles = [(line, text[:60]) for line, text in docstrings(tree) if RIDDLE.match(text)]
    changing = [(line, query.name) for query in queries(tree) for line in changes(query)]
    place = name(path)
    return (
        [f"{place}:{line}: {text}" for line, text in riddles],
        [f"{place}:{line}: {query}" for line, query in changing],
    )


def test_a_docstring_does_not_open_with_a_riddle() -> None:
    found = [riddle for path in SOURCES + TESTS for riddle in riddles_and_changes(path)[0]]
    assert not found, "\n".join(found)


def test_no_word_has_to_be_translated() -> None:
    found = [
        f"{name(path)}:{number}: {line}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNCLEAR.search(line)
    ]
    assert not found, "\n".join(found)


def test_a_query_changes_nothing() -> None:
    found = [change for path in SOURCES for change in riddles_and_changes(path)[1]]
    assert not found, "\n".join(found)


def test_the_check_of_queries_finds_each_kind_of_change() -> None:
    source = """
class A:
    @property
    def size(self): self.x = 1
    def is_a(self): self.x.y += 1
    def _has_b(self): del self.x["b"]
    def can_c(self): return self.x.pop()
    def is_d(self): x = {}; x["d"] = self.x; return x
    def update(self): self.x = 1
"""
    found = [(x.name, line) for x in queries(ast.parse(source)) for line in changes(x)]
    assert [function for function, _ in found] == ["size", "is_a", "_has_b", "can_c"]
