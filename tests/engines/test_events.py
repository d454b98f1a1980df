"""What kvpool publishes is read by vLLM's own classes."""

import json
import subprocess

import msgspec

from kvpool.events.encoding import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    Snapshot,
    Source,
    encode,
)
from tests.engines.rig import CHILDREN, START_S, engine_python, environment

KEYS = [bytes([at]) * 16 for at in range(3)]
SOURCE = Source(node=b"n" * 16, incarnation=1 << 60, tenant="t", namespace=b"s" * 16, name="chat")


def test_vllm_reads_every_event() -> None:
    stored = BlockStored(block_hashes=KEYS, parent_block_hash=KEYS[0], block_size=16, medium="CPU")
    first = BlockStored(
        block_hashes=KEYS[:1], parent_block_hash=None, block_size=0, medium="STORAGE"
    )
    removed = BlockRemoved(block_hashes=KEYS[:2], medium="STORAGE")
    begin = msgspec.structs.replace(SOURCE, snapshot=Snapshot(state="begin", next=1))
    batches: list[tuple[list[Event], Source]] = [
        ([AllBlocksCleared()], begin),
        ([stored, first, removed], SOURCE),
        ([], SOURCE),
    ]
    lines = [encode(Batch(1.5, events, None, source)).hex() for events, source in batches]
    done = subprocess.run(
        [str(engine_python()), str(CHILDREN / "events.py")],
        input="\n".join(lines) + "\n",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"rank": None, "events": [["AllBlocksCleared", None, 0]]},
        {
            "rank": None,
            "events": [
                ["BlockStored", "CPU", 3],
                ["BlockStored", "STORAGE", 1],
                ["BlockRemoved", "STORAGE", 2],
            ],
        },
        {"rank": None, "events": []},
    ]
