"""Digests of a model's files: weights, tokenizer, processor and adapters.

Hashing a 700 GB checkpoint at every start would take too long, so weights are sampled: the name,
size and safetensors header of every file, and content up to a fixed number of bytes per model,
spread evenly over each file, plus a piece of up to 4,096 tensors. A model within that budget is
read completely. Only names inside the model's directory count, so a copy, a symlinked Hugging Face
cache and a moved directory are the same model. Weights in a subfolder count only if vLLM loads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
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

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_PART_FOLDERS = ("whisper-large-v3",)
"""Subfolders whose weights vLLM loads: Kimi-Audio's encoder. It loads those of no other."""
# Files that trainers leave with the weights; vLLM skips them too (model_loader/weight_utils.py).
_TRAINER_STEMS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
_TOKENIZER_NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "spiece.model",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSource:
    """The files of a model on this machine."""

    path: Path
    revision: str | None = None
    """Commit hash of a Hugging Face snapshot."""


def locate_model(
    model: str, revision: str | None = None, cache_dir: str | None = None
) -> ModelSource:
    """Find the local files of `model`: a path, or a Hugging Face repo id in the local cache.

    `cache_dir`: the cache's directory; None for Hugging Face's own. Never goes online. Raises
    IdentityError if the files are not on this machine.
    """
    path = Path(model).expanduser()
    if path.exists():
        return ModelSource(path)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise _not_here(model, revision, "huggingface_hub is not installed") from error
    try:
        snapshot = Path(
            snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
    except (OSError, ValueError) as error:
        raise _not_here(model, revision, "it is not in the Hugging Face cache") from error
    return ModelSource(snapshot, snapshot.name)


def _not_here(model: str, revision: str | None, why: str) -> IdentityError:
    at = f" at revision {revision!r}" if revision else ""
    return IdentityError(
        f"cannot find the files of model {model!r}{at}: no such path, and {why}. Pass a local "
        "path, or a revision that is in the cache (HF_HOME; an engine's --download-dir)"
    )


def weights_digest(model_dir: Path, code_dir: Path | None = None) -> bytes:
    """Return 32 bytes that differ between any two checkpoints, also of the same shape.

    `code_dir`: where the model's code is, if that is elsewhere. Reads at most about 150 MiB, plus
    safetensors headers. Raises IdentityError if there is no weight file, or one is unreadable or
    has a damaged safetensors header.
    """
    files = _weight_files(model_dir)
    if not files:
        raise IdentityError(
            f"{model_dir} contains no weights ({', '.join('*' + s for s in _WEIGHT_SUFFIXES)}), "
            "so its state has no identity: pass the directory with the weights"
        )
    others = dict[str, Path]()
    for folder in (code_dir or model_dir, model_dir):
        others |= _files(folder, _is_code_or_index)
    others = dict(sorted(others.items()))
    content = [_named_digests(files, MODEL_BUDGET_BYTES), _named_digests(others, None)]
    return _digest(encode(["weights", *content]))


def tokenizer_digest(tokenizer_dir: Path) -> bytes:
    """Return 32 bytes over the complete tokenizer files, of which there may be none."""
    files = _files(tokenizer_dir, _is_tokenizer)
    return _digest(encode(["tokenizer", _named_digests(files, None)]))


def processor_digest(model_dir: Path) -> bytes:
    """Return 32 bytes over the processor's files, of which there may be none.

    They say how images, audio and video are prepared.
    """
    files = _files(model_dir, _is_processor)
    return _digest(encode(["processor", _named_digests(files, None)]))


def files_digest(directory: Path, wanted: Callable[[str], bool]) -> bytes:
    """Return 32 bytes over the complete files with such names, of which there may be none."""
    files = _files(directory, wanted)
    return _digest(encode(["files", _named_digests(files, None)]))


def lora_digest(adapter_dir: Path) -> bytes:
    """Return 32 bytes over an adapter's weights and config, sampled above 64 MiB.

    Raises IdentityError if the directory contains no adapter weights.
    """
    files = _files(adapter_dir, lambda name: _is_weight(name) or name.endswith(".json"))
    if not any(map(_is_weight, files)):
        raise IdentityError(f"{adapter_dir} contains no LoRA adapter weights")
    return _digest(encode(["lora", _named_digests(files, ADAPTER_BUDGET_BYTES)]))


def _is_weight(name: str) -> bool:
    return name.endswith(_WEIGHT_SUFFIXES) and not name.startswith(_TRAINER_STEMS)


def _is_code_or_index(name: str) -> bool:
    """True for code that `trust_remote_code` runs, and for the index of shards."""
    return name.endswith((".py", ".index.json"))


def _is_tokenizer(name: str) -> bool:
    return name in _TOKENIZER_NAMES or name.endswith(".tiktoken")


def _is_processor(name: str) -> bool:
    return "processor" in name and name.endswith("config.json")


def _weight_files(model_dir: Path) -> dict[str, Path]:
    """Return the weight files that vLLM may load, by their names in the directory."""
    files = _files(model_dir, _is_weight)
    for folder in _PART_FOLDERS:
        if (model_dir / folder).is_dir():
            inside = _files(model_dir / folder, _is_weight)
            files |= {f"{folder}/{name}": path for name, path in inside.items()}
    return files


def _files(directory: Path, wanted: Callable[[str], bool]) -> dict[str, Path]:
    """Return the files with such names, by name, sorted."""
    try:
        paths = {name: directory / name for name in sorted(os.listdir(directory)) if wanted(name)}
    except OSError as error:
        raise IdentityError(f"cannot list {directory}: {error.strerror}") from error
    # A dangling link (a pruned cache) stays in, so that reading it is an error.
    return {name: x for name, x in paths.items() if x.is_file() or not x.exists()}


def _named_digests(files: Mapping[str, Path], budget_bytes: int | None) -> list[list[object]]:
    """Return [name, size, digest] of each file, from about `budget_bytes` in all (None: all)."""
    try:
        stats = [(name, path, path.stat()) for name, path in files.items()]
        total = sum(stat.st_size for _, _, stat in stats)
        named: list[list[object]] = []
        for name, path, stat in stats:
            fits = budget_bytes is None or total <= budget_bytes
            whole = fits or stat.st_size <= (budget_bytes or 0) // len(stats)
            shares = 1 if whole else len(stats)
            # Unlike the time of the last write, that of the last change cannot be set back.
            seen = (stat.st_dev, stat.st_ino, stat.st_ctime_ns)
            digest = _file_digest(os.path.realpath(path), seen, stat.st_size, whole, shares)
            named.append([name, stat.st_size, digest])
    except OSError as error:
        raise IdentityError(f"cannot read {error.filename}: {error.strerror}") from error
    return named


@lru_cache(maxsize=4096)
def _file_digest(
    path: str, seen: tuple[int, int, int], size: int, whole: bool, shares: int
) -> bytes:
    """Return the digest of one file's content, cached while the file is unchanged.

    `shares`: the number of files that share the model's budget of samples.
    """
    with _open(path) as file:
        if whole:
            return hashlib.file_digest(file, _blake2b).digest()
        state = _blake2b()
        extents = _even_extents(size, shares)
        # Recognised by content, not by name: a Hugging Face blob has no suffix.
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
    """Return (offset, bytes) of samples spread evenly, the first and last bytes included."""
    most = MODEL_BUDGET_BYTES // SAMPLE_BYTES // shares
    count = max(MIN_SAMPLES_PER_FILE, min(MAX_SAMPLES_PER_FILE, most))
    last = max(0, size - SAMPLE_BYTES)
    return [(last * i // (count - 1), SAMPLE_BYTES) for i in range(count)]


def _safetensors_header(file: FileIO, size: int) -> bytes | None:
    """Return the bytes of the JSON header, or None for a file of another format."""
    start = file.read(9)
    if len(start) < 9 or start[8:] != b"{":
        return None
    (length,) = struct.unpack("<Q", start[:8])
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        return None
    return b"{" + file.read(length - 1)


def _tensor_extents(header: bytes, path: str, most: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the middle of at most `most` tensors, evenly chosen, in file order.

    Fine-tuning may change only a few tensors, which samples spread over the file could miss.
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
