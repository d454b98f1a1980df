"""Two engines in one process share what they computed, through an embedded pool.

    python examples/01_embedded_pool.py

Each engine is a thread that serves requests: look up the longest prefix that anybody has computed,
get its KV, compute only the rest, and put that back. The "model" is a few lines of numpy that makes
the same KV from the same tokens, so every block that is reused can be checked.
"""

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

import kvpool

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 4, 2, 64, 16
MANIFEST = kvpool.Manifest(
    model="toy-1b",
    dtype="float16",
    layers=LAYERS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    block_tokens=BLOCK_TOKENS,
)
BLOCK_ITEMS = LAYERS * 2 * BLOCK_TOKENS * KV_HEADS * HEAD_DIM  # K and V, two bytes each

Tokens = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.float16]


def prefill(tokens: Tokens, first: int, count: int) -> Blocks:
    """What a GPU would do: the KV of blocks [first, first + count), which depends on all before."""
    blocks = np.empty((count, BLOCK_ITEMS), np.float16)
    for number in range(count):
        seen = tokens[: (first + number + 1) * BLOCK_TOKENS]
        seed = int(np.sum(seen * np.arange(1, len(seen) + 1)) % 2**32)
        blocks[number] = np.random.default_rng(seed).random(BLOCK_ITEMS, np.float32)
    return blocks


@dataclass
class Engine:
    """Serves requests; remembers how many blocks it computed and how many it was given."""

    name: str
    space: kvpool.Namespace
    computed: int = 0
    reused: int = 0
    log: list[str] = field(default_factory=list)

    def serve(self, what: str, tokens: Tokens) -> Blocks:
        keys = self.space.keys(tokens)
        kv = np.empty((len(keys), BLOCK_ITEMS), np.float16)
        have = self.space.get_into(keys, kv)
        kv[have:] = prefill(tokens, have, len(keys) - have)
        if have < len(keys):
            # The new blocks go on from the last one that was there.
            parent = keys[have - 1] if have else None
            self.space.put(keys[have:], kv[have:], parent=parent)
        self.reused += have
        self.computed += len(keys) - have
        self.log.append(f"  {what:<28} {have:>3} of {len(keys):>3} blocks reused")
        return kv


def main() -> None:
    rng = np.random.default_rng(7)
    system = rng.integers(0, 32_000, 40 * BLOCK_TOKENS)  # a system prompt that all requests share
    users = {name: rng.integers(0, 32_000, 8 * BLOCK_TOKENS) for name in ("Ada", "Bob", "Cyd")}

    with kvpool.open(dram="64MiB") as pool:
        engines = [Engine(name, pool.namespace(MANIFEST)) for name in ("engine A", "engine B")]

        def work(engine: Engine, names: list[str]) -> None:
            for name in names:
                turn = np.concatenate([system, users[name]])
                engine.serve(f"{name}, first question", turn)
                answer = np.random.default_rng(list(name.encode()))
                more = answer.integers(0, 32_000, 4 * BLOCK_TOKENS)
                engine.serve(f"{name}, second question", np.concatenate([turn, more]))

        engines[0].serve("the system prompt alone", system)
        threads = [
            threading.Thread(target=work, args=(engines[0], ["Ada", "Bob"])),
            threading.Thread(target=work, args=(engines[1], ["Cyd", "Ada"])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        for engine in engines:
            print(f"{engine.name}: computed {engine.computed}, reused {engine.reused} blocks")
            print("\n".join(engine.log))

        # What came out of the pool is what computing it again gives.
        whole = np.concatenate([system, users["Ada"]])
        again = engines[1].serve("Ada, asked once more", whole)
        assert np.array_equal(again, prefill(whole, 0, len(again)))
        print(f"{engines[1].log[-1].strip()}: byte for byte what a new prefill gives")

        stats = pool.stats()
        mib = stats["bytes_taken"] / 2**20
        print(f"pool: {stats['blocks']} blocks, {mib:.1f} MiB, {stats['get_blocks']} delivered")


if __name__ == "__main__":
    main()
