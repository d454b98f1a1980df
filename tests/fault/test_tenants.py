"""Two tenants of a real daemon: each has its own blocks and memory, and knows nothing of the other.

Who may do what is in test_tenants_identity and test_tenants_handshake; here it is processes, users,
mapped memory, a configuration that changes, and memory that goes from one to the other.
"""

import contextlib
import json
import mmap
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import Miss, NotAllowed, Refused, Unreachable, _core
from tests.frames import RawClient
from tests.intruders import ARENA, INDEX, NOBODY, become
from tests.operated import command
from tests.served import Blocks, Served, nobody_holds, served, wait_for, working
from tests.tenants import TOKENS, configuration

MIB = 1 << 20
NUMBERS = range(32)


@contextlib.contextmanager
def daemon_of(
    folder: Path, tenants: dict[str, str], more: str = "", **options: Any
) -> Iterator[Served]:
    """Root's, whose users are tenants by their tokens. The file says all but how to connect."""
    options = {"config": str(configuration(folder, tenants, more)), **options}
    with served(folder, dram=None, **options) as daemon:
        yield daemon


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users can look into; pytest's are root's alone."""
    made = Path(tempfile.mkdtemp(prefix="kvpool-tenants-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def connect(daemon: Served, who: str, channel: str = "shm", **options: Any) -> kvpool.Pool:
    return daemon.connect(channel, token=TOKENS[who], **options)


# --- apart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_one_tenant_s_blocks_are_not_there_for_another(tmp_path: Path, channel: str) -> None:
    two = {"a": "", "b": ""}
    with (
        daemon_of(tmp_path, two, '[pool]\ndram = "64MiB"') as daemon,
        connect(daemon, "a", channel) as of_a,
        connect(daemon, "b", channel) as of_b,
    ):
        here, there = Blocks(of_a), Blocks(of_b)  # the same manifest
        here.put_all(NUMBERS)
        assert here.get(NUMBERS) == len(NUMBERS)
        found = there.space.lookup(there.keys(NUMBERS))
        assert (found.blocks, found.miss) == (0, Miss.ABSENT)
        assert there.get(NUMBERS) == 0
        assert there.space.remove(there.keys(NUMBERS)) == 0
        assert there.space.drop() == 0
        assert there.space.temperature(there.keys([0])[0]) is None
        before = of_b.stats()
        assert (before["blocks"], before["puts"], before["bytes_taken"]) == (0, 0, 0)
        assert of_a.stats()["blocks"] == len(NUMBERS)
        # The same keys hold something else there.
        odd = Blocks(of_b, model="other")
        odd.put_all(NUMBERS)
        assert here.get(NUMBERS) == len(NUMBERS)
        assert there.space.wait(there.keys([0]), 0.05) == 0


def pattern(name: str) -> bytes:
    """What a tenant's payload is made of: found in memory if it is anywhere there."""
    return f"<payload of {name}>".encode()


def put_pattern(pool: kvpool.Pool, name: str) -> list[bytes]:
    """A full tenant: its arena holds nothing but its pattern. Returns its keys."""
    manifest = kvpool.Manifest(model="m", layout="opaque", block_bytes=64 << 10)
    space = pool.namespace(manifest)
    keys = [f"{name}{number:015}".encode() for number in range(600)]
    block = (pattern(name) * 5000)[: 64 << 10]
    for key in keys:
        space.put([key], block)
    return keys


@pytest.mark.parametrize("arena", ["elastic", "sealed"])
def test_what_a_client_maps_has_no_byte_and_no_key_of_another_tenant(
    tmp_path: Path, arena: str
) -> None:
    more = f'[pool]\ndram = "32MiB"\nhuge_pages = false\narena = "{arena}"'
    with (
        daemon_of(tmp_path, {"a": "", "b": ""}, more) as daemon,
        connect(daemon, "a") as of_a,
        connect(daemon, "b") as of_b,
    ):
        keys = {"a": put_pattern(of_a, "a"), "b": put_pattern(of_b, "b")}
        for name, other in (("a", "b"), ("b", "a")):
            client = RawClient(daemon.unix_address, TOKENS[name])
            sock, fds, _ = client.shm()
            with sock:
                memory = {which: whole(fds[which]) for which in (ARENA, INDEX)}
                assert pattern(name) in memory[ARENA]  # else the search would prove nothing
                assert any(key in memory[INDEX] for key in keys[name])
                for each in memory.values():
                    assert pattern(other) not in each
                    assert not any(key in each for key in keys[other])
                for fd in fds:
                    os.close(fd)
            client.close()


def whole(fd: int) -> bytes:
    """What a file in memory holds, less its holes."""
    parts, at, end = [], 0, os.fstat(fd).st_size
    with mmap.mmap(fd, end, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        while at < end:
            try:
                begin = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # no more of it
                break
            at = os.lseek(fd, begin, os.SEEK_HOLE)
            parts.append(mapped[begin:at])
    return b"".join(parts)


def test_each_tenant_has_a_folder_of_the_ssd_and_finds_it_again(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    more = f'[pool]\ndram = "16MiB"\n[ssd]\npath = "{tier}"\ncapacity = "48MiB"\nadmit = "all"'
    more += '\nfree_floor = "1MiB"'
    with daemon_of(tmp_path, {"default": "", "a": "", "b": ""}, more) as daemon:
        for who in ("a", "b"):
            with connect(daemon, who) as pool:
                Blocks(pool).put_all(range(8 if who == "a" else 4))
                assert pool.flush(30)
        assert sorted(os.listdir(tier / "tenants")) == ["a", "b"]
        assert "slabs" in os.listdir(tier)
        assert (tier / "tenants").stat().st_mode & 0o077 == 0
        daemon.kill()
        daemon.start()
        with connect(daemon, "a") as of_a, connect(daemon, "b") as of_b:
            assert Blocks(of_a).get(range(8)) == 8
            assert Blocks(of_b).get(range(8)) == 4


def test_a_tier_that_comes_under_another_tenant_is_no_hit(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    more = f'[pool]\ndram = "16MiB"\n[ssd]\npath = "{tier}"\ncapacity = "32MiB"\nadmit = "all"'
    more += '\nfree_floor = "1MiB"'
    with daemon_of(tmp_path, {"a": "", "b": ""}, more) as daemon:
        with connect(daemon, "a") as pool:
            Blocks(pool).put_all(range(8))
            assert pool.flush(30)
        daemon.stop()
        for_a, for_b = tier / "tenants" / "a", tier / "tenants" / "b"
        for_a.rename(tmp_path / "aside")
        for_b.rename(for_a)
        (tmp_path / "aside").rename(for_b)
        daemon.start()
        with connect(daemon, "b") as pool:
            assert pool.stats()["ssd_restored_blocks"] == 8  # they are there, and nobody's
            assert Blocks(pool).get(range(8)) == 0


# --- who is refused ------------------------------------------------------------------------------


def say_who(pipe: Connection, address: str, uid: int, options: dict[str, Any]) -> None:
    """Connects as a user and says as which tenant, or why not; and what it may."""
    become(uid)
    os.environ.pop("KVPOOL_TOKEN", None)
    try:
        with kvpool.connect(address, timeout=5, **options) as pool:
            told = pool.stats()["tenant"]["name"]
            try:
                pool.trim()
                pipe.send((told, "administrator"))
            except NotAllowed:
                pipe.send((told, "tenant"))
    except Refused as error:
        pipe.send((error.code, str(error)))


def who(daemon: Served, uid: int, **options: Any) -> tuple[str, str]:
    with working(say_who, daemon.unix_address, uid, options) as worker:
        told: tuple[str, str] = worker.hear()
        assert worker.join() == 0
    return told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_is_the_tenant_that_has_it_and_no_other(folder: Path) -> None:
    tenants = {"a": f"uids = [{NOBODY}]", "b": "uids = [4242]"}
    options: dict[str, Any] = {"socket_mode": "0666"}
    with daemon_of(folder, tenants, '[pool]\ndram = "64MiB"', **options) as daemon:
        assert who(daemon, NOBODY) == ("a", "tenant")
        assert who(daemon, 4242) == ("b", "tenant")
        assert who(daemon, NOBODY, tenant="a") == ("a", "tenant")
        assert who(daemon, NOBODY, token=TOKENS["b"]) == ("b", "tenant")
        for told in (who(daemon, NOBODY, tenant="b"), who(daemon, NOBODY, tenant="no-such")):
            assert told[0] == "tenant"
            assert f"user {NOBODY} is not the tenant that was named" in told[1]
        code, text = who(daemon, 4343)
        assert code == "tenant"
        assert "user 4343 is no tenant of this node" in text
        assert who(daemon, 4343, token=TOKENS["a"]) == ("a", "tenant")
        assert who(daemon, 4343, token="wrong")[0] == "token"
        assert who(daemon, 4343, token=TOKENS["admin"], tenant="b") == ("b", "administrator")
        assert who(daemon, 0, tenant="b") == ("b", "administrator")
        assert who(daemon, 0)[0] == "tenant"  # loud: root's engine is not somebody's by chance
        assert "token of" not in daemon.log()


def test_reconnects_prove_again_and_with_the_token_of_the_time(tmp_path: Path) -> None:
    with daemon_of(tmp_path, {"a": "", "b": ""}, '[pool]\ndram = "64MiB"') as daemon:
        file = tmp_path / "client-token"
        file.write_text(TOKENS["a"])
        with daemon.connect("tcp", token_file=file) as pool:
            blocks = Blocks(pool)
            daemon.kill()
            (tmp_path / "a").write_text("another token")
            daemon.start()
            wait_for(
                lambda: "knows no such tenant" in pool.stats()["client"]["trouble"],
                what="the old token is refused",
            )
            assert blocks.get([0]) == 0
            file.write_text("another token\n")
            wait_for(lambda: pool.stats()["client"]["connected"], what="the new one is not")
            blocks.put_all(NUMBERS)
            assert blocks.get(NUMBERS) == len(NUMBERS)


def test_a_tenant_that_went_is_closed_over_tcp_though_no_token_is_left(tmp_path: Path) -> None:
    with daemon_of(tmp_path, {"a": ""}, '[pool]\ndram = "64MiB"') as daemon:
        with connect(daemon, "a", "tcp") as pool:
            Blocks(pool).put_all(NUMBERS)
        (tmp_path / "kvpool.toml").write_text(
            '[pool]\ndram = "64MiB"\n[tenants.b]\nuids = [1]\n'
            f'token_file = "{tmp_path / "admin"}"\n'
        )
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: "configuration reloaded" in daemon.log(), what="the reload")
        for options in ({}, {"tenant": "a"}):
            with pytest.raises(Refused, match="needs a token"):
                daemon.connect("tcp", **options)


def test_without_its_token_a_node_beyond_this_machine_lets_nobody_in(tmp_path: Path) -> None:
    """Until a restart it listens where it did, whatever a new file says about that."""
    (tmp_path / "token").write_text(TOKENS["a"])
    far = f'[server]\nlisten = "0.0.0.0:0"\ntoken_file = "{tmp_path / "token"}"\n'
    (tmp_path / "kvpool.toml").write_text(far)
    with served(tmp_path, config=str(tmp_path / "kvpool.toml"), tcp=False) as daemon:
        (tmp_path / "kvpool.toml").write_text('[server]\nlisten = "127.0.0.1:0"\n')
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: "configuration reloaded" in daemon.log(), what="the reload")
        port = daemon.tcp_address.rpartition(":")[2]
        with pytest.raises(Refused, match="needs a token"):
            kvpool.connect(f"tcp://127.0.0.1:{port}", timeout=5)


def test_many_waits_over_tcp_each_on_a_signed_connection(tmp_path: Path) -> None:
    """Made at the same time, so that they come in any order."""
    from concurrent.futures import ThreadPoolExecutor

    with (
        daemon_of(tmp_path, {"a": "", "b": ""}, '[pool]\ndram = "64MiB"') as daemon,
        connect(daemon, "a", "tcp") as pool,
        ThreadPoolExecutor(24) as threads,
    ):
        blocks = Blocks(pool)
        keys = blocks.keys([7])
        waits = [threads.submit(blocks.space.wait, keys, 20.0) for _ in range(24)]
        wait_for(lambda: pool.stats()["clients_waiting"] == 24, what="all of them wait")
        blocks.put_all([7])
        assert [each.result(20) for each in waits] == [1] * 24
        assert pool.stats()["tenant"]["refused"] == {}


# --- another configuration -----------------------------------------------------------------------


def reload(daemon: Served) -> None:
    """SIGHUP, and what came of it."""
    before = daemon.log().count("configuration ")
    daemon.signal(signal.SIGHUP)
    wait_for(lambda: daemon.log().count("configuration ") > before, what="it was reloaded")


def test_a_hangup_changes_what_can_change(tmp_path: Path) -> None:
    two = {"a": "max_clients = 1", "b": ""}
    with daemon_of(tmp_path, two, '[pool]\ndram = "32MiB"') as daemon:
        with connect(daemon, "a"), pytest.raises(Refused, match="of this tenant, its limit"):
            connect(daemon, "a", timeout=0.2)
        more = '[pool]\ndram = "64MiB"\nmax_blocks = 77\ntau_s = "9s"\n'
        configuration(tmp_path, {"a": 'max_clients = 3\ndram_min = "40MiB"', "b": ""}, more)
        with (tmp_path / "kvpool.toml").open("a") as file:
            file.write('[log]\nformat = "json"\n')
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: '"configuration reloaded"' in daemon.log(), what="the log is of JSON")
        told = [json.loads(line) for line in daemon.log().splitlines() if line.startswith("{")]
        (needs,) = [line for line in told if line["event"] == "a change needs a restart"]
        assert needs["options"] == "[pool] tau_s"
        with connect(daemon, "a") as first, connect(daemon, "a") as second:
            assert second.stats()["tenant"]["max_clients"] == 3
            assert first.stats()["blocks_limit"] == 77
            with connect(daemon, "admin", tenant="b") as of_b:
                wait_for(
                    lambda: first.stats()["bytes_limit"] + of_b.stats()["bytes_limit"] <= 64 * MIB,
                    what="the limits are within the budget",
                )
        with connect(daemon, "a") as pool:
            assert pool.stats()["tenant"]["dram_min"] == 40 * MIB


def test_a_reload_by_request_says_what_came_of_it(tmp_path: Path) -> None:
    with daemon_of(tmp_path, {}, '[pool]\ndram = "16MiB"') as daemon:
        words = ("reload", "--json", "--address", daemon.unix_address)
        for dram, tau, expected in (
            ("16MiB", "", ([], [], 0)),
            ("32MiB", "", (["[pool] dram"], [], 0)),
            ("1GiB", 'tau_s = "9s"', (["[pool] dram"], ["[pool] tau_s"], 1)),
            ("1GiB", 'tau_s = "9s"', ([], ["[pool] tau_s"], 1)),  # tried again
        ):
            configuration(tmp_path, {}, f'[pool]\ndram = "{dram}"\n{tau}')
            told = json.loads(command(*words).stdout)
            found = told["changed"], told["needs_restart"], len(told["refused"])
            assert found == expected


def test_without_tenants_a_hangup_resizes_the_pool(tmp_path: Path) -> None:
    with daemon_of(tmp_path, {}, '[pool]\ndram = "16MiB"') as daemon, daemon.connect("shm") as pool:
        configuration(tmp_path, {}, '[pool]\ndram = "32MiB"')
        reload(daemon)
        assert pool.stats()["bytes_limit"] == 32 * MIB
        Blocks(pool).put_all(NUMBERS)
        configuration(tmp_path, {}, '[pool]\ndram = "1GiB"')  # more than its arena has room for
        reload(daemon)
        assert "a change was refused" in daemon.log()
        assert pool.stats()["bytes_limit"] == 32 * MIB
        assert Blocks(pool).get(NUMBERS) == len(NUMBERS)


def test_a_file_with_a_mistake_changes_nothing(tmp_path: Path) -> None:
    with (
        daemon_of(tmp_path, {"a": "", "b": ""}, '[pool]\ndram = "32MiB"') as daemon,
        connect(daemon, "a") as pool,
    ):
        blocks = Blocks(pool)
        blocks.put_all(NUMBERS)
        before = pool.stats()["bytes_limit"]
        for text in ('[pool]\ndram = "8G"', "[pool\n", "[tenants.a]\ndram_min = 5\n", "[x]\n"):
            (tmp_path / "kvpool.toml").write_text(text)
            reload(daemon)
        assert daemon.log().count("configuration not reloaded") == 4
        assert "has the unknown unit 'G'" in daemon.log()
        assert pool.stats()["bytes_limit"] == before
        assert blocks.get(NUMBERS) == len(NUMBERS)
        with connect(daemon, "b", "tcp") as other:
            assert other.stats()["tenant"]["name"] == "b"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("table", ["", "[tenants.default]\n"])
def test_a_socket_for_all_users_lets_none_in_who_was_no_tenant(folder: Path, table: str) -> None:
    """The new file is safe by a mode of the socket that it does not have before a restart."""
    wide = '[server]\nsocket_mode = "0666"\n[tenants.default]\nuids = [4242]\n'
    path = folder / "kvpool.toml"
    path.write_text(wide)
    with served(folder, config=str(path), tcp=False) as daemon:
        assert who(daemon, 4242)[0] == "default"
        assert "is no tenant of this node" in who(daemon, 4343)[1]
        path.write_text(table)
        reload(daemon)
        assert "is no tenant of this node" in who(daemon, 4343)[1]


def test_a_token_that_was_taken_away_ends_who_had_it(tmp_path: Path) -> None:
    with (
        daemon_of(tmp_path, {"a": "", "b": ""}, '[pool]\ndram = "32MiB"') as daemon,
        connect(daemon, "a", "tcp") as of_a,
        connect(daemon, "b", "tcp") as of_b,
    ):
        stays, goes = Blocks(of_b), Blocks(of_a)
        stays.put_all(NUMBERS)
        goes.put_all(NUMBERS)
        (tmp_path / "a").write_text("another token")
        reload(daemon)
        assert "clients_ended=1" in daemon.log()
        wait_for(
            lambda: "knows no such tenant" in of_a.stats()["client"]["trouble"], what="a is refused"
        )
        assert goes.get([0]) == 0
        with pytest.raises(Unreachable):
            of_a.namespace(kvpool.Manifest(model="new", layout="opaque", block_bytes=5))
        assert stays.get(NUMBERS) == len(NUMBERS)
        assert of_b.stats()["client"]["reconnects"] == 0
        with daemon.connect("shm", token="another token") as again:
            assert Blocks(again).get(NUMBERS) == len(NUMBERS)  # the tenant is the same


def test_a_tenant_whose_table_went_is_closed_and_one_that_came_waits(tmp_path: Path) -> None:
    with (
        daemon_of(tmp_path, {"a": "", "b": ""}, '[pool]\ndram = "32MiB"') as daemon,
        connect(daemon, "a", "tcp") as of_a,
        connect(daemon, "b", "tcp") as of_b,
    ):
        configuration(tmp_path, {"a": "", "c": ""}, '[pool]\ndram = "32MiB"')
        reload(daemon)
        assert 'options="[tenants.b], [tenants.c]"' in daemon.log()
        wait_for(
            lambda: "knows no such tenant" in of_b.stats()["client"]["trouble"], what="b is closed"
        )
        with pytest.raises(Refused, match="knows no such tenant"):
            daemon.connect("shm", token="token of c")
        assert of_a.stats()["client"]["reconnects"] == 0
        daemon.stop()
        daemon.start()
        with daemon.connect("shm", token="token of c") as pool:
            assert pool.stats()["tenant"]["name"] == "c"


# --- one budget ----------------------------------------------------------------------------------


def test_a_tenant_that_needs_memory_gets_what_another_leaves(tmp_path: Path) -> None:
    """Half of 32 MiB each; one fills its half again and again, the other has 1 MiB in it."""
    two = {"a": 'dram_min = "4MiB"', "b": 'dram_min = "4MiB"'}
    with (
        daemon_of(tmp_path, two, '[pool]\ndram = "32MiB"\nevict_ahead = 0.0') as daemon,
        connect(daemon, "a") as of_a,
        connect(daemon, "b") as of_b,
    ):
        busy, quiet = Blocks(of_a), Blocks(of_b)
        quiet.put_all(range(16))
        assert (limit(of_a), limit(of_b)) == (16 * MIB, 16 * MIB)
        begin, seen = 0, [(16 * MIB, 16 * MIB)]

        def has_grown() -> bool:
            nonlocal begin
            busy.put(range(begin, begin + 64))
            begin += 64
            both = limit(of_a), limit(of_b)
            seen.append(both)
            assert sum(both) <= 32 * MIB
            return both[0] >= 24 * MIB

        wait_for(has_grown, what="the busy one has more")
        assert limit(of_b) >= 4 * MIB
        assert quiet.get(range(16)) == 16  # what is in use is left alone
        assert [a for a, _ in seen] == sorted(a for a, _ in seen)  # to, and not to and fro
        assert [-b for _, b in seen] == sorted(-b for _, b in seen)
        quiet_grows(of_a, of_b, quiet)
        wait_for(lambda: nobody_holds(of_a), what="nobody holds anything")


def quiet_grows(of_a: kvpool.Pool, of_b: kvpool.Pool, quiet: Blocks) -> None:
    """The other one comes back for its half, and gets it although the first uses all it has."""
    begin = 1000

    def has_half() -> bool:
        nonlocal begin
        quiet.put(range(begin, begin + 64))
        begin += 64
        assert limit(of_a) + limit(of_b) <= 32 * MIB
        return limit(of_b) >= 14 * MIB

    wait_for(has_half, what="it has its half again")


def limit(pool: kvpool.Pool) -> int:
    return int(pool.stats()["bytes_limit"])


def test_an_administrator_resizes_the_budget_and_no_less_than_was_promised(
    tmp_path: Path,
) -> None:
    two = {"a": 'dram_min = "8MiB"', "b": 'dram_min = "4MiB"'}
    with (
        daemon_of(tmp_path, two, '[pool]\ndram = "32MiB"') as daemon,
        connect(daemon, "a") as of_a,
        connect(daemon, "admin", "tcp", tenant="b") as admin,
    ):
        Blocks(of_a).put_all(range(200))
        admin.resize("16MiB")
        wait_for(lambda: limit(of_a) + limit(admin) <= 16 * MIB, what="the budget is kept")
        assert limit(of_a) >= 8 * MIB
        with pytest.raises(kvpool.BadArgument, match="what the tenants have for certain"):
            admin.resize("11MiB")
        with pytest.raises(kvpool.BadArgument, match="dram_max"):
            admin.resize("1GiB")
        admin.resize("64MiB", max_blocks=99)
        assert admin.stats()["blocks_limit"] == 99
        assert of_a.stats()["blocks_limit"] == 0


# --- rates ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(_core.Server, "set_rates"), reason="this core has no rates")
@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_a_tenant_over_its_rate_is_refused_and_no_other(tmp_path: Path, channel: str) -> None:
    two = {"a": 'put_rate = "1MiB"', "b": ""}
    with (
        daemon_of(tmp_path, two, '[pool]\ndram = "64MiB"') as daemon,
        connect(daemon, "a", channel) as of_a,
        connect(daemon, "b", channel) as of_b,
    ):
        slow, fast = Blocks(of_a), Blocks(of_b)
        begin = 0

        def is_limited() -> bool:
            nonlocal begin
            begin += 16
            return slow.put(range(begin, begin + 16)).reason.name == "LIMITED"

        wait_for(is_limited, what="it is over its rate")
        fast.put_all(range(256))
        assert fast.get(range(256)) == 256
        configuration(tmp_path, {"a": "", "b": ""}, '[pool]\ndram = "64MiB"')
        reload(daemon)
        slow.put_all(range(1000, 1256))
