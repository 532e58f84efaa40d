import importlib
import io
import json
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts import model_files
from hetero_connector.artifacts.model_files import (
    locate_model,
    lora_digest,
    processor_digest,
    tokenizer_digest,
    weights_digest,
)
from hetero_connector.errors import IdentityError

MIB = 1 << 20


def safetensors(tensors: dict[str, bytes], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file by the format's description, uint8 tensors only."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, data in tensors.items():
        span = [offset, offset + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": span}
        offset += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling sets in above 256 KiB, so that tests need no large files."""
    monkeypatch.setattr(model_files, "MODEL_BUDGET_BYTES", 256 << 10)
    monkeypatch.setattr(model_files, "ADAPTER_BUDGET_BYTES", 256 << 10)


def model_dir(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def test_every_byte_of_a_small_model_counts(tmp_path: Path) -> None:
    base = bytearray(safetensors({"a": bytes(3000), "b": bytes(500)}))
    digests = set()
    for position in range(0, len(base), 97):
        flipped = bytearray(base)
        flipped[position] ^= 1
        where = model_dir(tmp_path / str(position), {"model.safetensors": bytes(flipped)})
        digests.add(weights_digest(where))
    digests.add(weights_digest(model_dir(tmp_path / "base", {"model.safetensors": bytes(base)})))
    assert len(digests) == 1 + len(range(0, len(base), 97))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "m.pt", "m.pth"])
def test_large_files_are_sampled_from_end_to_end(
    tmp_path: Path, name: str, small_budget: None
) -> None:
    base = bytes(8 * MIB)
    reference = weights_digest(model_dir(tmp_path / "base", {name: base}))
    assert weights_digest(model_dir(tmp_path / "copy", {name: base})) == reference
    for position in (0, len(base) - 1):
        changed = bytearray(base)
        changed[position] = 7
        other = model_dir(tmp_path / f"at{position}", {name: bytes(changed)})
        assert weights_digest(other) != reference
    longer = model_dir(tmp_path / "longer", {name: base + b"\0"})
    assert weights_digest(longer) != reference
    noise = model_dir(tmp_path / "noise", {name: os.urandom(len(base))})
    assert weights_digest(noise) != reference


@settings(max_examples=25, deadline=None)
@given(changed=st.integers(0, 39))
def test_a_change_of_any_one_tensor_of_a_large_file_is_seen(
    tmp_path_factory: pytest.TempPathFactory, changed: int
) -> None:
    root = tmp_path_factory.mktemp("tensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "MODEL_BUDGET_BYTES", 256 << 10)
        tensors = {f"layer.{i}": bytes(100_000) for i in range(40)}
        base = model_dir(root / "base", {"model.safetensors": safetensors(tensors)})
        tensors[f"layer.{changed}"] = os.urandom(100_000)
        tuned = model_dir(root / "tuned", {"model.safetensors": safetensors(tensors)})
        assert weights_digest(base) != weights_digest(tuned)


def test_the_header_of_a_large_file_counts(tmp_path: Path, small_budget: None) -> None:
    names = [{f"{prefix}.{i}": bytes(4000) for i in range(2000)} for prefix in ("a", "b")]
    one, other = (
        model_dir(tmp_path / str(i), {"model.safetensors": safetensors(tensors)})
        for i, tensors in enumerate(names)
    )
    # The first sample alone ends before the header does, so only the header tells them apart.
    assert weights_digest(one) != weights_digest(other)


def test_reading_is_bounded_for_a_huge_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse 1 TiB file, and 200 shards of 1 GiB each, cost no more than the budget."""
    read = 0

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            nonlocal read
            data = super().read(size)
            read += len(data)
            return data

    monkeypatch.setattr(model_files, "_open", lambda path: Counting(path, "rb"))
    huge = tmp_path / "huge"
    huge.mkdir()
    with open(huge / "model.bin", "wb") as file:
        file.truncate(1 << 40)
    weights_digest(huge)
    assert 0 < read <= model_files.MODEL_BUDGET_BYTES
    read = 0
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for i in range(200):
        with open(sharded / f"model-{i:05}.safetensors", "wb") as file:
            file.truncate(1 << 30)
    weights_digest(sharded)
    assert 0 < read <= 1.2 * model_files.MODEL_BUDGET_BYTES


def test_names_and_shard_order_count(tmp_path: Path) -> None:
    first = model_dir(tmp_path / "1", {"a.safetensors": b"x" * 100, "b.safetensors": b"y" * 100})
    swapped = model_dir(tmp_path / "2", {"a.safetensors": b"y" * 100, "b.safetensors": b"x" * 100})
    renamed = model_dir(tmp_path / "3", {"a.safetensors": b"x" * 100, "c.safetensors": b"y" * 100})
    assert len({weights_digest(d) for d in (first, swapped, renamed)}) == 3


def test_code_and_shard_index_count_trainer_leftovers_do_not(tmp_path: Path) -> None:
    base = {"model.safetensors": b"w" * 100}
    reference = weights_digest(model_dir(tmp_path / "base", base))
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "README.md", "x.json"):
        assert weights_digest(model_dir(tmp_path / name, {**base, name: b"1"})) == reference
    for name in ("modeling_x.py", "model.safetensors.index.json"):
        assert weights_digest(model_dir(tmp_path / name, {**base, name: b"1"})) != reference


def test_weights_in_a_subfolder_that_vllm_loads_count(tmp_path: Path) -> None:
    base = {"model.safetensors": b"w" * 100}
    digests = {weights_digest(model_dir(tmp_path / "base", base))}
    for content in (b"1", b"2"):
        where = model_dir(tmp_path / repr(content), base)
        model_dir(where / "whisper-large-v3", {"model.safetensors": content})
        digests.add(weights_digest(where))
    assert len(digests) == 3


@pytest.mark.parametrize("folder", ["original", "metal", "checkpoint-500", "an-adapter"])
def test_weights_in_other_subfolders_do_not_count(tmp_path: Path, folder: str) -> None:
    """A snapshot with them is the model that vLLM downloads without them."""
    base = model_dir(tmp_path / "base", {"model.safetensors": b"w" * 100})
    reference = weights_digest(base)
    model_dir(base / folder, {"model.safetensors": b"other"})
    assert weights_digest(base) == reference


def test_code_may_be_elsewhere_than_the_weights(tmp_path: Path) -> None:
    weights, index = {"model.safetensors": b"w"}, {"model.safetensors.index.json": b"i"}
    whole = model_dir(tmp_path / "whole", {**weights, **index, "modeling_x.py": b"1"})
    apart = model_dir(tmp_path / "weights", {**weights, **index})
    code = model_dir(tmp_path / "code", {"modeling_x.py": b"1"})
    assert weights_digest(apart, code) == weights_digest(whole)
    (code / "modeling_x.py").write_bytes(b"2")
    assert weights_digest(apart, code) != weights_digest(whole)


def test_a_symlinked_cache_a_copy_and_a_moved_directory_are_the_same_model(tmp_path: Path) -> None:
    content = safetensors({"a": bytes(100)})
    plain = model_dir(tmp_path / "plain", {"model.safetensors": content})
    blobs = model_dir(tmp_path / "blobs", {"0a1b2c": content})
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blobs / "0a1b2c")
    reference = weights_digest(plain)
    assert weights_digest(snapshot) == reference
    plain.rename(tmp_path / "moved")
    assert weights_digest(tmp_path / "moved") == reference


def test_a_file_is_hashed_again_only_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real_open = model_files._open

    def counting(path: str) -> object:
        opened.append(Path(path).name)
        return real_open(path)

    monkeypatch.setattr(model_files, "_open", counting)
    where = model_dir(tmp_path / "cached", {"a.safetensors": b"a" * 50, "b.safetensors": b"b" * 50})
    reference = weights_digest(where)
    assert weights_digest(where) == reference
    assert opened == ["a.safetensors", "b.safetensors"]
    (where / "b.safetensors").write_bytes(b"c" * 51)
    assert weights_digest(where) != reference
    assert opened[2:] == ["b.safetensors"]


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    where = model_dir(tmp_path / "empty", {"config.json": b"{}", "training_args.bin": b"x"})
    with pytest.raises(IdentityError, match=r"contains no weights .*\.safetensors"):
        weights_digest(where)
    with pytest.raises(IdentityError, match="cannot list"):
        weights_digest(tmp_path / "nowhere")


def test_a_dangling_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "pruned-blob")
    with pytest.raises(IdentityError, match=r"cannot read .*model\.safetensors"):
        weights_digest(tmp_path)


@pytest.mark.parametrize(
    "text", [b"{" + b"}" * 31, b'{"a":1}' + b" " * 25, b'{"a":{}}' + b" " * 24]
)
def test_a_damaged_header_is_an_error(tmp_path: Path, text: bytes, small_budget: None) -> None:
    content = struct.pack("<Q", len(text)) + text + bytes(MIB)
    where = model_dir(tmp_path, {"model.safetensors": content})
    with pytest.raises(IdentityError, match="damaged safetensors header"):
        weights_digest(where)


def test_every_tokenizer_file_counts_in_full(tmp_path: Path) -> None:
    names = [
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
        *("merges.txt", "special_tokens_map.json", "added_tokens.json", "qwen.tiktoken"),
    ]
    base = dict.fromkeys(names, b"x" * 300_000)
    reference = tokenizer_digest(model_dir(tmp_path / "base", base))
    for name in names:
        changed = {**base, name: b"x" * 150_000 + b"y" + b"x" * 149_999}
        assert tokenizer_digest(model_dir(tmp_path / name, changed)) != reference
    ignored = {**base, "config.json": b"1", "model.safetensors": b"2"}
    assert tokenizer_digest(model_dir(tmp_path / "more", ignored)) == reference
    assert tokenizer_digest(model_dir(tmp_path / "none", {})) != reference


def test_weights_and_config_of_an_adapter_count(tmp_path: Path) -> None:
    base = {"adapter_model.safetensors": b"w" * 200_000, "adapter_config.json": b'{"r": 8}'}
    reference = lora_digest(model_dir(tmp_path / "base", base))
    weights = {**base, "adapter_model.safetensors": b"w" * 100_000 + b"v" + b"w" * 99_999}
    config = {**base, "adapter_config.json": b'{"r": 4}'}
    assert lora_digest(model_dir(tmp_path / "copy", base)) == reference
    assert lora_digest(model_dir(tmp_path / "weights", weights)) != reference
    assert lora_digest(model_dir(tmp_path / "config", config)) != reference
    assert weights_digest(tmp_path / "base") != reference
    with pytest.raises(IdentityError, match="no LoRA adapter weights"):
        lora_digest(model_dir(tmp_path / "none", {"adapter_config.json": b"{}"}))


def test_an_adapter_within_the_budget_is_read_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 8 << 20  # as large as no samples cover
    base = {"adapter_model.safetensors": b"w" * size, "adapter_config.json": b"{}"}
    between_samples = b"w" * 100_000 + b"v" + b"w" * (size - 100_001)
    changed = {**base, "adapter_model.safetensors": between_samples}
    paths = [model_dir(tmp_path / "base", base), model_dir(tmp_path / "changed", changed)]
    monkeypatch.setattr(model_files, "ADAPTER_BUDGET_BYTES", size)
    assert lora_digest(paths[0]) == lora_digest(paths[1])  # the power: samples miss it
    monkeypatch.setattr(model_files, "ADAPTER_BUDGET_BYTES", size + 2)
    assert lora_digest(paths[0]) != lora_digest(paths[1])


def test_a_changed_adapter_of_equal_size_and_time_has_another_digest(tmp_path: Path) -> None:
    """`cp -p` and `rsync -t` leave such files."""
    path = model_dir(tmp_path / "a", {"adapter_model.safetensors": b"first"})
    weights = path / "adapter_model.safetensors"
    reference, times = lora_digest(path), weights.stat()
    weights.write_bytes(b"other")
    while weights.stat().st_ctime_ns == times.st_ctime_ns:  # the kernel's clock ticks coarsely
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert lora_digest(path) != reference


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_every_processor_file_counts_in_full(tmp_path: Path, name: str) -> None:
    base = {name: b'{"image_mean": [0.5]}', "model.safetensors": b"w"}
    changed = {**base, name: b'{"image_mean": [0.4]}'}
    reference = processor_digest(model_dir(tmp_path / "base", base))
    assert processor_digest(model_dir(tmp_path / "copy", {**base, "README.md": b"x"})) == reference
    assert processor_digest(model_dir(tmp_path / "changed", changed)) != reference
    assert processor_digest(model_dir(tmp_path / "none", {})) != reference


def test_a_local_path_is_located_as_it_is(tmp_path: Path) -> None:
    assert locate_model(str(tmp_path)).path == tmp_path
    assert locate_model(str(tmp_path)).revision is None


def test_a_repo_id_is_found_in_the_local_cache_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--name"
    model_dir(repo / "snapshots" / commit, {"model.safetensors": b"w"})
    model_dir(repo / "refs", {"main": commit.encode()})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for revision in (None, "main", commit):
        source = locate_model("org/name", revision)
        assert source.path == repo / "snapshots" / commit
        assert source.revision == commit
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another"))
    assert locate_model("org/name", None, str(tmp_path)).path == repo / "snapshots" / commit
    with pytest.raises(IdentityError, match="--download-dir"):
        locate_model("org/name")


@pytest.mark.parametrize("model", ["org/absent", "not a repo id", "/no/such/path"])
def test_the_error_of_a_missing_model_says_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(IdentityError, match=r"Pass a local path, or a revision .*download-dir\)$"):
        locate_model(model, "v1")
