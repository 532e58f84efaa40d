from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from ownership.directory.memory import MemoryDirectory
from ownership.directory.opening import open_directory
from ownership.directory.redis import RedisDirectory


def test_a_url_opens_the_directory_in_memory_or_in_redis() -> None:
    assert isinstance(open_directory("memory://"), MemoryDirectory)
    assert isinstance(open_directory("rediss+cluster://a,b"), RedisDirectory)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("etcd://ann:hush@host", "memory://, redis:// or rediss://"),
        ("redis:/host", "begins with one of"),
        ("redis://host:x", "host or host:port"),
    ],
)
def test_a_bad_url_is_explained_without_the_password(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        open_directory(url)
    assert "hush" not in str(error.value)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_redis(name: str) -> ModuleSpec | None:
        return None if name == "redis" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_redis)
    with pytest.raises(ValueError, match=r"pip install 'heterocache\[redis\]'"):
        open_directory("redis://host")
    assert isinstance(open_directory("memory://"), MemoryDirectory)


def test_the_embedded_directory_needs_no_redis_package() -> None:
    """Importing `ownership` and using `memory://` must not import `redis`."""
    code = (
        "import sys; from ownership.directory.opening import open_directory; "
        "open_directory('memory://'); sys.exit('redis' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
