"""Writes the SSD tier of tests/data/ssd_v1/, with the kvpool that it is run by.

    python tests/compat/make_ssd_v1.py FOLDER

makes FOLDER/tier.tar.gz (the two files of a small tier) and FOLDER/contents.json (what a reader
must find in it). What is kept in tests/data was made once, by the first version that wrote format
1, and is not made again: it stands for the tiers that users have. A new format version gets a
script and a folder of its own. Two runs differ in the random ids and the times of last use.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import kvpool

FILES = ("index.mdb", "slabs")  # the locks hold no state
# Two sizes of slots. In the second a block ends inside a page: the rest of its slot is zeros.
SPACES: dict[str, dict[str, Any]] = {
    "bytes": {"model": "compat-bytes", "layout": "opaque", "block_tokens": 1, "block_bytes": 4096},
    "paged": {
        "model": "compat-paged",
        "dtype": "float16",
        "layers": 5,
        "kv_heads": 2,
        "head_dim": 16,
        "block_tokens": 16,
    },
    "dropped": {
        "model": "compat-dropped",
        "layout": "opaque",
        "block_tokens": 1,
        "block_bytes": 4096,
    },
}
CHAIN, BRANCH_AT, BRANCH = 60, 3, 4  # more entries than one page of the index holds
PAGE_BYTES, TILE_BYTES = 4096, 64


def payload(key: bytes, block_bytes: int) -> bytes:
    """No two pages alike, of this block or others; but each compresses well."""
    tiles = [
        hashlib.shake_256(key + bytes([page])).digest(TILE_BYTES)
        for page in range(-(-block_bytes // PAGE_BYTES))
    ]
    return b"".join(tile * (PAGE_BYTES // TILE_BYTES) for tile in tiles)[:block_bytes]


def put(space: kvpool.Namespace, keys: list[bytes], parent: bytes | None = None) -> list[Any]:
    """Stores a chain; what contents.json says of its blocks."""
    size = space.block_bytes
    data = [payload(key, size) for key in keys]
    result = space.put(keys, b"".join(data), parent=parent)
    assert result.stored == len(keys), result
    parents = [parent, *keys[:-1]]
    return [
        {
            "key": key.hex(),
            "parent": None if above is None else above.hex(),
            "sha256": hashlib.sha256(each).hexdigest(),
        }
        for key, above, each in zip(keys, parents, data, strict=True)
    ]


def chain(space: kvpool.Namespace, tokens: range, after: bytes | None = None) -> list[bytes]:
    return [bytes(key) for key in space.keys(list(tokens), after=after)]


def fill(pool: kvpool.Pool) -> dict[str, Any]:
    spaces = {name: pool.namespace(kvpool.Manifest(**SPACES[name])) for name in SPACES}
    bytes_, paged, dropped = spaces["bytes"], spaces["paged"], spaces["dropped"]
    put(dropped, chain(dropped, range(4)))
    trunk = chain(bytes_, range(CHAIN))
    branch = chain(bytes_, range(100, 100 + BRANCH), after=trunk[BRANCH_AT])
    blocks = put(bytes_, trunk) + put(bytes_, branch, parent=trunk[BRANCH_AT])
    gone = blocks.pop()  # the end of the branch
    assert bytes_.remove([branch[-1]]) == 1
    assert dropped.drop() > 0
    of_paged = put(paged, chain(paged, range(6 * 16)))  # its commit deletes what was removed
    out = bytearray(CHAIN * bytes_.block_bytes)
    assert bytes_.get_into(trunk, out) == CHAIN  # close() writes down that they were used
    return {
        "format_version": 1,
        "written_by": f"kvpool {kvpool.__version__}",
        "namespaces": [
            {"manifest": SPACES["bytes"], "id": bytes_.id.hex(), "blocks": blocks},
            {"manifest": SPACES["paged"], "id": paged.id.hex(), "blocks": of_paged},
        ],
        "removed": [{"namespace": bytes_.id.hex(), "key": gone["key"]}],
    }


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tier = Path(scratch) / "tier"
        with kvpool.open(
            "8MiB", ssd=tier, ssd_capacity="7MiB", ssd_free_floor=0, durability="durable"
        ) as pool:
            contents = fill(pool)
        with tarfile.open(folder / "tier.tar.gz", "w:gz") as archive:
            for name in FILES:
                archive.add(tier / name, name, filter=anonymous)
    (folder / "contents.json").write_text(json.dumps(contents, indent=1) + "\n")


def anonymous(file: tarfile.TarInfo) -> tarfile.TarInfo:
    file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


if __name__ == "__main__":
    main(Path(sys.argv[1]))
