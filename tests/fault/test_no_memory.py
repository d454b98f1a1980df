"""The machine refuses: open() says NoResource, and a put without pages is an un-stored block.

Limits are set in processes of their own. That a slot's pages cannot be had while the pool runs is
played by the fault point put.pages, for a process whose memory runs out for real is killed.
"""

import pytest

from kvpool import KvpoolError, NoResource, Reason
from tests.pools import got, keys, opaque, opened, payloads, run_python

UNDER_LIMITS = """
import os, resource, sys
import kvpool

kind, dram = sys.argv[1], sys.argv[2]
limits = [int(limit) for limit in sys.argv[3:]]


def addresses_in_use():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def attempt(limit):
    if kind == "RLIMIT_AS":
        limit += addresses_in_use()
    resource.setrlimit(getattr(resource, kind), (limit, limit))
    try:
        with kvpool.open(dram) as pool:
            space = pool.namespace(kvpool.Manifest(model="m", layout="opaque", block_bytes=4096))
            put = space.put([bytes(16)], bytes(4096))
            # The pool is there, and what it needs at the first block is not.
            return 0 if put.stored == 1 else 2 if put.reason is kvpool.Reason.NO_MEMORY else 4
    except kvpool.NoResource as error:
        return 1 if isinstance(error, OSError) and str(error) else 3


for limit in limits:
    child = os.fork()
    if child == 0:
        os._exit(attempt(limit))
    print(limit, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
OPENED, REFUSED, NOT_STORED = 0, 1, 2


def outcomes(kind: str, dram: str, limits: list[int]) -> dict[int, int]:
    code, out, err = run_python(UNDER_LIMITS, kind, dram, *map(str, limits))
    assert (code, err) == (0, "")
    return {int(limit): int(outcome) for limit, outcome in map(str.split, out.splitlines())}


def test_addresses_that_are_refused_at_any_step_of_open() -> None:
    # A pool of 4 MiB reserves 64 MiB of addresses, and more for its index, books and thread.
    limits = [mib << 20 for mib in range(4, 128, 2)]
    found = outcomes("RLIMIT_AS", "4MiB", limits)
    assert set(found.values()) == {OPENED, REFUSED}
    first = min(limit for limit, outcome in found.items() if outcome == OPENED)
    assert all((outcome == OPENED) == (limit >= first) for limit, outcome in found.items())
    assert first > 64 << 20


def test_books_that_are_refused_when_the_arena_was_not() -> None:
    # 64 GiB of addresses for the arena; index, records and policy take some hundred MiB more.
    limits = [(64 << 30) + (mib << 20) for mib in range(0, 1024, 32)]
    found = outcomes("RLIMIT_AS", "4GiB", limits)
    assert {OPENED, REFUSED} <= set(found.values()) <= {OPENED, REFUSED, NOT_STORED}
    assert sum(outcome == REFUSED for outcome in found.values()) > 8


def test_descriptors_that_are_refused() -> None:
    found = outcomes("RLIMIT_NOFILE", "4MiB", list(range(12)))
    assert found[3] == REFUSED
    assert found[11] == OPENED
    assert set(found.values()) == {OPENED, REFUSED}


def test_a_file_size_that_is_refused() -> None:
    found = outcomes("RLIMIT_FSIZE", "4MiB", [4096, 1 << 20, 1 << 30])
    assert list(found.values()) == [REFUSED, REFUSED, OPENED]


def test_more_than_the_machine_has_addresses_for() -> None:
    assert outcomes("RLIMIT_AS", "16TiB", [1 << 40]) == {1 << 40: REFUSED}


def test_a_refusal_is_of_the_tree_and_an_os_error() -> None:
    assert issubclass(NoResource, KvpoolError)
    assert issubclass(NoResource, OSError)


@pytest.mark.parametrize("huge_pages", [False, True])
def test_a_pool_without_pages_refuses_puts_and_goes_on(huge_pages: bool) -> None:
    chain = keys(range(3))
    with opened("16MiB", huge_pages=huge_pages) as pool:
        space = pool.namespace(opaque())
        stored = keys(range(100, 110))
        space.put(stored, payloads(stored))
        pool._node.fault_fail("put.pages", times=10)
        for _ in range(10):
            result = space.put(chain, payloads(chain))
            assert result.reasons == [Reason.NO_MEMORY, Reason.CHAIN_BROKEN, Reason.CHAIN_BROKEN]
            assert got(space, stored) == 10
        assert pool._node.fault_hits("put.pages") == 10
        assert pool.stats()["put_not_stored"] == 30
        assert space.put(chain, payloads(chain)).stored == 3
        assert got(space, chain) == 3
