"""The parts that are timed are methods of today's classes."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import restore_parts


@pytest.mark.parametrize("part", restore_parts._PARTS, ids=lambda part: part.name)
def test_every_part_has_its_methods(part: restore_parts._Part) -> None:
    module, _, name = part.where.partition(":")
    kind = getattr(importlib.import_module(module), name)
    for method in part.methods:
        assert callable(getattr(kind, method))
