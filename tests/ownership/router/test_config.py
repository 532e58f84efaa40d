"""The configuration of a router: what is refused, and how it says so."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_connector.errors import RouterConfigError
from ownership.router.config import KEYS, read_config, read_workers
from ownership.router.opening import open_identity
from ownership.router.serving import serve
from tests.ownership.router.identity.tokenizers_of_kinds import model_tokenizer


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


WORKERS = ["http://a:1"]


def test_what_would_fail_once_the_router_listens_is_refused_when_it_is_read(tmp_path: Path) -> None:
    wrong = {
        "directory": "redis://:hidden@",
        "decisions": str(tmp_path),
        "client_s": 5_000_000.0,
        "drain_s": 1e300,
        "max_body_mib": 1e308,
        "max_in_flight": 1.5,
        "max_connections": 0,
        "otlp_traces_endpoint": "http://localhost:4318/",
    }
    found = problems(tmp_path, {"workers": WORKERS} | wrong)
    assert [line.partition(": ")[0] for line in found] == list(wrong)
    directory, decisions, client, *_, in_flight, connections, collector = found
    assert "expected host or host:port" in directory
    assert "hidden" not in directory
    assert "is a directory: give the path of a file" in decisions
    assert "expected at most 604800 seconds" in client
    assert "expected a whole number from 1 to 1048576, got 1.5" in in_flight
    assert "expected a whole number from 1 to 1048576, got 0" in connections
    assert "expected http://host:port/path" in collector
    assert problems(tmp_path, {"workers": WORKERS, "directory": "redis://127.0.0.1:notaport"})


def test_a_redis_that_is_down_stops_no_router(tmp_path: Path) -> None:
    url = "redis://127.0.0.1:1"
    assert read_config(write(tmp_path, {"workers": WORKERS, "directory": url})).directory == url


@pytest.mark.parametrize(
    ("key", "value", "module"),
    [
        ("directory", "redis://a", "redis"),
        ("ext_proc_port", 9002, "grpc"),
        ("otlp_traces_endpoint", "http://a:1/v1/traces", "opentelemetry"),
    ],
)
def test_a_key_whose_extra_is_missing_says_what_to_install(
    key: str, value: Any, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    [problem] = problems(tmp_path, {"workers": WORKERS, key: value})
    assert problem.startswith(f"{key}: ")
    assert "pip install 'heterocache[" in problem


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"port": 9, "ext_proc_port": 9}, "ext_proc_port: 9 is `port`, too"),
        ({"decisions": "{folder}/log"}, "decisions: least_loaded writes none"),
        ({"ext_proc_tls": "{folder}"}, "ext_proc_tls: .* set ext_proc_port"),
    ],
)
def test_keys_that_are_right_alone_and_wrong_together_are_refused(
    keys: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).touch()
    given = {k: v.format(folder=tmp_path) if isinstance(v, str) else v for k, v in keys.items()}
    [found] = problems(tmp_path, {"workers": WORKERS} | given)
    assert re.search(problem, found)


def test_a_key_that_is_given_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    text = "workers: [{url: 'http://a:1', url: 'http://b:1'}]\nport: 1\nport: 2\nqueue_s: -1\n"
    found = problems(tmp_path, text)
    assert "port: given twice, in lines 2 and 3" in found
    assert "url: given twice, in lines 1 and 1" in found
    assert found[-1].startswith("queue_s: expected")


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
        ([{"url": "http://a:1", "role": "x"}], "role: expected one of 'both', 'prefill', 'decode'"),
        (["http://a:1", "http://a:1"], "two workers named 'a:1'"),
        (["http://127."], "expected http://host:port"),
        (["http://10.0.0"], "expected http://host:port"),
        (["http://10.0.0.1:"], "expected http://host:port"),
        (["http://a\n:1"], "expected http://host:port"),
        ([{"url": "http://a:1", "name": "a\r\nb"}], "name: expected text without control"),
    ],
)
def test_a_worker_that_is_none_is_refused(workers: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(RouterConfigError, match=problem):
        read_config(write(tmp_path, {"workers": workers}))


def test_every_entry_that_is_wrong_is_named_without_its_password(tmp_path: Path) -> None:
    entries = ["a:1", "http://b:2", "http://user:hidden@c:3", {"url": "http://d:4", "drain": 1}]
    one, two, three, port = problems(tmp_path, {"workers": entries, "port": "x"})
    assert one.startswith("workers[0].url: ")
    assert two.startswith("workers[2].url: ")
    assert "hidden" not in two
    assert three.startswith("workers[3].drain: ")
    assert port.startswith("port: ")
    listed = write(tmp_path, entries).rename(tmp_path / "workers.yaml")
    in_file = problems(tmp_path, {"workers_file": str(listed), "port": "x"})
    assert len(in_file) == 4
    assert any(f"workers_file: {listed}: workers[0].url: " in line for line in in_file)


def test_workers_have_names_and_roles_and_may_drain(tmp_path: Path) -> None:
    entries = [
        "http://a:1/",
        {"url": "https://[::1]:2", "name": "b", "drain": True, "role": "decode"},
    ]
    one, two = read_config(write(tmp_path, {"workers": entries})).workers
    assert one == ("a:1", "http://a:1", False, "both")
    assert two == ("b", "https://[::1]:2", True, "decode")


def test_the_workers_of_all_sources_together_must_have_the_roles(tmp_path: Path) -> None:
    prefill = {"url": "http://a:1", "role": "prefill"}
    listed = write(tmp_path, [{"url": "http://b:1", "role": "decode"}]).rename(tmp_path / "more")
    keys = {"policy": "static_pd", "directory": "memory://", "workers": [prefill]}
    assert problems(tmp_path, keys) == ["policy: static_pd needs a worker with `role: decode`"]
    assert read_config(write(tmp_path, keys | {"workers_file": str(listed)})).workers_file == listed


def test_a_file_of_workers_may_be_empty_but_not_wrong(tmp_path: Path) -> None:
    assert read_workers(write(tmp_path, "")) == ()
    with pytest.raises(RouterConfigError, match=r"fleet.yaml: workers: expected a list"):
        read_workers(write(tmp_path, "a: 1"))


@pytest.mark.parametrize("value", ["2024-02-30", "0x_", "!!int abc"])
def test_a_file_with_a_value_that_yaml_cannot_make_is_refused(value: str, tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(f"- {{url: 'http://a:1', name: {value}}}")
    with pytest.raises(RouterConfigError, match="not YAML"):
        read_workers(path)


def test_secrets_are_read_from_files_and_shown_nowhere(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hidden-text\n")
    keys = {name: str(tmp_path / "key") for name in ("api_keys", "worker_api_key")}
    config = read_config(write(tmp_path, {"workers": ["http://a:1"], **keys}))
    assert config.worker_api_key == "hidden-text"
    assert "hidden" not in repr(config)
    shown = problems(tmp_path, {"workers": WORKERS, **dict.fromkeys(keys, "sk-hidden")})
    assert all("expected the path of a file" in line and "hidden" not in line for line in shown)
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


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_command_ends_before_it_listens(processes: str, tmp_path: Path) -> None:
    keys = {"workers": WORKERS, "port": 0, "directory": "redis://127.0.0.1:notaport"}
    done = run("--config", str(write(tmp_path, keys)), "--processes", processes)
    assert done.returncode == 2
    assert "directory: expected host or host:port" in done.stderr
    assert "listening" not in done.stderr


def test_more_connections_than_open_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    assert problems(tmp_path, {"workers": WORKERS, "max_connections": 1921}) == [
        "max_connections: 1921 need 4098 open files, and a process may have 4096 here: raise that "
        "(`ulimit -Hn`, LimitNOFILE), or set a smaller number"
    ]


def test_several_processes_need_a_port_for_the_endpoint_picker_that_proxies_know(
    tmp_path: Path,
) -> None:
    pytest.importorskip("grpc")
    # Nobody has that address, so without the check it ends there.
    keys = {"workers": WORKERS, "host": "203.0.113.1", "ext_proc_port": 0}
    with pytest.raises(RouterConfigError, match="ext_proc_port: 0 would be another port in each"):
        serve(write(tmp_path, keys), processes=2)


@pytest.mark.parametrize("key", ["port", "ext_proc_port"])
def test_a_port_that_is_taken_is_named(key: str, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another router does
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        keys = {"workers": WORKERS, "host": "127.0.0.1", "port": 0} | {key: port}
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


def test_the_chat_template_of_the_workers_is_read_from_a_file(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ x }}{{ m.content }}{% endfor %}")
    path = tmp_path / "fleet.yaml"
    path.write_text(
        f"workers: [http://a:1]\nchat_template: {template}\nchat_template_kwargs: {{x: '!'}}\n"
    )
    identity = open_identity(read_config(path))
    identity.tokenizer = model_tokenizer("llama3")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    [prompt] = identity.read("/v1/chat/completions", body)
    assert prompt.text == "<user>!Hi"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("chat_template: /nowhere", "cannot read /nowhere: No such file or directory"),
        ("chat_template: 5", "expected the path of a file, got 5"),
        ("chat_template_kwargs: [x]", "expected names with values"),
        ("chat_template_kwargs: {1: x}", "expected names with values"),
    ],
)
def test_a_template_that_is_none_is_refused(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"workers: [http://a:1]\n{line}\n")
    with pytest.raises(RouterConfigError, match=re.escape(problem)):
        read_config(path)
