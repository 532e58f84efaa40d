import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector import machine
from hetero_connector.config import KEYS, OTHER_NAMES, HeteroConfig, markdown_table
from hetero_connector.config_values import without_password
from hetero_connector.errors import ConfigError
from hetero_connector.machine import Disk, Memory
from hetero_connector.units import GIB


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: Memory(64 * GIB, 48 * GIB))
    monkeypatch.setattr(machine, "disk", lambda directory: Disk(1000 * GIB, 100 * GIB))


def config(**extra: Any) -> HeteroConfig:
    return HeteroConfig.from_extra_config(extra)


def test_no_extra_config_works_with_dram_only() -> None:
    assert config() == HeteroConfig()
    assert config().dram_gib is None, "it depends on the model"
    assert config().ssd_dir is None
    assert config().ssd_bytes == 0


def test_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{}")
    extra = {
        "dram_gib": 2,
        "ssd_dir": str(tmp_path / "new"),
        "ssd_gib": 1.5,
        "chunk_tokens": 512,
        "layerwise": "off",
        "checkpoints": "periodic:4",
        "planner": "always_load",
        "replay": "on",
        "planner_profile": str(tmp_path / "profile.json"),
        "load_deadline_s": 0.25,
        "directory": "redis://host:6379/0?fleet=a",
        "lease_s": 3.0,
        "replica_ttl_s": 90.0,
        "worker_name": "ann",
        "peer_host": "127.0.0.1",
        "adopt_from": str(tmp_path / "ssds"),
        "tp_sizes": "any",
        "trust_client_media_ids": True,
        "eviction": "value",
        "ssd_write_gib_per_day": 40.0,
        "prefetch": "hint",
        "exact_handoffs": True,
        "verify": "all",
    }
    assert (
        set(extra) == {k.name for k in KEYS} == {f.name for f in dataclasses.fields(HeteroConfig)}
    )
    read = config(**extra)
    assert dataclasses.asdict(read) == {
        **extra,
        "ssd_dir": tmp_path / "new",
        "adopt_from": tmp_path / "ssds",
        "planner_profile": tmp_path / "profile.json",
    }
    assert (read.dram_bytes, read.ssd_bytes) == (2 * GIB, 3 * GIB // 2)
    assert read.ssd_write_bytes_per_day == 40 * GIB
    assert isinstance(read.dram_gib, float)


@pytest.mark.parametrize("key", ["dram_gib", "ssd_gib", "load_deadline_s", "ssd_write_gib_per_day"])
@pytest.mark.parametrize(
    "value", [True, "4", None, [], 0, -1, -0.0, math.nan, math.inf, -math.inf, 10**400, 1j]
)
def test_a_wrong_number_names_the_key(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'.*number above 0") as caught:
        config(**{"ssd_dir": str(tmp_path), key: value})
    assert caught.value.key == key


@pytest.mark.parametrize("key", ["dram_gib", "ssd_gib", "ssd_write_gib_per_day"])
@pytest.mark.parametrize("value", [1e-10, 1.6e-296])
def test_less_than_a_byte_is_refused(key: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'.*less than one byte"):
        config(**{"ssd_dir": str(tmp_path), key: value})


@pytest.mark.parametrize("value", [True, "256", None, 0, -256, 256.0, math.nan, 10**21])
def test_wrong_chunk_tokens(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'chunk_tokens'.*whole number above 0"):
        config(chunk_tokens=value)


@pytest.mark.parametrize(
    "key", ["ssd_dir", "planner_profile", "adopt_from", "worker_name", "peer_host", "directory"]
)
def test_half_a_character_names_the_key(key: str) -> None:
    """JSON may have a lone surrogate, which no file name and no record can hold."""
    extra = {"directory": "memory://"} | {key: "/tmp/\ud800"}
    with pytest.raises(ConfigError, match=rf"'{key}'.*expected .*ud800") as caught:
        config(**extra)
    str(caught.value).encode()


@pytest.mark.parametrize("value", [None, 0, 1, "true", "", []])
def test_a_boolean_key_takes_nothing_else(value: object) -> None:
    with pytest.raises(ConfigError, match=r"exact_handoffs.*expected true or false"):
        config(exact_handoffs=value)


@pytest.mark.parametrize("key", ["layerwise", "planner", "verify", "eviction"])
@pytest.mark.parametrize("value", [True, None, "ON", "", "both", 1, ["on"]])
def test_a_wrong_choice_names_the_key_and_the_choices(key: str, value: object) -> None:
    first = r"'(auto|cost|ssd|leaf_lru)', "
    with pytest.raises(ConfigError, match=rf"'{key}'.*one of {first}") as caught:
        config(**{key: value})
    assert caught.value.key == key


@pytest.mark.parametrize("value", ["adaptive", "full", "zero", "periodic:1", "periodic:64"])
def test_every_checkpoint_policy_is_accepted(value: str) -> None:
    assert config(checkpoints=value).checkpoints == value


@pytest.mark.parametrize(
    "value",
    [True, 4, None, "", "FULL", "periodic", "periodic:", "periodic:0", "periodic:-1",
     "periodic:04", "periodic:1.5", "periodic:\u0664", "full:2", "periodic:4\n", ["full"]],
)  # fmt: skip
def test_another_checkpoint_policy_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'checkpoints'.*'periodic:N'"):
        config(checkpoints=value)


@pytest.mark.parametrize(
    "value",
    [True, 3, None, "", "  ", "a\0b", b"/tmp", "~no-such-user-here/x", "/tmp/" + "x" * 5000],
)
def test_a_wrong_ssd_dir_names_the_key(value: object) -> None:
    with pytest.raises(ConfigError, match="'ssd_dir'"):
        config(ssd_dir=value)


@pytest.mark.parametrize("key", ["ssd_dir", "planner_profile", "adopt_from"])
def test_a_url_is_no_path(key: str) -> None:
    extra = {"directory": "memory://"} | {key: "file:///nvme/kv"}
    with pytest.raises(ConfigError, match=rf"'{key}'.*: drop file:// from 'file:///nvme/kv'"):
        config(**extra)


@pytest.mark.parametrize("value", [True, None, "", "a\0b", "~no-such-user-here/x", "/no/such/file"])
def test_a_wrong_planner_profile_names_the_key(value: object) -> None:
    with pytest.raises(ConfigError, match="'planner_profile'"):
        config(planner_profile=value)


def test_an_ssd_dir_that_is_no_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "disk", lambda directory: Disk(0, 0))
    with pytest.raises(ConfigError, match=r"of /proc/x \(proc\) has no space left, or is no disk"):
        config(ssd_dir="/proc/x")


def test_an_ssd_dir_that_is_or_lies_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in ("file", "file/below"):
        with pytest.raises(ConfigError, match=r"'ssd_dir'.*file is a file"):
            config(ssd_dir=str(tmp_path / path))


def test_an_ssd_dir_is_made_absolute_and_its_tilde_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert config(ssd_dir="a/../b").ssd_dir == tmp_path / "b"
    assert config(ssd_dir="~/cache").ssd_dir == tmp_path / "home" / "cache"
    assert config(ssd_dir=tmp_path / "c").ssd_dir == tmp_path / "c"
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "value", ["", "memory://", "redis://host:6379/0", "rediss://host", "redis+cluster://a,b"]
)
def test_accepted_directories(value: str) -> None:
    assert config(directory=value).directory == value


@pytest.mark.parametrize("value", [True, None, "memory", "http://x", 1, "host:6379"])
def test_another_directory_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"'directory'.*'memory://'.*redis://, redis\+sentinel://"
    ):
        config(directory=value)


@pytest.mark.parametrize("url", ["redis://:secret@a", "redis://a?sentinel_password=secret&fleet=x"])
def test_a_directory_is_shown_without_passwords(url: str) -> None:
    assert "secret" not in without_password(url)


def test_the_error_of_a_directory_hides_its_password() -> None:
    with pytest.raises(ConfigError) as refused:
        config(directory="http://user:secret@host")
    assert "host" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("value", [0, 0.9, 3601, "10", True])
def test_a_lease_is_neither_too_short_nor_endless(value: object) -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        config(directory="memory://", lease_s=value)


@pytest.mark.parametrize("value", ["", "a" * 129, "ä" * 65, 3, None])
def test_a_worker_name_must_fit_a_record(value: object) -> None:
    with pytest.raises(ConfigError, match=r"worker_name.*1 to 128 bytes"):
        config(directory="memory://", worker_name=value)


def test_peer_host_must_be_an_address_of_this_machine() -> None:
    assert config(directory="memory://", peer_host="127.0.0.1").peer_host == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"peer_host.*'192.0.2.1' is no address.*127.0.0.1"):
        config(directory="memory://", peer_host="192.0.2.1")


@pytest.mark.parametrize(
    "given",
    [{"lease_s": 5}, {"replica_ttl_s": 9}, {"worker_name": "ann"}, {"peer_host": "127.0.0.1"}],
)
def test_keys_of_a_fleet_need_a_directory(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="only valid together with 'directory'"):
        config(**given)
    with pytest.raises(ConfigError, match="only valid together with 'directory'"):
        config(directory="", **given)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("dram_gb", "did you mean 'dram_gib'"),
        ("SSD_DIR", "did you mean 'ssd_dir'"),
        ("layer_wise", "did you mean 'layerwise'"),
        ("cpu_bytes_to_use", "it belongs to vLLM's offloading; the key here is 'dram_gib'"),
        ("max_local_cpu_size", "it belongs to LMCache; the key here is 'dram_gib'"),
        ("lmcache.chunk_size", "it belongs to LMCache; the key here is 'chunk_tokens'"),
        ("metadata_server", "it belongs to Mooncake; the key here is 'directory'"),
        ("colour", "the keys are dram_gib, ssd_dir"),
        (7, "the keys are"),
    ],
)
def test_an_unknown_key_is_refused_with_a_hint(key: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        HeteroConfig.from_extra_config({"dram_gib": 1, key: 1})
    assert caught.value.key == key


@pytest.mark.parametrize("key", ["ssd_gib", "ssd_write_gib_per_day"])
def test_keys_of_the_ssd_need_ssd_dir(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{key}'.*only valid together with 'ssd_dir'"):
        config(**{key: 4})


def test_capacities_beyond_the_machine_are_refused(tmp_path: Path) -> None:
    assert config(dram_gib=64).dram_gib == 64
    with pytest.raises(ConfigError, match=r"'dram_gib'.*65 GiB is more than.*64\.0 GiB"):
        config(dram_gib=65)
    assert config(ssd_dir=tmp_path, ssd_gib=1000).ssd_gib == 1000
    with pytest.raises(ConfigError, match=r"'ssd_gib'.*1001 GiB is more than.*1000\.0 GiB"):
        config(ssd_dir=tmp_path, ssd_gib=1001)


@pytest.mark.parametrize(("free_gib", "ssd_gib"), [(100, 50), (500, 64), (1, 0.5)])
def test_default_ssd_is_half_of_free_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_gib: int, ssd_gib: float
) -> None:
    monkeypatch.setattr(machine, "disk", lambda directory: Disk(1000 * GIB, free_gib * GIB))
    assert config(ssd_dir=tmp_path).ssd_gib == ssd_gib


def test_default_ssd_stays_the_same_once_the_directory_is_filled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "disk", lambda directory: Disk(1000 * GIB, 100 * GIB))
    before = config(ssd_dir=tmp_path).ssd_gib
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "slab").write_bytes(b"x" * (8 << 20))
    held = machine.bytes_under(tmp_path)
    assert held >= 8 << 20
    monkeypatch.setattr(machine, "disk", lambda directory: Disk(1000 * GIB, 100 * GIB - held))
    assert config(ssd_dir=tmp_path).ssd_gib == before


def test_a_full_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "disk", lambda directory: Disk(10 * GIB, 0))
    with pytest.raises(ConfigError, match=r"'ssd_dir'.*no space"):
        config(ssd_dir=tmp_path)


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from([k.name for k in KEYS]) | st.text(), JUNK, max_size=4))
def test_anything_is_a_config_or_a_config_error(extra: dict[str, Any]) -> None:
    refused: ConfigError | None = None
    try:
        read = HeteroConfig.from_extra_config(extra)
    except ConfigError as error:
        refused = error
    if refused:
        assert refused.key in extra
    else:
        assert set(extra) <= {k.name for k in KEYS}
        assert read.dram_gib is None or read.dram_bytes > 0


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({"ssd_dir": "/nvme/kv"}, Path("/nvme")),
        ({"ssd_dir": "/kv"}, None),
        ({}, None),
        ({"ssd_dir": "/nvme/kv", "adopt_from": "off"}, None),
        ({"adopt_from": "/shared"}, Path("/shared")),
    ],
)
def test_the_default_folder_for_adoption_is_the_parent_of_ssd_dir(
    given: dict[str, Any], folder: Path | None
) -> None:
    """But never in the whole file system, unless somebody says so."""
    assert config(directory="memory://", **given).adopt_from == folder


def test_the_table_has_a_row_of_four_cells_for_every_key() -> None:
    rows = markdown_table(KEYS).splitlines()[2:]
    assert [re.match(r"\| `(\w+)` \|", row)[1] for row in rows] == [k.name for k in KEYS]  # type: ignore[index]
    assert all(row.count(" | ") == 3 for row in rows)


def test_all_wrong_keys_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config(dram_gb=1, ssd_dir=str(tmp_path), ssd_gib=-1, lease_s=3.0, chunk_tokens=0)
    lines = str(caught.value).splitlines()
    assert [re.findall(r"\['(\w+)'\]", line) for line in lines] == [
        ["dram_gb"], ["ssd_gib"], ["chunk_tokens"], ["lease_s"]
    ]  # fmt: skip
    assert caught.value.key == "dram_gb"


def test_other_connectors_keys_are_answered_with_keys_that_exist() -> None:
    names = {key.name for key in KEYS}
    for product, keys in OTHER_NAMES.items():
        assert set(keys.values()) <= names, product
        assert not set(keys) & names, product
