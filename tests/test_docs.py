"""What the documents promise is tested where they say."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def failures() -> list[list[str]]:
    """The cells of each row of the table of failures."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("## Failures")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


def test_every_failure_in_the_table_has_a_test() -> None:
    rows = failures()
    assert len(rows) > 30
    for what, *_, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
        assert named, f"no test is named for: {what}"
        for file, test in named:
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, f"{file} has no {test}, named for: {what}"


def pip_arguments() -> list[str]:
    """Everything that README, the other documents and the examples tell to install with pip."""
    found = []
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.*")]
    for page in pages:
        if page.suffix in (".md", ".sh", ".yml", ".yaml"):
            commands = re.findall(r"pip install ([^\n`]*)", page.read_text())
            found += [arg for line in commands for arg in shlex.split(line, comments=True)]
    return [arg for arg in found if not arg.startswith("-")]


@pytest.mark.parametrize("argument", sorted(set(pip_arguments())))
def test_pip_understands_what_the_documents_tell_to_install(argument: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = set(extras["optional-dependencies"])
    local = re.fullmatch(r"\.(\[([\w,-]+)\])?", argument)
    if local:  # this directory, which pip takes as a path and no requirement
        assert set((local[2] or "").split(",")) - {""} <= optional
        return
    requirement = Requirement(argument)
    assert requirement.url is None or "://" in requirement.url, f"{argument} names no URL"
    if requirement.name == extras["name"]:
        assert requirement.extras <= optional
