"""The example in docs/protocol.md, sent byte for byte to a node."""

import hmac
import re
import struct
from pathlib import Path

import msgpack

from kvpool import Manifest
from tests.compat.nodes import beside_a_node
from tests.compat.plain_client import (
    Control,
    Proving,
    SharedMemory,
    connected,
    exactly,
    hello,
)
from tests.pools import ROOT
from tests.tenants import TOKENS, configuration, planned

PAGE = (ROOT / "docs" / "protocol.md").read_text()
EXAMPLE, _, PROOFS = PAGE.partition("\n## Example\n")[2].partition("\n### A proof\n")
PROOF, _, PEER = PROOFS.partition("\n### A proof of a peer\n")
HEX = re.compile(r"^((?:[0-9a-f]{2} ?)+)(?: {3,}.*)?$")


def blocks_of_bytes(text: str = EXAMPLE) -> list[bytes]:
    """What stands in each fence; the words beside the bytes are for people."""
    fences = re.findall(r"^```\n(.*?)^```", text.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    found = []
    for fence in fences:
        matches = [HEX.match(line) for line in fence.splitlines()]
        assert all(matches), fence
        found.append(bytes.fromhex("".join(match[1] for match in matches if match)))
    return found


def talk(path: str) -> None:
    greeting, opened, welcome, put, stored, get, got = blocks_of_bytes()
    with connected(path) as control, connected(path) as stream:
        control.sendall(greeting)
        head = exactly(control, 12)
        assert head[:8] == greeting[:8]
        answer = msgpack.unpackb(exactly(control, struct.unpack("<I", head[8:])[0]))
        packed = Manifest(model="m", layout="opaque", block_bytes=8).pack()
        assert len(packed) == 186
        asked = msgpack.packb({"id": 1, "op": "open_namespace", "manifest": packed})
        control.sendall(struct.pack("<I", len(asked)) + asked)
        assert exactly(control, len(opened)) == opened

        said = msgpack.packb({"kind": "stream", "client": answer["client"]})
        stream.sendall(greeting[:8] + struct.pack("<I", len(said)) + said)
        assert exactly(stream, len(welcome)) == welcome
        stream.sendall(put)
        assert exactly(stream, len(stored)) == stored
        stream.sendall(get)
        assert exactly(stream, len(got)) == got


def test_the_example_of_a_proof_is_what_the_page_says_it_is() -> None:
    (said,) = blocks_of_bytes(PROOF)
    exchange = Proving(b"kvpool example token", bytes(range(32)), bytes(range(32, 64)), b"a")
    signature = exchange.signature("stream", bytes(range(64, 80)), 1)
    assert said == exchange.client_proof + exchange.node_proof + exchange.key + signature


def test_the_example_of_a_peers_proof_is_what_the_page_says_it_is() -> None:
    (said,) = blocks_of_bytes(PEER)
    node, to = bytes(range(0x40, 0x50)), bytes(range(0x50, 0x60))
    both = bytes(range(64)) + node + struct.pack("<Q", 7) + to + b"\x04\x00prod" + b"a"
    key = b"kvpool example token"
    answered = to + struct.pack("<Q", 9)
    assert said == hmac.digest(key, b"kvpool peer 2" + both, "sha256") + hmac.digest(
        key, b"kvpool peer node 2" + both + answered, "sha256"
    )


def prove(path: str) -> None:
    """As one tenant and as the other, and with shared memory of either."""
    packed = Manifest(model="m", layout="opaque", block_bytes=8).pack()
    for tenant in ("a", "b", ""):
        control = Control(path, TOKENS[tenant or "b"], tenant)
        assert control.facts["tenant"] == (tenant or "b")
        number = control.ask("open_namespace", manifest=packed)["number"]
        memory = SharedMemory(path, control)
        assert memory.find(number, bytes(16)) is None
        with connected(path) as stream:
            hello(stream, **control.hello("stream"))
        memory.close()
        control.sock.close()


def test_a_client_from_the_page_proves_its_token(tmp_path: Path) -> None:
    configured = configuration(tmp_path, {"a": "", "b": ""})
    beside_a_node(tmp_path, prove, planned(configured, log_level="error"))


def test_the_example_is_what_a_node_says(tmp_path: Path) -> None:
    beside_a_node(tmp_path, talk)
