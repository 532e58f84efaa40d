"""Small checkpoints with random but well-scaled weights, one per attention type.

`load_format=dummy` weights give nearly constant logits, so a test on them proves nothing. The
outputs of these depend on distant tokens: another early token in the prompt changes the last
logprobs (`tests/engine/test_power.py` measures it). All weights are seeded.

`recipes` has the models that `transformers` builds, `deepseek_v4` one that is written tensor by
tensor, `blip2` one that takes images, `tokenizer` their common byte-level tokenizer. To add a
model, add a recipe.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from examples.checkpoints.blip2 import IMAGE_TOKEN, write_blip2
from examples.checkpoints.deepseek_v4 import write_deepseek_v4
from examples.checkpoints.recipes import RECIPES, write_recipe
from examples.checkpoints.tokenizer import write_tokenizer

__all__ = ["NAMES", "add_models", "write_checkpoint"]

_REVISION = 2
"""Raise it when a recipe changes: checkpoints already written are made again."""
_STAMP = "checkpoint.json"

_WRITERS: dict[str, Callable[[Path], None]] = {
    "deepseek_v4": write_deepseek_v4,
    "blip2": write_blip2,
    **{name: partial(write_recipe, recipe) for name, recipe in RECIPES.items()},
}

NAMES = tuple(sorted(_WRITERS))
"""The names of all checkpoints."""


def add_models(parser: ArgumentParser, default: Sequence[str]) -> None:
    """Let a command line name checkpoints, as `models`. The parser reports an unknown name."""

    def known(given: str) -> str:
        if given not in NAMES:
            raise ArgumentTypeError(f"no checkpoint {given!r}; there are {', '.join(NAMES)}")
        return given

    told = f"default: {' '.join(default)}"
    parser.add_argument("models", nargs="*", type=known, default=default, help=told)


def write_checkpoint(name: str, root: Path | str) -> Path:
    """Write checkpoint `name` to `root/name` unless it exists; return the directory.

    It is written to a temporary directory and renamed, so a directory of that name is always
    complete, and two processes may ask for the same one at the same time. Raises KeyError for an
    unknown name.
    """
    if name not in _WRITERS:
        raise KeyError(f"no checkpoint {name!r}; there are {', '.join(NAMES)}")
    root = Path(root)
    directory = root / name
    if _is_current(directory):
        return directory
    root.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        _WRITERS[name](aside)
        write_tokenizer(aside, [IMAGE_TOKEN] if name == "blip2" else [])
        (aside / _STAMP).write_text(json.dumps({"name": name, "revision": _REVISION}) + "\n")
        aside.chmod(0o755)
        if directory.exists() and not _is_current(directory):
            shutil.rmtree(directory)
        try:
            os.rename(aside, directory)
        except OSError:
            if not _is_current(directory):  # else another process was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _is_current(directory: Path) -> bool:
    try:
        stamp = json.loads((directory / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp.get("revision") == _REVISION)
