"""Settings of the documentation site: `make docs`."""

from __future__ import annotations

import tomllib
from pathlib import Path

_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = "HeteroCache"
author = "the HeteroCache contributors"
release = _project["version"]

extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 3
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]
"""The lexer of PromQL knows no colon in a name, and all names of vLLM have one."""

html_theme = "furo"
html_title = f"HeteroCache {release}"
copybutton_exclude = ".linenos, .gp, .go"
