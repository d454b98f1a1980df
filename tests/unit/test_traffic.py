"""What a node tells of its namespaces and clients is what callers asked and were told."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import Miss, Reason, _core
from tests import daemons
from tests.pools import BLOCK_BYTES, got, key, keys, opaque, opened, payload, payloads, wait_until

STORED, PRESENT = 0, 1  # of put_status, beside the numbers of Reason
CHANNELS = ["unix", "tcp"]


def check_sums(told: dict[str, Any]) -> None:
    assert told["lookup_blocks"] == sum(
        told[f"lookup_{part}"] for part in ("dram", "ssd", "remote", "missed", "behind")
    )
    loaded = sum(told[f"loaded_{tier}"] for tier in ("dram", "ssd", "remote"))
    assert told["get_blocks"] == loaded + sum(told["missed"])
    assert told["put_blocks"] == sum(told["put_status"])
    assert len(told["missed"]) == len(Miss)
    assert len(told["put_status"]) == max(Reason) + 1


def traffic_of(node: Any, space: kvpool.Namespace) -> dict[str, Any]:
    told = {each["id"]: each for each in node.traffic()}
    found: dict[str, Any] = told[space.manifest.namespace_id]
    check_sums(found)
    return found


def use(space: kvpool.Namespace) -> None:
    """12 put, 2 of them twice; 7 of 10 looked up; 5 of 8 copied; 3 of 3 seen in place."""
    put(space, range(10))
    put(space, range(8, 12))
    assert space.lookup(keys(range(5, 15))).blocks == 7
    assert got(space, keys(range(7, 15))) == 5
    with space.view(keys(range(3))) as blocks:
        assert len(blocks) == 3


def put(space: kvpool.Namespace, numbers: Any) -> kvpool.PutResult:
    wanted = keys(numbers)
    return space.put(wanted, payloads(wanted))


def check_used(told: dict[str, Any], *, times: int = 1) -> None:
    assert told["block_bytes"] == BLOCK_BYTES
    assert (told["lookups"], told["lookup_blocks"]) == (times, 10 * times)
    assert (told["lookup_dram"], told["lookup_missed"]) == (7 * times, times)
    assert (told["gets"], told["get_blocks"]) == (2 * times, 11 * times)
    assert (told["loaded_dram"], told["loaded_ssd"]) == (8 * times, 0)
    assert told["missed"][Miss.ABSENT] == times
    assert told["missed"][Miss.BEHIND] == 2 * times
    assert told["put_blocks"] == 14 * times


def test_an_embedded_pool_tells_what_each_namespace_was_asked() -> None:
    with opened() as pool:
        space, other = pool.namespace(opaque("a")), pool.namespace(opaque("b"))
        use(space)
        told = traffic_of(pool._node, space)
        check_used(told)
        assert (told["number"], told["blocks"]) == (0, 12)
        assert (told["views"], told["view_blocks"]) == (1, 3)
        assert (told["put_status"][STORED], told["put_status"][PRESENT]) == (12, 2)
        unused = traffic_of(pool._node, other)
        assert unused["lookups"] + unused["gets"] + unused["put_blocks"] == 0


def test_a_drop_keeps_what_was_counted() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        use(space)
        assert space.drop() == 12
        told = traffic_of(pool._node, space)
        check_used(told)
        assert told["blocks"] == 0


def test_reserved_blocks_count_as_puts() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        with space.reserve(key(1)) as slot:
            assert slot.buffer is not None
            slot.buffer[:] = payload(key(1))
            slot.commit()
        slot = space.reserve(key(2))
        slot.abort()
        status = traffic_of(pool._node, space)["put_status"]
        assert (status[STORED], status[Reason.FAILED]) == (1, 1)


# --- served --------------------------------------------------------------------------------------


class WholeDaemon(daemons.Running):
    """One with the core's server, in this process."""

    def __init__(self, folder: Path, **rates: int) -> None:
        self.rates = rates
        super().__init__(daemons.planned(folder, listen="127.0.0.1:0"))

    async def _serve(self) -> None:
        (tenant,), (planned,) = self.tenants.values(), self.plan.tenants.values()
        options = {**planned.server, **self.rates}
        self.server: Any = _core.Server.create(self.node.watched, **options)
        tenant.server = self.server
        await super()._serve()

    def connect(self, channel: str) -> kvpool.Pool:
        return kvpool.connect(self.address if channel == "unix" else self.tcp_address)


@contextlib.contextmanager
def whole_daemon(folder: Path, **rates: int) -> Iterator[WholeDaemon]:
    daemon = WholeDaemon(folder, **rates)
    try:
        yield daemon
    finally:
        daemon.stop()


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_node_tells_what_its_clients_asked(tmp_path: Path, channel: str) -> None:
    with whole_daemon(tmp_path) as daemon:
        with daemon.connect(channel) as pool:
            space = pool.namespace(opaque())
            use(space)
            check_used(traffic_of(daemon.node, space))
            (client,) = daemon.server.clients()
            assert client["shm"] == (channel == "unix")
            assert (client["gets"] + client["views"], client["leases"]) == (2, 0)
            assert client["get_blocks"] + client["view_blocks"] == 8
            assert client["get_bytes"] == client["get_blocks"] * BLOCK_BYTES
            assert client["bytes_in"] >= 12 * BLOCK_BYTES
            assert client["requests"] > 0
            assert daemon.server.lease_ages() == [0] * 5
        wait_until(lambda: daemon.server.clients() == [])
        with daemon.connect(channel) as pool:
            space = pool.namespace(opaque())
            space.drop()
            use(space)
            check_used(traffic_of(daemon.node, space), times=2)


@pytest.mark.parametrize("channel", CHANNELS)
def test_puts_over_the_limit_are_refused_at_once(tmp_path: Path, channel: str) -> None:
    # The first leaves a debt of hours.
    with whole_daemon(tmp_path, put_bytes_per_s=1) as daemon, daemon.connect(channel) as pool:
        space = pool.namespace(opaque())
        assert put(space, range(3)).stored == 3
        refused = put(space, range(10, 13))
        assert refused.reasons == [Reason.LIMITED, *[Reason.CHAIN_BROKEN] * 2]
        assert put(space, range(3)).present >= (3 if channel == "unix" else 0)
        assert got(space, keys(range(3))) == 3
        assert traffic_of(daemon.node, space)["put_status"][Reason.LIMITED] >= 1
        daemon.server.set_rates(0, 0)
        assert put(space, range(10, 13)).stored == 3


def test_gets_over_the_limit_are_misses(tmp_path: Path) -> None:
    with (
        whole_daemon(tmp_path, get_bytes_per_s=1) as daemon,
        daemon.connect("tcp") as pool,
        daemon.connect("unix") as beside,
    ):
        space, in_place = pool.namespace(opaque()), beside.namespace(opaque())
        wanted = keys(range(4))
        put(space, range(4))
        out, misses = bytearray(4 * BLOCK_BYTES), bytearray(4)
        assert space.get_into(wanted, out) == 4
        assert space.get_into(wanted, out, misses=misses) == 0
        assert list(misses) == [Miss.LIMITED, *[Miss.BEHIND] * 3]
        assert got(in_place, wanted) == 4  # no request, so no limit
        assert traffic_of(daemon.node, space)["missed"][Miss.LIMITED] == 1


def test_rates_are_whole_numbers_that_are_not_negative(tmp_path: Path) -> None:
    with opened() as pool:
        server = _core.Server.create(pool._node)
        for rates in ((-1, 0), (0, 1 << 64), (0.5, 0)):
            with pytest.raises(TypeError):
                server.set_rates(*rates)
        server.close()
