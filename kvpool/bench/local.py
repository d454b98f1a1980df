"""The embedded pool beside memcpy: put, get_into, view, save and load, one block or sixteen.

Floor `memcpy`: one memmove of as many bytes between two numpy buffers as they come (16 bytes off a
cache line, on huge pages where the system gives them), each as large as the pool's working set, so
that both sides are as cold as the pool's. Floor `memcpy_same_pages`: the same out of the pool's own
pages, block by block, which leaves only what index and checks cost. Works and floors of one kind
run in turn, and every step takes other blocks, in a random order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool.bench.buffers import Buffers
from kvpool.bench.rows import Row, Value, at_least, expect
from kvpool.bench.scale import Scale
from kvpool.bench.timing import Timing, Work, interleaved

BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
BATCHES = (1, 16)
WORKING_SET_BYTES = 512 << 20
ROUNDS_MAX = 2000
ROUNDS_MIN = 128
STEP_BYTES_MAX = 512 << 20  # of one work in one row, between the bounds on rounds
LAYER_BYTES = 64 << 10  # K and V of 16 tokens, 8 heads of 128 bfloat16 numbers
RATIO_MIN = {("get_into", 64 << 10, 16): 0.85, ("get_into", 1 << 20, 16): 0.95}
