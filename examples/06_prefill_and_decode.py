"""Two engines in two processes hand over a prompt through a daemon.

    python examples/06_prefill_and_decode.py

The prefill engine computes the KV of a prompt and puts it; the decode engine sleeps until all of it
is there, and reads it: in place, without a copy, and into memory of its own. All that they share is
the prompt's tokens and a daemon: that of $KVPOOL_ADDRESS, or one that this script starts and ends.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

import kvpool

MANIFEST = kvpool.Manifest(
    model="toy-1b", dtype="float16", layers=4, kv_heads=2, head_dim=64, block_tokens=16
)
TOKENS = np.random.default_rng(4).integers(0, 32_000, 64 * MANIFEST.block_tokens)


def kv_of(tokens: np.ndarray) -> np.ndarray:
    """What a GPU would compute: per block an array that depends on all tokens up to its end."""
    ends = np.cumsum(tokens)[MANIFEST.block_tokens - 1 :: MANIFEST.block_tokens]
    halves = (MANIFEST.block_bytes or 0) // 2
    return (ends[:, None] * 31 + np.arange(halves)).astype(np.uint16).view(np.float16)


def prefill() -> None:
    with kvpool.connect(name="prefill") as pool:
        space = pool.namespace(MANIFEST)
        keys = space.keys(TOKENS)
        have = space.lookup(keys).blocks  # another engine may have computed some of it
        result = space.put(
            keys[have:], kv_of(TOKENS)[have:], parent=keys[have - 1] if have else None
        )
        print(f"prefill: {have} blocks were there, {result.stored} put")


def decode() -> None:
    with kvpool.connect(name="decode") as pool:
        space = pool.namespace(MANIFEST)
        keys = space.keys(TOKENS)
        there = space.wait(keys, timeout=30)  # woken by the put that completes the prompt
        with space.view(keys[-1:]) as blocks:  # in place: in the daemon's memory, read-only
            newest = np.frombuffer(blocks[0], dtype=np.uint16).copy()
        kv = np.empty((there, newest.size), np.float16)
        got = space.get_into(keys, kv)
        assert np.array_equal(kv.view(np.uint16), kv_of(TOKENS)[:got].view(np.uint16))
        assert np.array_equal(kv[-1].view(np.uint16), newest)
        print(f"decode: {got} of {len(keys)} blocks, byte for byte what prefill computed")


@contextlib.contextmanager
def daemon() -> Iterator[str]:
    """The address of a daemon: the one there is, or one of our own for so long."""
    if address := os.environ.get("KVPOOL_ADDRESS"):
        yield address
        return
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/node.sock"
        command = [sys.executable, "-m", "kvpool", "serve", "--dram", "64MiB", "--socket", socket]
        with subprocess.Popen(
            [*command, "--log-level", "warning"], stdout=subprocess.PIPE
        ) as serve:
            try:
                assert serve.stdout is not None
                assert serve.stdout.readline(), "the daemon did not become ready"
                yield f"unix:{socket}"
            finally:
                serve.terminate()


def main() -> None:
    with daemon() as address:
        environment = {**os.environ, "KVPOOL_ADDRESS": address}
        engines = [
            subprocess.Popen([sys.executable, __file__, engine], env=environment)
            for engine in ("decode", "prefill")  # decode first: it waits
        ]
        statuses = [engine.wait() for engine in engines]
    sys.exit(max(statuses))


if __name__ == "__main__":
    {"": main, "prefill": prefill, "decode": decode}[" ".join(sys.argv[1:])]()
