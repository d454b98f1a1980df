"""Clients that attack: with the memory that they were given, as themselves or as another user.

What all clients read can be changed by none of them; what is a client's own harms that client.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import intruders
from tests.pools import opaque
from tests.served import (
    Blocks,
    Served,
    Worker,
    assert_all_comes_back,
    held,
    nobody_holds,
    served,
    wait_for,
    working,
)

NUMBERS = range(64)
REFUSED = {"EACCES", "EPERM", "EBADF", "EINVAL"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One that every user can go through, which pytest's own cannot be."""
    made = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module", params=["elastic", "sealed"])
def daemon(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    with served(
        folder, dram="16MiB", evict_ahead=0, arena=request.param, socket_mode="0666"
    ) as running:
        yield running


@pytest.fixture
def witness(daemon: Served) -> Iterator[Blocks]:
    """Has stored blocks, which must be the same in the end; and others can be stored."""
    with daemon.connect("shm", name="witness") as pool:
        blocks = Blocks(pool)
        blocks.put_all(NUMBERS)
        yield blocks
        assert blocks.get(NUMBERS) == len(NUMBERS)
        with daemon.connect("tcp") as other:
            assert Blocks(other).get(NUMBERS) == len(NUMBERS)
        blocks.put_all(range(1000, 1016))
        assert blocks.get(range(1000, 1016)) == 16
        wait_for(lambda: nobody_holds(pool), what="nobody holds anything")
        assert_all_comes_back(pool, blocks.space)


def is_sealed(daemon: Served) -> bool:
    return daemon.options["arena"] == "sealed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_change_nothing(daemon: Served, witness: Blocks) -> None:
    with working(intruders.try_all, daemon.unix_address, intruders.NOBODY, True) as intruder:
        found = intruder.hear()
        assert intruder.join() == 0
    assert {what: how for what, how in found.items() if how not in REFUSED} == {}
    assert found["arena: reopen and map"] == found["index: reopen and map"] == "EACCES"
    with working(intruders.look_into, intruders.NOBODY, daemon.pid) as intruder:
        assert set(intruder.hear().values()) <= REFUSED


def test_the_same_user_can_change_nothing_that_is_sealed(daemon: Served, witness: Blocks) -> None:
    """Elastic, a process of the node's own user (or root) is trusted not to open its files anew."""
    with working(intruders.try_all, daemon.unix_address, None, is_sealed(daemon)) as intruder:
        found = intruder.hear()
        assert intruder.join() == 0
    assert {what: how for what, how in found.items() if how not in REFUSED} == {}


@pytest.mark.parametrize("which", ["arena", "index", "view"])
def test_a_store_into_shared_blocks_kills_who_does_it(
    daemon: Served, witness: Blocks, which: str
) -> None:
    number = {"arena": intruders.ARENA, "index": intruders.INDEX, "view": 0}[which]
    with working(intruders.write_into, daemon.unix_address, number, which == "view") as intruder:
        assert intruder.hear() == "ready"
        assert intruder.join() == -signal.SIGSEGV


def test_scribbling_on_all_that_is_its_own(
    daemon: Served, witness: Blocks, rng: np.random.Generator
) -> None:
    """Others are served right meanwhile; such a client is dropped for a reason, or ends."""
    garbage = witness.pool.stats()["server"]["closed_garbage"]
    reasons = set()
    for _ in range(3):
        arguments = daemon.unix_address, int(rng.integers(1 << 32)), 0.3
        with working(intruders.scribble, *arguments) as intruder:
            assert intruder.hear() == "ready"
            serve_others_until_it_speaks(witness, intruder)
            assert intruder.hear() == "done"
            assert intruder.join() == 0
        wait_for(lambda: nobody_holds(witness.pool), what=f"{held(witness.pool)} is free")
        reasons.add(witness.pool.stats()["server"]["last_closed"])
    print(f"closed for: {reasons}")
    assert witness.pool.stats()["server"]["closed_garbage"] > garbage


def test_asking_for_nonsense(daemon: Served, witness: Blocks, rng: np.random.Generator) -> None:
    """Requests that look right, whose payload is counted wrongly and changes while it is taken."""
    arguments = daemon.unix_address, int(rng.integers(1 << 32)), 2.0
    with working(intruders.ask_nonsense, *arguments) as intruder:
        assert intruder.hear() == "ready"
        serve_others_until_it_speaks(witness, intruder)
        asked, answered = intruder.hear()
        assert intruder.join() == 0
    print(f"{asked} requests, {answered} answered; {witness.pool.stats()['server']['last_closed']}")
    assert answered > 10
    wait_for(lambda: nobody_holds(witness.pool), what=f"{held(witness.pool)} is free")
    nonsense = witness.pool.namespace(opaque("nonsense", block_bytes=intruders.PAGE))
    nonsense.drop()


def serve_others_until_it_speaks(witness: Blocks, intruder: Worker) -> None:
    turn = 0
    while not intruder.pipe.poll(0):
        turn += 1
        numbers = range(2000 + turn % 8 * 4, 2004 + turn % 8 * 4)
        witness.space.remove(witness.keys(numbers))
        witness.put_all(numbers)
        assert witness.get(numbers) == 4
        assert witness.get(NUMBERS) == len(NUMBERS)
    witness.space.remove(witness.keys(range(2000, 2032)))


def test_a_client_that_claims_to_read_everything(daemon: Served, witness: Blocks) -> None:
    """It may hold its share of the pool; one that holds more is ended within moments."""
    pool = witness.pool
    fill = range(3000, 3000 + 16 * 16)  # as much as the pool has
    before = pool.stats()["clients_ended_for_pins"]
    with working(intruders.name_all_slots, daemon.unix_address, witness.block_bytes) as intruder:
        assert intruder.hear() == "ready"
        witness.put(fill)  # some may find no room, as long as it lasts
        wait_for(lambda: pool.stats()["clients_ended_for_pins"] > before, what="it is ended")
        wait_for(lambda: pool.stats()["clients"] == 1, what="what it named is free")
        assert "pinned more than it may" in pool.stats()["server"]["last_closed"]
        witness.put_all(fill)
        assert witness.get(fill[-64:]) == 64
    wait_for(lambda: held(pool)["slots_held_for_views"] == 0, what="it is gone")
    witness.space.drop()
    witness.put_all(NUMBERS)
