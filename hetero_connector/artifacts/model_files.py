"""Digests of a model's files: which weights, tokenizer and adapters made the bytes.

Hashing a 700 GB checkpoint at every start is out of the question, so weights are sampled:
name, size and safetensors header of every file, and content up to a fixed number of bytes
per model, spread evenly over each file with a piece of (up to 4,096) tensors besides. A
model within that budget is read whole. Only names inside the model's directory count, so
a copy, a symlinked Hugging Face cache and a moved directory are the same model.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path

from hetero_connector.artifacts.canonical import encode
from hetero_connector.errors import IdentityError

DIGEST_BYTES = 32
SAMPLE_BYTES = 64 << 10
MAX_SAMPLES_PER_FILE = 64
MIN_SAMPLES_PER_FILE = 4
MODEL_BUDGET_BYTES = 128 << 20
TENSOR_SAMPLE_BYTES = 4 << 10
MAX_TENSOR_SAMPLES = 4096
ADAPTER_BUDGET_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Left by trainers beside the weights; vLLM skips them too (model_loader/weight_utils.py).
_TRAINER_STEMS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
_TOKENIZER_NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "spiece.model",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are on this machine."""

    path: Path
    """Directory, or the single file of a GGUF model."""
    revision: str | None = None
    """Commit hash of a Hugging Face snapshot."""


def locate_model(model: str, revision: str | None = None) -> ModelSource:
    """The local files of `model`: a path, or a Hugging Face repo id that is in the local cache.

    Never goes online. Raises IdentityError when the files are not on this machine.
    """
    path = Path(model).expanduser()
    if path.exists():
        return ModelSource(path)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise _not_here(model, revision, "huggingface_hub is not installed") from error
    try:
        snapshot = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise _not_here(model, revision, "it is not in the Hugging Face cache") from error
    return ModelSource(snapshot, snapshot.name)


def _not_here(model: str, revision: str | None, why: str) -> IdentityError:
    at = f" at revision {revision!r}" if revision else ""
    return IdentityError(
        f"cannot find the files of model {model!r}{at}: no such path, and {why}. Pass a local "
        "path, or a revision that is in the cache (HF_HOME): state is named by the weights"
    )


def weights_digest(model_dir: Path) -> bytes:
    """32 bytes that differ between two checkpoints, also of the same shape.

    Reads at most about 150 MiB, plus safetensors headers. Raises IdentityError when there
    is no weight file, or one is unreadable or no safetensors file by its header.
    """
    files = [model_dir] if model_dir.is_file() else _files(model_dir, _is_weight)
    if not files:
        raise IdentityError(
            f"{model_dir} holds no weights ({', '.join('*' + s for s in _WEIGHT_SUFFIXES)}), "
            "so its state cannot be told from another model's: pass the directory with the weights"
        )
    beside = [] if model_dir.is_file() else _files(model_dir, _is_code_or_index)
    content = [_named_digests(files, MODEL_BUDGET_BYTES), _named_digests(beside, None)]
    return _digest(encode(["weights", *content]))


def tokenizer_digest(tokenizer_dir: Path) -> bytes:
    """32 bytes over the full content of the tokenizer's files; of none, where there are none."""
    files = _files(tokenizer_dir, _is_tokenizer) if tokenizer_dir.is_dir() else []
    return _digest(encode(["tokenizer", _named_digests(files, None)]))


def processor_digest(model_dir: Path) -> bytes:
    """32 bytes over how images, audio and video are prepared; of none, where nothing says so."""
    files = _files(model_dir, _is_processor) if model_dir.is_dir() else []
    return _digest(encode(["processor", _named_digests(files, None)]))


def lora_digest(adapter_dir: Path) -> bytes:
    """32 bytes over an adapter's weights and config, whole up to 64 MiB, sampled above.

    Raises IdentityError when the directory holds no adapter weights.
    """
    files = _files(adapter_dir, lambda name: _is_weight(name) or name.endswith(".json"))
    if not any(_is_weight(f.name) for f in files):
        raise IdentityError(f"{adapter_dir} holds no LoRA adapter weights")
    return _digest(encode(["lora", _named_digests(files, ADAPTER_BUDGET_BYTES)]))


def _is_weight(name: str) -> bool:
    return name.endswith(_WEIGHT_SUFFIXES) and not name.startswith(_TRAINER_STEMS)


def _is_code_or_index(name: str) -> bool:
    """Code that `trust_remote_code` runs, and the list of which shard holds which tensor."""
    return name.endswith((".py", ".index.json"))


def _is_tokenizer(name: str) -> bool:
    return name in _TOKENIZER_NAMES or name.endswith(".tiktoken")


def _is_processor(name: str) -> bool:
    return "processor" in name and name.endswith("config.json")


def _files(directory: Path, wanted: Callable[[str], bool]) -> list[Path]:
    try:
        names = sorted(name for name in os.listdir(directory) if wanted(name))
    except OSError as error:
        raise IdentityError(f"cannot list {directory}: {error.strerror}") from error
    paths = [directory / name for name in names]
    # A dangling link (a pruned cache) stays in, to be an error when it is read.
    return [path for path in paths if path.is_file() or not path.exists()]


def _named_digests(files: Iterable[Path], budget_bytes: int | None) -> list[list[object]]:
    """Name and content digest of each file, reading about `budget_bytes` of all (None: all)."""
    try:
        stats = [(path, path.stat()) for path in files]
        total = sum(stat.st_size for _, stat in stats)
        named: list[list[object]] = []
        for path, stat in stats:
            fits = budget_bytes is None or total <= budget_bytes
            whole = fits or stat.st_size <= (budget_bytes or 0) // len(stats)
            shares = 1 if whole else len(stats)
            # The time of the last change, unlike that of the last write, cannot be set back.
            seen = (stat.st_dev, stat.st_ino, stat.st_ctime_ns)
            digest = _file_digest(os.path.realpath(path), seen, stat.st_size, whole, shares)
            named.append([path.name, stat.st_size, digest])
    except OSError as error:
        raise IdentityError(f"cannot read {error.filename}: {error.strerror}") from error
    return named


@lru_cache(maxsize=4096)
def _file_digest(
    path: str, seen: tuple[int, int, int], size: int, whole: bool, shares: int
) -> bytes:
    """Digest of one file's content; cached for as long as it is the same file, unchanged.

    `shares`: how many files share the model's budget of samples.
    """
    with _open(path) as file:
        if whole:
            return hashlib.file_digest(file, _blake2b).digest()
        state = _blake2b()
        extents = _even_extents(size, shares)
        # Told by content, not by name: a Hugging Face blob has no suffix.
        header = _safetensors_header(file, size)
        if header is not None:
            state.update(header)
            extents += _tensor_extents(header, path, MAX_TENSOR_SAMPLES // shares)
        for start, length in extents:
            file.seek(start)
            state.update(file.read(length))
        return state.digest()


def _open(path: str) -> FileIO:
    return FileIO(path, "rb")


def _even_extents(size: int, shares: int) -> list[tuple[int, int]]:
    """(offset, bytes) of samples spread evenly, the first and last bytes of the file included."""
    most = MODEL_BUDGET_BYTES // SAMPLE_BYTES // shares
    count = max(MIN_SAMPLES_PER_FILE, min(MAX_SAMPLES_PER_FILE, most))
    room = max(0, size - SAMPLE_BYTES)
    return [(room * i // (count - 1), SAMPLE_BYTES) for i in range(count)]


def _safetensors_header(file: FileIO, size: int) -> bytes | None:
    """The JSON header's bytes, or None for a file of another format."""
    start = file.read(9)
    if len(start) < 9 or start[8:] != b"{":
        return None
    (length,) = struct.unpack("<Q", start[:8])
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        return None
    return b"{" + file.read(length - 1)


def _tensor_extents(header: bytes, path: str, most: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the middle of at most `most` tensors, evenly chosen, in file order.

    Fine-tuning may touch a few tensors only: samples spread over the file could miss them.
    """
    data_start = 8 + len(header)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        spans = sorted(tuple(tensor["data_offsets"]) for tensor in tensors.values())
        step = max(1, -(-len(spans) // max(1, most)))
        middles = [(start, (start + end) // 2) for start, end in spans[::step]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IdentityError(f"{path} has a damaged safetensors header: {error}") from error
    return [
        (data_start + max(start, middle - TENSOR_SAMPLE_BYTES // 2), TENSOR_SAMPLE_BYTES)
        for start, middle in middles
    ]


def _blake2b() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
