"""The configuration of a router: what is refused, and how it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_connector.errors import RouterConfigError
from ownership.router.config import KEYS, read_config, read_workers


def write(folder: Path, content: Any) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    )
    return path


def problems(folder: Path, content: Any) -> list[str]:
    path = write(folder, content)
    with pytest.raises(RouterConfigError) as raised:
        read_config(path)
    lines = str(raised.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_all_wrong_keys_are_named_at_once(tmp_path: Path) -> None:
    content = {"wrokers": ["http://a:1"], "port": "80", "queue_s": -1, "workers_dns": "host"}
    one, two, three, four = problems(tmp_path, content)
    assert "'wrokers'; did you mean 'workers'?" in one
    assert two.startswith("port: expected a port")
    assert three.startswith("queue_s: expected a finite number above 0")
    assert four.startswith("workers_dns: expected host:port")


@pytest.mark.parametrize("content", ["", "[]", "just text", "{}", "workers: []", "workers:"])
def test_a_file_without_workers_is_refused(content: str, tmp_path: Path) -> None:
    assert any("workers" in problem for problem in problems(tmp_path, content))


def test_a_file_that_is_not_yaml_or_not_there_is_refused(tmp_path: Path) -> None:
    assert "not YAML" in problems(tmp_path, "workers: [")[0]
    with pytest.raises(RouterConfigError, match="No such file"):
        read_config(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        ("http://a:1", "expected a list"),
        (["a:8000"], r"workers\[0\].url: expected http://host:port"),
        (["http://a:1/v1"], "expected http://host:port"),
        (["http://user:secret@a:1"], "expected http://host:port"),
        (["http://a:99999"], "expected http://host:port"),
        (["ftp://a:1"], "expected http://host:port"),
        ([5], "expected a URL, or an object"),
        ([{"name": "a"}], "expected a URL, or an object"),
        ([{"url": "http://a:1", "weight": 2}], "unknown key 'weight'; the keys are url, name"),
        ([{"url": "http://a:1", "drain": "yes"}], "drain: expected true or false"),
        (["http://a:1", "http://a:1"], "two workers named 'a:1'"),
    ],
)
def test_a_worker_that_is_none_is_refused(workers: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(RouterConfigError, match=problem):
        read_config(write(tmp_path, {"workers": workers}))


def test_workers_have_names_and_roles_and_may_drain(tmp_path: Path) -> None:
    entries = [
        "http://a:1/",
        {"url": "https://[::1]:2", "name": "b", "drain": True, "role": "decode"},
    ]
    one, two = read_config(write(tmp_path, {"workers": entries})).workers
    assert one == ("a:1", "http://a:1", False, "both")
    assert two == ("b", "https://[::1]:2", True, "decode")


def test_a_file_of_workers_may_be_empty_but_not_wrong(tmp_path: Path) -> None:
    assert read_workers(write(tmp_path, "")) == ()
    with pytest.raises(RouterConfigError, match=r"fleet.yaml: workers: expected a list"):
        read_workers(write(tmp_path, "a: 1"))


def test_secrets_are_read_from_files_and_shown_nowhere(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hidden-text\n")
    keys = {name: str(tmp_path / "key") for name in ("api_keys", "worker_api_key")}
    config = read_config(write(tmp_path, {"workers": ["http://a:1"], **keys}))
    assert config.worker_api_key == "hidden-text"
    assert "hidden" not in repr(config)
    (tmp_path / "key").write_text("# none\n")
    assert "has no key" in problems(tmp_path, {"workers": ["http://a:1"], **keys})[0]


def test_every_key_has_a_meaning_and_a_default() -> None:
    assert len(KEYS) > 15
    assert all(key.meaning and key.takes and key.default for key in KEYS)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetero_connector.tools.cli", "router", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_says_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    done = run("--config", str(write(tmp_path, {"prot": 1})))
    assert done.returncode == 2
    assert "did you mean 'port'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        keys = {"workers": ["http://a:1"], "host": "127.0.0.1", "port": port}
        done = run("--config", str(write(tmp_path, keys)))
    assert done.returncode == 2
    assert f"port {port}: Address already in use" in done.stderr


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from hetero_connector.tools.cli import main\n"
        f"sys.exit(main(['router', '--config', {str(tmp_path / 'fleet.yaml')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "aiohttp is missing: pip install 'heterocache[router]'" in done.stderr
