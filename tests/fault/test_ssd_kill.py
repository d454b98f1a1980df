"""kill -9 at any moment, and what the next process finds.

A process of its own opens a pool, puts blocks from two threads, and tells through a pipe which of
them put() has acknowledged; it is killed while it does so. The next one first looks for all that
was acknowledged, then goes on. A dead process leaves the page cache to the kernel, so this is about
torn groups, locks and half-made files; what a power cut takes is in test_power_loss.py.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kvpool import ssd
from tests.pools import ROOT

ROUNDS = 16
CHILD_S_MAX = 60
BLOCK_BYTES = 64 << 10
BLOCKS_A_ROUND = 60
NUMBER_BYTES = 8

COMMON = """
import os, shutil, sys, threading
import numpy as np
import kvpool
from kvpool.replay.payload import Payload, keys_of

BLOCK_BYTES = 64 << 10
MANIFEST = kvpool.Manifest(model="m", layout="opaque", block_tokens=1, block_bytes=BLOCK_BYTES)

def opened(path, capacity, durability="durable", dram="8MiB"):
    admit = None if durability == "durable" else "all"
    return kvpool.open(dram, ssd=path, ssd_capacity=capacity, ssd_free_floor=0,
                       durability=durability, ssd_admit=admit, prefault="off", huge_pages=False)

def say(number):
    os.write(1, number.to_bytes(8, "little"))

def put(space, numbers, tell):
    payload, block = Payload(BLOCK_BYTES), np.empty((1, BLOCK_BYTES // 8), np.uint64)
    for number in numbers:
        key = keys_of([number])
        payload.write(key, block)
        result = space.put(key, block)
        assert result.no_room == 0, result.reasons
        if tell:
            say(number)

def look(space, numbers):
    # Of the blocks of these numbers: how many are there, and how many are not what was put.
    payload, block = Payload(BLOCK_BYTES), np.empty((1, BLOCK_BYTES // 8), np.uint64)
    there = wrong = 0
    for number in numbers:
        key = keys_of([number])
        if space.get_into(key, block) == 1:
            there += 1
            wrong += len(payload.wrong(key, block))
    return there, wrong

def check(space, file, all_of_them):
    numbers = [int(line) for line in open(file)]
    there, wrong = look(space, numbers)
    if wrong or (all_of_them and there != len(numbers)):
        sys.exit(f"of {len(numbers)} acknowledged blocks {there} are there, {wrong} are wrong")
"""

# Arguments: tier, capacity, file of acknowledged numbers, whether all must be there, first number,
# how many.
WRITER = (
    COMMON
    + """
path, capacity, file, all_of_them, first, count = sys.argv[1:]
with opened(path, capacity) as pool:
    space = pool.namespace(MANIFEST)
    check(space, file, all_of_them == "all")
    first, last = int(first), int(first) + int(count)
    threads = [threading.Thread(target=put, args=(space, range(first + i, last, 2), True))
               for i in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
)

# Opens what the last one left half-formatted, uses it, removes it, and formats anew: killed there.
FORMATTER = (
    COMMON
    + """
path, capacity = sys.argv[1:]
with opened(path, capacity) as pool:
    space = pool.namespace(MANIFEST)
    put(space, range(4), False)
    if look(space, range(4)) != (4, 0): sys.exit("a formatted tier does not work")
shutil.rmtree(path)
say(0)
opened(path, capacity)
say(1)
sys.stdin.read()
"""
)

# Opens, looks for what flush() acknowledged before, has 16 blocks flushed and 32 more on their way,
# and closes. Says 0 before it opens, the numbers of the 16, and one more number before it closes.
# All fit into DRAM: under `async` a block that is evicted before it was written is gone.
VISITOR = (
    COMMON
    + """
path, capacity, file, first = sys.argv[1:]
say(0)
pool = opened(path, capacity, "async", "64MiB")
space = pool.namespace(MANIFEST)
check(space, file, True)
first = int(first)
put(space, range(first, first + 16), False)
if not pool.flush(): sys.exit("not flushed")
for number in range(first, first + 16): say(number)
put(space, range(first + 16, first + 48), False)
say(first + 48)
pool.close()
"""
)
FLUSHED = 16


class Child:
    """A process that can be killed at any time; what it said before counts."""

    def __init__(self, code: str, *arguments: object) -> None:
        command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.said: list[int] = []

    def hear(self, until: int) -> None:
        """Waits until it has said so many numbers, or has ended."""
        assert self.process.stdout is not None
        while len(self.said) < until:
            ready, _, _ = select.select([self.process.stdout], [], [], CHILD_S_MAX)
            assert ready, "the process hangs"
            word = os.read(self.process.stdout.fileno(), NUMBER_BYTES)
            if not word:
                return
            self.said.append(int.from_bytes(word, "little"))

    def kill(self) -> None:
        """Ends it, hears what it still had to say, and checks that it had not failed before."""
        self.process.send_signal(signal.SIGKILL)
        self.hear(1 << 62)
        _, complaint = self.process.communicate(timeout=CHILD_S_MAX)
        assert self.process.returncode in (0, -signal.SIGKILL), complaint.decode()

    def end(self) -> None:
        """Waits for its own end."""
        _, complaint = self.process.communicate(timeout=CHILD_S_MAX)
        assert self.process.returncode == 0, complaint.decode()


def spin(seconds: float) -> None:
    """Until so much later, as exactly as a busy machine allows."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def check_tier(path: Path) -> ssd.Inspection:
    """Reads every block of it, and looks for extents that two blocks claim."""
    verification = ssd.verify(path)
    assert verification.damaged == 0, verification.damage
    return ssd.inspect(path)


def write_numbers(file: Path, numbers: list[int]) -> None:
    file.write_text("".join(f"{number}\n" for number in numbers))


def run_rounds(
    tmp_path: Path, rng: np.random.Generator, capacity: str, first: int, keeps: str
) -> list[int]:
    """Kills a writer ROUNDS times; the numbers that were acknowledged."""
    path, file = tmp_path / "tier", tmp_path / "acknowledged"
    acknowledged: list[int] = list(range(first))
    for _ in range(ROUNDS):
        write_numbers(file, acknowledged[-1000:])
        child = Child(WRITER, path, capacity, file, keeps, first, BLOCKS_A_ROUND)
        child.hear(int(rng.integers(1, BLOCKS_A_ROUND)))
        spin(float(rng.uniform(0, 0.004)))
        child.kill()
        assert child.said, "killed before it had put anything"
        acknowledged += child.said
        first += BLOCKS_A_ROUND
        check_tier(path)
    write_numbers(file, acknowledged[-1000:])
    Child(WRITER, path, capacity, file, keeps, first, 0).end()
    return acknowledged


def test_nothing_acknowledged_is_lost(tmp_path: Path, rng: np.random.Generator) -> None:
    acknowledged = run_rounds(tmp_path, rng, "96MiB", 0, "all")
    assert len(acknowledged) > 4 * ROUNDS
    # Those under way when it was killed may be there as well.
    assert check_tier(tmp_path / "tier").blocks >= len(set(acknowledged))


def test_a_full_tier_never_gives_other_bytes(tmp_path: Path, rng: np.random.Generator) -> None:
    path, file = tmp_path / "tier", tmp_path / "acknowledged"
    write_numbers(file, [])
    fill = Child(WRITER, path, "24MiB", file, "some", 0, 500)
    fill.hear(500)
    fill.end()
    full = check_tier(path)
    assert full.blocks < 400  # others had to go
    acknowledged = run_rounds(tmp_path, rng, "24MiB", 500, "some")
    assert len(acknowledged) - 500 > 4 * ROUNDS
    after = check_tier(path)
    assert after.blocks > full.blocks * 3 // 4


def test_a_format_that_was_killed_is_done_again(tmp_path: Path, rng: np.random.Generator) -> None:
    path, format_s = tmp_path / "tier", 0.05
    for _ in range(ROUNDS):
        child = Child(FORMATTER, path, "64MiB")
        child.hear(1)
        if not child.said:
            child.end()
        begin = time.monotonic()
        if rng.random() < 0.8:
            spin(float(rng.uniform(0, 1.2 * format_s)))
        else:  # how long it takes, where nobody kills it
            child.hear(2)
            format_s = min(time.monotonic() - begin, 0.5)
        child.kill()
    last = Child(FORMATTER, path, "64MiB")
    last.hear(2)
    last.kill()
    assert last.said == [0, 1]
    assert check_tier(path).blocks == 0


def test_a_kill_during_open_or_close_loses_nothing(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, file = tmp_path / "tier", tmp_path / "flushed"
    flushed: list[int] = []
    for first in range(0, 64 * (ROUNDS // 2), 64):
        write_numbers(file, flushed)
        opener = Child(VISITOR, path, "96MiB", file, first)
        opener.hear(1)
        spin(float(rng.uniform(0, 0.02)))
        opener.kill()
        flushed += opener.said[1 : 1 + FLUSHED]
        closer = Child(VISITOR, path, "96MiB", file, first)
        closer.hear(2 + FLUSHED)
        spin(float(rng.uniform(0, 0.03)))
        closer.kill()
        flushed += closer.said[1 : 1 + FLUSHED]
        check_tier(path)
    write_numbers(file, flushed)
    Child(VISITOR, path, "96MiB", file, 64 * ROUNDS).end()
    assert len(flushed) >= FLUSHED * ROUNDS // 2
