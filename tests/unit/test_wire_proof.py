"""Proofs of a token: what they depend on, and that a signature is taken once, in any order."""

import hashlib
import hmac
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import wire
from kvpool.wire_proof import WINDOW, Exchange, Signer, Verifier, is_same

KEY = bytes(range(32))
CLIENT = bytes(range(16))
N, C = b"n" * 32, b"c" * 32


def signed(signer: Signer, kind: wire.Kind = "stream") -> wire.Hello:
    return wire.Hello(kind, CLIENT, "", 0, **signer.signed(kind, CLIENT))


def test_the_proofs_are_what_the_page_says() -> None:
    exchange = Exchange(N, C, "a")
    for label, found in (
        (b"kvpool client 2", exchange.client_proof("tök€n")),
        (b"kvpool node 2", exchange.node_proof("tök€n")),
        (b"kvpool session 2", exchange.session_key("tök€n")),
    ):
        assert found == hmac.new("tök€n".encode(), label + N + C + b"a", hashlib.sha256).digest()


def test_every_part_of_what_was_said_changes_every_proof() -> None:
    exchanges = [
        Exchange(N, C, "a"),
        Exchange(b"m" * 32, C, "a"),
        Exchange(N, b"d" * 32, "a"),
        Exchange(C, N, "a"),
        Exchange(N, C, ""),
        Exchange(N, C, "b"),
    ]
    proofs = [
        make(token)
        for each in exchanges
        for make in (each.client_proof, each.node_proof, each.session_key)
        for token in ("t", "u")
    ]
    assert len(set(proofs)) == len(proofs)


def test_nothing_is_the_same_as_no_proof() -> None:
    assert is_same(b"x" * 32, b"x" * 32)
    assert not is_same(b"x" * 32, b"x" * 31)
    assert not is_same(b"x" * 32, None)


def test_a_signature_is_taken_once() -> None:
    signer, verifier = Signer(KEY), Verifier(KEY)
    hellos = [signed(signer) for _ in range(20)]
    assert [verifier.check(each) for each in hellos] == [None] * 20
    assert [verifier.check(each) for each in hellos] == ["replayed"] * 20


@pytest.mark.parametrize("change", ["kind", "client", "counter", "mac", "key", "none"])
def test_a_signature_is_good_for_one_hello_only(change: str) -> None:
    hello = signed(Signer(KEY))
    fields = {name: getattr(hello, name) for name in hello.__slots__}
    fields |= {
        "kind": {"kind": "shm"},
        "client": {"client": bytes(16)},
        "counter": {"counter": 2},
        "mac": {"mac": bytes(32)},
        "key": {},
        "none": {"mac": None},
    }[change]
    verifier = Verifier(bytes(32) if change == "key" else KEY)
    assert verifier.check(wire.Hello(**fields)) == ("no_token" if change == "none" else "bad_token")
    assert Verifier(KEY).check(hello) is None


@given(
    counters=st.lists(st.integers(1, 3 * WINDOW) | st.integers(1, 5), min_size=1, max_size=60),
)
def test_counters_in_any_order_against_a_set(counters: list[int]) -> None:
    signers = {each: Signer(KEY, iter([each])) for each in set(counters)}  # type: ignore[arg-type]
    hellos = {each: signed(signer) for each, signer in signers.items()}
    verifier, seen = Verifier(KEY), set[int]()
    for each in counters:
        newest = max(seen, default=0)
        expected = each not in seen and each > newest - WINDOW
        assert (verifier.check(hellos[each]) is None) is expected
        if expected:
            seen.add(each)


def test_threads_that_sign_at_the_same_time_use_no_counter_twice(
    rng: np.random.Generator,
) -> None:
    signer, verifier = Signer(KEY), Verifier(KEY)
    hellos: list[wire.Hello] = []
    threads = [
        threading.Thread(target=lambda: hellos.extend(signed(signer) for _ in range(100)))
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    order = rng.permutation(len(hellos))
    assert [verifier.check(hellos[at]) for at in order] == [None] * 800
