"""`python -m examples.checkpoints OUT_DIR [MODEL ...]`: write checkpoints (default: all)."""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.checkpoints import NAMES, add_models, write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.checkpoints", description=__doc__)
    parser.add_argument("out_dir", type=Path)
    add_models(parser, NAMES)
    arguments = parser.parse_args()
    for name in arguments.models:
        directory = write_checkpoint(name, arguments.out_dir)
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(f"{directory}  {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
