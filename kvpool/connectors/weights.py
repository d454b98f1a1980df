"""Which weights computed the KV: a digest of their files that takes seconds, not minutes.

It is sampled. Read in full are the names and sizes of all weight files, the header of each
safetensors file (names, shapes and places of its tensors) and small configuration and code files;
of the weights of each file at most SAMPLES pieces of SAMPLE_BYTES, evenly spread, the first and the
last bytes among them. So training, merging, quantising or cutting changes the digest, but a change
that falls between two samples (one row of a 5 GB file: samples are 20 MB apart) does not. Whoever
edits weights in place names them: `weights` of the connector's options.

Promises:  1. the digest depends on names, sizes and content alone: not on the folder's own name, on
              times, on links, on the machine;
           2. of each file FILE_BYTES_MAX are read, whatever its size;
           3. a folder whose files have not changed is read once per process.
Thread rule: any thread; two that ask at once for the same folder may both read it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

from kvpool.errors import BadArgument

SAMPLES = 256
SAMPLE_BYTES = 4096
HEADER_BYTES_MAX = 100_000_000  # that the safetensors format allows
TEXT_FILE_BYTES_MAX = 16 << 20
FILE_BYTES_MAX = SAMPLES * SAMPLE_BYTES + HEADER_BYTES_MAX + 8
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What else decides how the weights are used. Tokens are ids by then: no tokenizer is among them.
SAID_BESIDE = frozenset(
    {
        "adapter_config.json",
        "config.json",
        "hf_quant_config.json",
        "params.json",
        "quant_config.json",
        "quantize_config.json",
    }
)
# Beside the weights as some trainers leave them, and loaded by no engine.
NOT_WEIGHTS = re.compile(r"(optimizer|scheduler|rng_state.*|training_args|scaler)\.(bin|pt|pth)")
KNOWN_MAX = 256

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([^/]+)")

_Stamp = tuple[str, int, int]  # name, bytes, mtime in ns
_known: dict[tuple[str, tuple[_Stamp, ...]], str] = {}


class ModelFolder(NamedTuple):
    """Where a model's files are. path: None where they are not on this machine."""

    path: str | None
    name: str
    revision: str


def weights_identity(path: str | os.PathLike[str]) -> str:
    """A sampled digest of the weights in a folder, or of one file of weights.

    Raises BadArgument with the path: nothing there, nothing readable, no weights in it.
    Cost: FILE_BYTES_MAX per file at most, SAMPLES reads of it; nothing if it is known.
    """
    return _identity("weights", os.fspath(path))


def adapter_identity(path: str | os.PathLike[str]) -> str:
    """As weights_identity(), of a LoRA adapter's folder, which must have an adapter_config.json."""
    folder = os.fspath(path)
    if not os.path.isfile(os.path.join(folder, "adapter_config.json")):
        raise BadArgument(f"adapter {folder!r} has no adapter_config.json; it is no LoRA adapter")
    return _identity("adapter", folder)


def model_folder(
    model: str,
    revision: str | None = None,
    environment: Mapping[str, str] | None = None,
    cache: str | None = None,
) -> ModelFolder:
    """Where the files of a model are: a folder or file, or a snapshot in Hugging Face's cache.

    cache: that folder, instead of the one that the environment names. The revision of a snapshot is
    its commit, whatever it was asked by; of other folders it is what was given. The name of a
    folder is its last part, so that the same weights meet wherever they are mounted.
    """
    if os.path.exists(model):
        whole = os.path.abspath(model)
        if found := _SNAPSHOT.search(whole + "/"):
            return ModelFolder(whole, found[1].replace("--", "/"), found[2])
        return ModelFolder(whole, os.path.basename(whole) or whole, revision or "")
    if _HUB_ID.fullmatch(model) is None:
        return ModelFolder(None, model, revision or "")
    environment = os.environ if environment is None else environment
    home = os.path.join(cache or _hub_cache(environment), "models--" + model.replace("/", "--"))
    for commit in (revision or "", _commit_of(home, revision or "main")):
        folder = os.path.join(home, "snapshots", commit)
        if _COMMIT.fullmatch(commit) and os.path.isdir(folder):
            return ModelFolder(folder, model, commit)
    return ModelFolder(None, model, revision or "")


# --- where a model is ----------------------------------------------------------------------------


def _hub_cache(environment: Mapping[str, str]) -> str:
    if whole := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return os.path.expanduser(whole)
    caches = environment.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = environment.get("HF_HOME") or os.path.join(caches, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


def _commit_of(home: str, reference: str) -> str:
    """The commit that a branch or tag of the cache names; "" if it has none of that name."""
    if ".." in reference.split("/") or os.path.isabs(reference):
        return ""
    try:
        with open(os.path.join(home, "refs", reference), encoding="ascii") as file:
            return file.read(256).strip()
    except (OSError, UnicodeDecodeError):
        return ""


# --- the digest ----------------------------------------------------------------------------------


def _identity(what: str, path: str) -> str:
    try:
        folder, stamps = _stamps(path)
        if not any(_is_weights(name) for name, _, _ in stamps):
            raise BadArgument(f"{what} {path!r}: no weights there ({', '.join(WEIGHT_SUFFIXES)})")
        key = (os.path.realpath(folder), stamps)
        if (digest := _known.get(key)) is None:
            digest = _digest(folder, stamps)
            if len(_known) >= KNOWN_MAX:
                _known.clear()
            _known[key] = digest
    except OSError as error:
        where = error.filename or path
        raise BadArgument(f"{what} {str(where)!r}: cannot be read: {error.strerror}") from None
    return digest


def _stamps(path: str) -> tuple[str, tuple[_Stamp, ...]]:
    """The folder, and of what counts in it the names, sizes and times, in the order of names."""
    if os.path.isdir(path):
        folder, names = path, sorted(name for name in os.listdir(path) if _counts(name))
    else:
        folder, name = os.path.split(path)
        names = [name]
    found = []
    for name in names:
        status = os.stat(os.path.join(folder, name))
        if stat.S_ISREG(status.st_mode):
            found.append((name, status.st_size, status.st_mtime_ns))
    return folder, tuple(found)


def _counts(name: str) -> bool:
    return _is_weights(name) or name in SAID_BESIDE or name.endswith(".py")


def _is_weights(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES) and NOT_WEIGHTS.fullmatch(name) is None


def _digest(folder: str, stamps: tuple[_Stamp, ...]) -> str:
    whole = hashlib.sha256(b"kvpool weights 1\0")
    for name, size, _ in stamps:
        whole.update(struct.pack("<QQ", len(os.fsencode(name)), size) + os.fsencode(name))
        with open(os.path.join(folder, name), "rb", buffering=0) as file:
            for piece in _pieces(file, name, size):
                whole.update(struct.pack("<Q", len(piece)) + piece)
    return f"sampled-sha256:{whole.hexdigest()}"


def _pieces(file: BinaryIO, name: str, size: int) -> Iterator[bytes]:
    """What is read of a file: all of a small one, of others the header and the samples."""
    if not _is_weights(name):
        if size > TEXT_FILE_BYTES_MAX:
            raise BadArgument(f"{file.name}: {size} bytes; at most {TEXT_FILE_BYTES_MAX}")
        yield _read(file, 0, size)
        return
    if size <= SAMPLES * SAMPLE_BYTES:
        yield _read(file, 0, size)
        return
    start = 0
    if name.endswith(".safetensors"):
        header_bytes = int.from_bytes(_read(file, 0, 8), "little")
        if header_bytes <= min(HEADER_BYTES_MAX, size - 8):  # else it is no safetensors file
            start = 8 + header_bytes
            yield _read(file, 0, start)
    last = size - SAMPLE_BYTES
    if start >= last:  # hardly more than a header
        yield _read(file, start, size - start)
        return
    for number in range(SAMPLES):
        yield _read(file, start + (last - start) * number // (SAMPLES - 1), SAMPLE_BYTES)


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    """Less only where the file ends."""
    parts = []
    while size > 0 and (part := os.pread(file.fileno(), min(size, 1 << 20), offset)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)
