"""Reads batches of events with vLLM's own classes: events.py < batches

One line of hexadecimal digits each in; one line of JSON each out: the types of the events, their
media and how many keys they name.
"""

import json
import os
import sys

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import msgspec  # noqa: E402
from vllm.distributed.kv_events import KVEventBatch  # noqa: E402

decoder = msgspec.msgpack.Decoder(KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    told = [
        [type(each).__name__, getattr(each, "medium", None), len(getattr(each, "block_hashes", []))]
        for each in batch.events
    ]
    ANSWERS.write(json.dumps({"rank": batch.data_parallel_rank, "events": told}) + "\n")
ANSWERS.flush()
