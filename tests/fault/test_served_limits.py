"""A daemon that has run out: of room, of disk, of descriptors, of places; or that cannot begin.

Who asks is told why; who was served before is served on; and it recovers.
"""

import contextlib
import resource
import socket
from pathlib import Path

import pytest

import kvpool
from kvpool import NoResource, Put, Reason, Refused
from kvpool.replay.payload import keys_of
from tests.served import (
    Blocks,
    Served,
    assert_all_comes_back,
    clients,
    held,
    nobody_holds,
    served,
    wait_for,
)
from tests.tiers import fill_disk, mounted

CHANNELS = ("shm", "tcp")
MIB = 1 << 20


def test_a_pool_that_another_client_has_pinned(tmp_path: Path) -> None:
    with (
        served(tmp_path, dram="8MiB", evict_ahead=0, pin_share=1.0) as daemon,
        daemon.connect("shm") as reader,
        daemon.connect("shm") as here,
        daemon.connect("tcp") as elsewhere,
    ):
        theirs, ours = Blocks(reader), [Blocks(here), Blocks(elsewhere)]
        numbers = range(128)  # 8 MiB
        stored = theirs.put(numbers).stored
        with theirs.space.view(keys_of(numbers[:stored])) as viewed:
            assert len(viewed) == stored >= 100
            for first, blocks in zip((500, 600), ours, strict=True):
                no_room_for(blocks, range(first, first + 40))
            assert all(map(theirs.is_right, numbers, viewed))
        del viewed
        for first, blocks in zip((700, 800), ours, strict=True):
            blocks.put_all(range(first, first + 16))
            assert blocks.get(range(first, first + 16)) == 16
        assert_all_comes_back(reader, theirs.space)


def no_room_for(blocks: Blocks, numbers: range) -> None:
    result = blocks.put(numbers, timeout=1)
    reasons = result.reasons[result.stored :]
    assert reasons[0] is Reason.POOL_PINNED
    assert set(reasons[1:]) == {Reason.CHAIN_BROKEN}
    assert blocks.get(numbers[: result.stored]) == result.stored
    last = numbers[-1:]
    slot = blocks.space.reserve(keys_of(last))
    if slot.buffer is not None:  # memory of this client; the pool's is asked for at commit
        slot.buffer[:] = blocks.payload(last).tobytes()
        slot.commit()
    assert (slot.status, slot.reason) == (Put.NO_ROOM, Reason.POOL_PINNED)


def test_a_client_may_pin_its_share_and_no_more(tmp_path: Path) -> None:
    with served(tmp_path, dram="8MiB", pin_share=0.25) as daemon, daemon.connect("shm") as pool:
        blocks = Blocks(pool)
        blocks.put_all(range(100))
        with contextlib.ExitStack() as views:
            pinned = 0
            for number in range(0, 100, 10):
                viewed = views.enter_context(blocks.space.view(keys_of(range(number, number + 10))))
                assert all(map(blocks.is_right, range(number, number + 10), viewed))
                pinned += len(viewed)
            assert 0 < pinned * blocks.block_bytes <= 2 * MIB
            assert blocks.get(range(100)) == 100  # copies need no pin that lasts
            del viewed
        with blocks.space.view(keys_of(range(20))) as viewed:
            assert len(viewed) == 20
        del viewed
        assert_all_comes_back(pool, blocks.space)


def test_a_disk_that_others_fill(tmp_path: Path) -> None:
    """What was promised to lie on the SSD does, and what cannot be is not promised."""
    with mounted(tmp_path, "ext4") as disk:
        options = {
            "ssd": str(disk / "tier"),
            "ssd_capacity": "8MiB",
            "ssd_free_floor": "0",
            "durability": "durable",
            "dram": "4MiB",
        }
        with served(tmp_path, **options) as daemon:
            with daemon.connect("shm") as here, daemon.connect("tcp") as elsewhere:
                both = [Blocks(here), Blocks(elsewhere)]
                both[0].put_all(range(10))
                fill_disk(disk)
                for number in range(200):  # three times what fits
                    result = both[number % 2].put([number])
                    assert result[0] is not Put.NO_ROOM or result.not_durable == 1
                assert [blocks.get([199]) for blocks in both] == [1, 1]
                with pytest.raises(NoResource):
                    here.resize(ssd_capacity="16MiB")
                before = both[1].there(range(200))
            daemon.kill()
            daemon.start()
            with daemon.connect("tcp") as pool:
                blocks = Blocks(pool)
                there = blocks.there(range(200))
                assert 199 in there
                assert len(there) >= len(before) // 2
                blocks.put_all([300])
            daemon.stop()


def test_out_of_descriptors(tmp_path: Path) -> None:
    """Who comes too late is told so; who is connected goes on; places that are left are given."""
    with (
        served(tmp_path, limits={resource.RLIMIT_NOFILE: 96}, dram="8MiB") as daemon,
        daemon.connect("shm") as pool,
    ):
        blocks = Blocks(pool)
        blocks.put_all(range(16))
        with contextlib.ExitStack() as crowd:
            refused: list[str] = []
            while not refused:
                try:
                    crowd.enter_context(daemon.connect("tcp", timeout=2, connections=4))
                except (Refused, kvpool.Unreachable) as error:
                    refused.append(str(error))
            print(refused[0])
            assert "descriptors" in refused[0]
            assert clients(pool) >= 5
            blocks.put_all(range(100, 116))
            assert blocks.get(range(16)) == 16
            with blocks.space.view(keys_of(range(16))) as viewed:
                assert len(viewed) == 16
            del viewed
            for _ in range(20):  # more than it has descriptors for, altogether
                with pytest.raises((Refused, kvpool.Unreachable)):
                    daemon.connect("tcp", timeout=2, connections=4).close()
            blocks.put_all(range(200, 216))
        wait_for(lambda: nobody_holds(pool), what="the crowd is gone")
        with daemon.connect("shm") as other:
            assert other.stats()["client"]["shares_memory"]
            assert Blocks(other).get(range(16)) == 16


def test_without_descriptors_for_shared_memory_it_goes_without(tmp_path: Path) -> None:
    with (
        served(tmp_path, limits={resource.RLIMIT_NOFILE: 64}, dram="8MiB", lanes=16) as daemon,
        contextlib.ExitStack() as crowd,
    ):
        pools = []
        with contextlib.suppress(Refused, kvpool.Unreachable):
            while len(pools) < 10:
                pools.append(crowd.enter_context(daemon.connect("shm", timeout=2)))
        shared = [pool.stats()["client"]["shares_memory"] for pool in pools]
        print(f"shares memory: {shared}")
        assert shared[0]
        for number, pool in enumerate(pools):
            blocks = Blocks(pool)
            blocks.put_all([number])
            assert blocks.get(range(number + 1)) == number + 1


def test_more_clients_than_it_takes(tmp_path: Path) -> None:
    with served(tmp_path, max_clients=3) as daemon, daemon.connect("shm") as pool:
        with daemon.connect("tcp"), daemon.connect("shm"):
            for channel in CHANNELS:
                with pytest.raises(Refused) as refused:
                    daemon.connect(channel)
                assert "3 clients" in str(refused.value)
            assert clients(pool) == 3
        wait_for(lambda: clients(pool) == 1, what="two are gone")
        with daemon.connect("shm") as other:
            Blocks(other).put_all([1])
        assert not any(held(pool).values())


# --- that cannot begin ---------------------------------------------------------------------------


def test_a_port_and_a_socket_that_are_in_use(tmp_path: Path) -> None:
    with served(tmp_path) as daemon:
        port = daemon.tcp_address.rpartition(":")[2]
        (tmp_path / "b").mkdir()
        second = Served(tmp_path / "b", listen=f"127.0.0.1:{port}")
        code, line = second.refused()
        assert (code, f"127.0.0.1:{port}: Address already in use" in line) == (1, True), line
        assert not Path(second.socket_path).exists()
        second.close()
        third = Served(tmp_path / "b", socket=daemon.socket_path)
        code, line = third.refused()
        assert (code, f"another kvpool serve has it (process {daemon.pid})" in line) == (1, True)
        third.close()
        with daemon.connect("shm") as pool:  # neither took anything from it
            Blocks(pool).put_all([1])


def test_a_socket_that_somebody_else_has(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "node.sock"))
        other.listen()
        code, line = refusal(Served(tmp_path))
        assert (code, "another process listens there" in line) == (1, True), line


def test_a_socket_that_cannot_be_made(tmp_path: Path) -> None:
    code, line = refusal(Served(tmp_path, socket=str(tmp_path / "no" / "no" / "node.sock")))
    assert (code, "No such file or directory" in line) == (1, True), line


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    code, line = refusal(Served(tmp_path, dram="4GiB", limits={resource.RLIMIT_AS: 4 << 30}))
    assert (code, "memory" in line.lower()) == (1, True), line
    assert not Path(tmp_path / "node.sock").exists()


def test_a_tier_that_another_node_has(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    options = {"ssd": str(tmp_path / "tier"), "ssd_free_floor": "0", "dram": "8MiB"}
    with served(tmp_path, ssd_capacity="8MiB", **options) as daemon:
        code, line = refusal(Served(tmp_path / "b", **options))
        assert (code, str(tmp_path / "tier") in line) == (1, True), line
        with daemon.connect("shm") as pool:
            Blocks(pool).put_all([1])


def refusal(daemon: Served) -> tuple[int, str]:
    try:
        return daemon.refused()
    finally:
        daemon.close()
