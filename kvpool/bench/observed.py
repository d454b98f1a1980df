"""What it costs the data path that somebody watches: a client reads all the time, and every other
window a scraper asks for /metrics and for the whole report, far more often than Prometheus would.

The scraper is a process of its own. Windows alternate, so that whatever else the machine does
meets both kinds alike; the ratio is the median over pairs of neighbours.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool.bench.buffers import Buffers, Memory, groups
from kvpool.bench.rows import Row, Value, at_least, expect
from kvpool.bench.scale import Scale
from kvpool.bench.served import environment_of_child, first_line, served
from kvpool.bench.served_works import fill
from kvpool.bench.ssd import namespace

BLOCK_BYTES = 64 << 10
BATCH = 16
WORKING_SET_BYTES = 256 << 20
WINDOW_S = 1.0
PAIRS = 20
SCRAPE_EVERY_S = 1.0  # Prometheus: 15 s, by default
RATIO_MIN = 0.99

# Scrapes while its last order was "on". Told by lines, so that it ends when we do.
_SCRAPER = """
import http.client, select, sys, time
host, port, every_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
orders = open(0, "rb", buffering=0)  # select() sees what is not in a buffer
print("ready", flush=True)
is_on, done, due = False, 0, 0.0
while True:
    left = max(0.0, due - time.monotonic()) if is_on else None
    if select.select([orders], [], [], left)[0]:
        order = orders.readline().strip()
        if order not in (b"on", b"off"):
            print(done, flush=True)
            break
        is_on, due = order == b"on", time.monotonic()
        continue
    for path in ("/metrics", "/v1/stats"):
        connection = http.client.HTTPConnection(host, port, timeout=5)
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200 or not answer.read():
            sys.exit(f"{path}: {answer.status}")
        connection.close()
    done += 1
    due = time.monotonic() + every_s
"""


def observed(scale: Scale) -> Iterator[Row]:
    """Reads of a client with shared memory, with and without a scraper."""
    buffers = Buffers(Memory(scale.of(WORKING_SET_BYTES, quick=16 << 20)), BLOCK_BYTES)
    dram_bytes = buffers.source.nbytes + (64 << 20)
    with (
        served(dram_bytes, prefault="all", http="127.0.0.1:0") as daemon,
        kvpool.connect(daemon.unix) as pool,
        _scraper(daemon.http, scale) as scraper,
    ):
        space = namespace(pool, BLOCK_BYTES)
        fill(space, buffers)
        reads = _Reads(space, buffers, scale.seed)
        reads.window(WINDOW_S / 10)  # what is done once
        pairs = [_pair(reads, scraper, i, scale) for i in range(scale.of(PAIRS, quick=2))]
        scrapes = _told(scraper, "end")
        expect(int(scrapes) > 0, "the scraper got nothing")
    alone = statistics.median(pair[0] for pair in pairs)
    watched = statistics.median(pair[1] for pair in pairs)
    fields: dict[str, Value] = {
        "work": "get_into while scraped",
        "channel": "shm",
        "block_bytes": BLOCK_BYTES,
        "batch": BATCH,
        "pairs": len(pairs),
        "scrapes": int(scrapes),
        "alone_GBps": alone,
        "scraped_GBps": watched,
        "ratio": statistics.median(pair[1] / pair[0] for pair in pairs),
    }
    yield at_least("ratio", RATIO_MIN, fields)


class _Reads:
    """get_into of a batch after another, in an order that no cache foresees."""

    def __init__(self, space: kvpool.Namespace, buffers: Buffers, seed: int) -> None:
        self._space = space
        self._out = np.empty((BATCH, BLOCK_BYTES // 8), dtype=np.uint64)
        self._batches = groups(buffers.count, BATCH, seed)
        self._keys = buffers.keys

    def window(self, seconds: float) -> float:
        """GB/s over so many seconds."""
        done, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds:
            first = next(self._batches) * BATCH
            keys = self._keys[first : first + BATCH]
            expect(self._space.get_into(keys, self._out) == BATCH, "a block is gone")
            done += BATCH
        return done * BLOCK_BYTES / spent / 1e9


def _pair(
    reads: _Reads, scraper: subprocess.Popen[bytes], number: int, scale: Scale
) -> tuple[float, float]:
    """(alone, scraped), measured in an order that changes from pair to pair."""
    found = {}
    for is_on in (number % 2 == 0, number % 2 == 1):
        _order(scraper, "on" if is_on else "off")
        found[is_on] = reads.window(WINDOW_S / 10 if scale.is_quick else WINDOW_S)
    _order(scraper, "off")
    return found[False], found[True]


@contextlib.contextmanager
def _scraper(address: str, scale: Scale) -> Iterator[subprocess.Popen[bytes]]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    every_s = SCRAPE_EVERY_S / 20 if scale.is_quick else SCRAPE_EVERY_S
    with subprocess.Popen(
        [sys.executable, "-c", _SCRAPER, host, port, str(every_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment_of_child(),
    ) as process:
        try:
            expect(first_line(process) == b"ready\n", "the scraper did not start")
            yield process
        finally:
            process.kill()


def _order(scraper: subprocess.Popen[bytes], order: str) -> None:
    assert scraper.stdin is not None
    scraper.stdin.write(order.encode() + b"\n")
    scraper.stdin.flush()


def _told(scraper: subprocess.Popen[bytes], order: str) -> bytes:
    _order(scraper, order)
    return first_line(scraper)
