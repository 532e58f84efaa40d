"""Write the pages that are made from code and from benchmark results.

    python docs/generate.py

The pages are committed, so that they can be read without building the site. `tests/test_docs.py`
fails if one of them differs from what this script would write.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks`
sys.path.insert(0, str(Path(__file__).parent))  # tests import this file from elsewhere

from made import DOCS, NOTE, ROOT, fleets, migration, reference, table
from made.figures import FIGURES, figures, results, times

__all__ = ["FIGURES", "pages", "results"]

README_KEYS = (
    "dram_gib",
    "ssd_dir",
    "ssd_gib",
    "ssd_write_gib_per_day",
    "directory",
    "peer_host",
)


def main() -> int:
    """Write every page, and name those that changed."""
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")
    return 0


def pages() -> dict[Path, str]:
    """Return the text of every page that is made, by its path."""
    return {
        ROOT / "README.md": _readme(),
        DOCS / "guides/limits.md": _limits(),
        DOCS / "reference/config.md": reference.config(),
        DOCS / "reference/router.md": reference.router(),
        DOCS / "reference/metrics.md": reference.metrics(),
        DOCS / "reference/cli.md": reference.cli(),
        DOCS / "reference/errors.md": reference.errors(),
        DOCS / "reference/requests.md": reference.requests(),
        DOCS / "reference/compatibility.md": migration.compatibility(),
        DOCS / "guides/coming-from.md": migration.coming_from(),
        DOCS / "evidence/figures.md": figures(),
        DOCS / "evidence/simulated-fleets.md": _simulated_fleets(),
        DOCS / "decisions/index.md": _decisions(),
    }


def _readme() -> str:
    text = (ROOT / "README.md").read_text()
    text = _replaced(text, "times", times())
    return _replaced(text, "keys", _six_keys())


def _limits() -> str:
    from hetero_connector.supported_vllm import SUPPORTED_VLLM

    rows = [(version, tested) for version, tested in SUPPORTED_VLLM.items()]
    text = (DOCS / "guides/limits.md").read_text()
    return _replaced(text, "vllm", table(("vLLM", "tested"), rows))


def _simulated_fleets() -> str:
    text = (DOCS / "evidence/simulated-fleets.md").read_text()
    for name, body in fleets.regions().items():
        text = _replaced(text, name, body)
    return text


def _replaced(text: str, name: str, body: str) -> str:
    """Return the text with the region between the two marks of that name replaced."""
    region = re.compile(rf"(<!-- {name}:begin [^\n]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    assert region.search(text), f"the page has no region {name!r}"
    return region.sub(lambda found: f"{found[1]}\n{body}\n\n{found[2]}", text)


def _six_keys() -> str:
    from hetero_connector.config import KEYS

    by_name = {key.name: key for key in KEYS}
    chosen = [by_name[name] for name in README_KEYS]
    return table(
        ["key", "takes", "default", "meaning"],
        [[f"`{k.name}`", k.takes, k.default, k.meaning] for k in chosen],
    )


def _decisions() -> str:
    rows = []
    for path in sorted(DOCS.glob("decisions/0*.md")):
        title = path.read_text().partition("\n")[0]
        number, _, name = title.removeprefix("# ").partition(". ")
        assert number == str(int(path.stem[:4])), f"{path.name} has another number in its title"
        rows.append([number, f"[{name}]({path.name})"])
    names = "\n".join(path.stem for path in sorted(DOCS.glob("decisions/0*.md")))
    return f"""{NOTE}# Decisions

One page for each choice that shaped the code: its context, what was decided, and what follows.

{table(["", "decision"], rows)}

```{{toctree}}
:hidden:
:maxdepth: 1

{names}
```
"""


if __name__ == "__main__":
    sys.exit(main())
