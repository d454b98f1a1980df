"""One of the two client processes of `kvpool demo`: it writes prompts, or it reads them.

    python -m kvpool.replay.demo_client '{"address": ..., ...}'      fields of Setup

It says `ready`, then answers each line on its stdin, the name of a method of Engine, with a line of
JSON (fields of Done). Both sides know the prompts as tokens, and nothing else of each other: a key
is the hash of all tokens up to its block, and the payload follows from the key, so that the reader
can compare every byte of what another process wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import Self

import numpy as np

import kvpool
from kvpool.replay.memcpy import Floor
from kvpool.replay.payload import Payload, Words
from kvpool.types import Keys

BLOCK_BYTES = 64 << 10
BLOCK_TOKENS = 16
VIEW_BLOCKS = 16
WAIT_S_MAX = 30.0
_VOCABULARY = 32_000


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Half of the prompts are handed over one by one; the others are put in one go."""

    address: str
    channel: str
    prompts: int
    prompt_blocks: int
    shared_blocks: int  # of each prompt: the system prompt that all begin with
    seed: int


@dataclasses.dataclass(slots=True)
class Done:
    """What one work moved; per call its rate, and that of memcpy of as many bytes after it."""

    blocks: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    bytes_per_s: list[float] = dataclasses.field(default_factory=list)
    memcpy_bytes_per_s: list[float] = dataclasses.field(default_factory=list)
    mismatches: int = 0
    times_s: list[float] = dataclasses.field(default_factory=list)  # `hand`: when, per prompt


class _Watch:
    """Takes the time of one call, and its rate once it is known what the call moved."""

    def __init__(self, done: Done) -> None:
        self._done = done

    def __enter__(self) -> Self:
        self._cpu_s, self._started_s = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._started_s
        self._done.seconds += self._seconds
        self._done.cpu_s += time.process_time() - self._cpu_s

    def moved(self, blocks: int) -> None:
        self._done.blocks += blocks
        self._done.moved_bytes += blocks * BLOCK_BYTES
        self._done.bytes_per_s.append(blocks * BLOCK_BYTES / self._seconds)


@contextlib.contextmanager
def _comparing(done: Done, floor: Floor) -> Iterator[Floor]:
    """Notes the rate of one copy of the floor's."""
    copied_bytes, seconds = floor.copied_bytes, floor.seconds
    yield floor
    rate = (floor.copied_bytes - copied_bytes) / (floor.seconds - seconds)
    done.memcpy_bytes_per_s.append(rate)


class Engine:
    """Either side; one thread."""

    def __init__(self, setup: Setup, pool: kvpool.Pool) -> None:
        self._setup = setup
        self._space = pool.namespace(
            kvpool.Manifest(
                model=f"demo-{setup.channel}",
                layout="opaque",
                block_tokens=BLOCK_TOKENS,
                block_bytes=BLOCK_BYTES,
            )
        )
        self._payload = Payload(BLOCK_BYTES)
        # Touched now: first touch is far slower than a copy, and not what is shown.
        self._buffer: Words = np.ones((setup.prompt_blocks, BLOCK_BYTES // 8), dtype=np.uint64)
        self._floor = Floor(setup.prompts * setup.prompt_blocks * BLOCK_BYTES)
        self._prompts = [self._space.keys(tokens) for tokens in prompts(setup)]
        self._handed = self._prompts[: setup.prompts // 2]

    def hand(self) -> Done:
        """The writer's half of the handover: put prompts one by one, and note when each was."""
        done = Done()
        for number in range(len(self._handed)):
            time.sleep(0.002)  # what a prefill would take at least: the reader waits meanwhile
            self._put(done, number)
            done.times_s.append(time.monotonic())
        return done

    def take(self) -> Done:
        """The reader's half: sleep until each prompt is whole; then read all, compare all."""
        done = Done()
        for number, keys in enumerate(self._handed):
            present = self._space.wait(keys, WAIT_S_MAX)
            done.times_s.append(time.monotonic())
            if present < len(keys):
                raise SystemExit(f"prompt {number} did not appear within {WAIT_S_MAX:g} s")
        for keys in self._handed:
            self._get(done, keys)
        return done

    def put(self) -> Done:
        """Put the prompts that were not handed over."""
        done = Done()
        for number in range(len(self._handed), len(self._prompts)):
            self._put(done, number)
        return done

    def get(self) -> Done:
        """Read every prompt twice and compare every byte."""
        done = Done()
        for keys in self._prompts * 2:
            self._get(done, keys)
        return done

    def view(self) -> Done:
        """Look at every prompt in place, some blocks at a time, and compare every byte."""
        done = Done()
        for keys in self._prompts:
            for start in range(0, len(keys), VIEW_BLOCKS):
                some = keys[start : start + VIEW_BLOCKS]
                with _Watch(done) as watch, self._space.view(some) as blocks:
                    pass  # that is what a view costs; the next one is to compare
                watch.moved(len(blocks))
                with self._space.view(some) as blocks:
                    seen = self._buffer[: len(blocks)]
                    for row, block in zip(seen, blocks, strict=True):
                        row[:] = np.frombuffer(block, dtype=np.uint64)
                self._compare(done, some, seen)
        return done

    def _put(self, done: Done, number: int) -> None:
        keys, data = self._prompts[number], self._buffer
        self._payload.write(keys, data)
        with _Watch(done) as watch:
            have = self._space.lookup(keys).blocks  # the system prompt, from the second prompt on
            parent = keys[have - 1] if have else None
            result = self._space.put(keys[have:], data[have:], parent=parent)
        if result.stored < len(keys) - have:
            raise SystemExit(f"the daemon did not store prompt {number}: {result}")
        watch.moved(result.stored)
        with _comparing(done, self._floor) as floor:
            floor.copy_in(data[have:])

    def _get(self, done: Done, keys: Keys) -> None:
        out = self._buffer
        out.fill(0)  # else a get that wrote nothing could pass by what an earlier one left
        with _Watch(done) as watch:
            got = self._space.get_into(keys, out)
        watch.moved(got)
        self._compare(done, keys, out[:got])
        with _comparing(done, self._floor) as floor:
            floor.copy_out(out)

    def _compare(self, done: Done, keys: Keys, blocks: Words) -> None:
        """A block that did not come is as wrong as one with a wrong byte: all were put."""
        done.mismatches += len(keys) - len(blocks)
        done.mismatches += len(self._payload.wrong(keys[: len(blocks)], blocks))


def prompts(setup: Setup) -> list[np.ndarray]:
    """Tokens of every prompt, the same in both processes."""
    rng = np.random.default_rng(setup.seed)
    shared = rng.integers(0, _VOCABULARY, setup.shared_blocks * BLOCK_TOKENS)
    own_tokens = (setup.prompt_blocks - setup.shared_blocks) * BLOCK_TOKENS
    return [
        np.concatenate([shared, rng.integers(0, _VOCABULARY, own_tokens)])
        for _ in range(setup.prompts)
    ]


def main(told: str) -> None:
    setup = Setup(**json.loads(told))
    with kvpool.connect(setup.address, name="demo") as pool:
        shares = pool.stats()["client"]["shares_memory"]
        if setup.channel == "shm" and not shares:
            raise SystemExit("the daemon gives this process no shared memory")
        engine = Engine(setup, pool)
        print("ready", flush=True)
        for line in sys.stdin:
            done: Done = getattr(engine, line.strip())()
            print(json.dumps(dataclasses.asdict(done)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
