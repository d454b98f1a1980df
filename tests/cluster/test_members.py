"""Members and a real etcd, which is stopped, wiped, silenced and spoiled."""

import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool.cluster.access import Access, tls_context
from kvpool.cluster.answers import Compacted, Unanswered, encoded, range_end
from kvpool.cluster.member import DRAINING
from kvpool.cluster.names import Names
from kvpool.cluster.view import GRACE_S, Kind
from tests.cluster.etcd import Etcd
from tests.cluster.joined import (
    NAMES,
    TTL_S,
    Joined,
    agree,
    descriptors,
    joined,
    threads,
    until,
)


def leaves(members: list[Joined]) -> int:
    return sum(len(each.told.of(Kind.LEAVE)) for each in members)


def fingerprints(members: list[Joined]) -> set[int]:
    return {each.roster.fingerprint for each in members}


def test_five_join_and_each_way_of_leaving_is_seen(etcd: Etcd) -> None:
    with joined(etcd, 5) as members:
        assert {each.roster.pool for each in members} == {members[0].roster.pool}
        silent, graceful, *rest = members
        silent.fall_silent()
        took_s = until(lambda: all(silent.id not in each.ids() for each in rest), "the silent")
        assert TTL_S / 2 < took_s < TTL_S + 20  # mostly about one
        graceful.close()
        took_s = until(lambda: all(graceful.id not in each.ids() for each in rest), "the graceful")
        assert took_s < TTL_S / 2
        until(lambda: agree(rest, 3), "the rest to agree")
        assert leaves(rest) == 6


def test_a_restart_at_once_is_no_leave(etcd: Etcd) -> None:
    with joined(etcd, 3) as (first, *rest):
        before = fingerprints(rest)
        first.fall_silent()
        again = Joined(etcd, id=first.id)
        try:
            until(lambda: agree([again, *rest], 3), "all to know the new life")
            assert all(each.told.of(Kind.RESTART) == [first.id] for each in rest)
            assert leaves(rest) == 0
            assert fingerprints(rest) != before  # its memory is another one
        finally:
            again.close()


def test_etcd_may_stop_and_come_back_with_its_data_and_without(etcd: Etcd) -> None:
    with joined(etcd, 4) as members:
        before = fingerprints(members)
        etcd.stop()
        until(lambda: all(each.roster.is_frozen for each in members), "all to freeze")
        time.sleep(5)  # the time that it is away: longer than any lease
        assert all(len(each.roster.members) == 4 for each in members)
        etcd.start()
        until(lambda: agree(members, 4), "all to follow again")
        etcd.stop()
        etcd.wipe()
        etcd.start()
        until(lambda: agree(members, 4), "all to follow the wiped one")
        until(lambda: all(each.roster.generation == 1 for each in members), "all to notice")
        time.sleep(TTL_S + GRACE_S + 1)  # whoever is missing leaves by then
        assert agree(members, 4)
        assert fingerprints(members) == before
        assert leaves(members) == 0
        pools = {each.roster.pool for each in members}
        assert len(pools) == 1


def test_all_leases_may_run_out_while_etcd_is_cut_off(etcd: Etcd) -> None:
    """Paused, it neither answers nor ends a lease; afterwards it ends them all at once."""
    with joined(etcd, 3) as members:
        before = fingerprints(members)
        etcd.pause()
        until(lambda: all(each.roster.is_frozen for each in members), "all to freeze")
        time.sleep(2 * TTL_S)
        etcd.go_on()
        until(lambda: agree(members, 3), "all to follow again")
        time.sleep(TTL_S + GRACE_S + 1)
        assert agree(members, 3)
        assert (leaves(members), fingerprints(members)) == (0, before)


def test_etcd_may_be_away_at_the_start(etcd: Etcd) -> None:
    etcd.stop()
    early = [Joined(etcd), Joined(etcd)]
    try:
        until(lambda: all(each.told.last_error for each in early), "both to say so")
        assert all(each.roster.is_frozen and not each.roster.members for each in early)
        assert all("etcd does not answer" in each.told.events() for each in early)
        etcd.start()
        until(lambda: agree(early, 2), "both to enter")
        assert all("etcd answers again" in each.told.events() for each in early)
    finally:
        for each in early:
            each.close()


def test_the_older_of_two_with_one_id_is_replaced(etcd: Etcd) -> None:
    with joined(etcd, 2) as (old, other):
        new = Joined(etcd, id=old.id)
        try:
            until(lambda: old.roster.is_replaced, "the older one to notice")
            until(lambda: agree([new, other], 2), "the others to agree")
            time.sleep(TTL_S + 1)  # its lease has run out by then
            assert old.ids() == other.ids() == {old.id, other.id}
            assert not old.roster.is_frozen
            assert other.told.of(Kind.RESTART) == [old.id]
            assert leaves([other, new]) == 0
            assert any("replaced" in each for each in old.told.events())
        finally:
            new.close()


def test_two_clusters_never_meet(etcd: Etcd) -> None:
    others = Names("/kvpool", "two")
    nested = Names("/kvpool/one", "members")
    with (
        joined(etcd, 2) as ones,
        joined(etcd, 2, names=others) as twos,
        joined(etcd, 1, names=nested) as threes,
    ):
        assert agree(ones, 2)
        assert agree(twos, 2)
        assert not {each.id for each in ones} & twos[0].ids()
        assert threes[0].ids() == {threes[0].id}


def test_bad_entries_cost_themselves_alone(etcd: Etcd) -> None:
    with joined(etcd, 2, check_s=0.2) as members:
        for value in ("junk", "[1]", '{"form": 1}', '{"form": 1, "incarnation": -1}', "x" * 9000):
            etcd.put(NAMES.member(secrets.token_hex(16)), value)
        etcd.put(NAMES.member("../../etc"), members[0].me.entry().decode())
        etcd.put(NAMES.root + "later/thing", "of another version")
        until(lambda: len(members[0].members.status()["bad"]) == 6, "the bad to be counted")
        assert agree(members, 2)
        assert members[0].members.status()["bad_seen"] == 6
        told = [each for each in members[0].told.events() if each == "bad entry of a member"]
        assert len(told) == 6


def test_an_own_key_that_somebody_removed_is_put_again(etcd: Etcd) -> None:
    with joined(etcd, 2) as (one, other):
        etcd.remove(NAMES.member(one.id))
        until(lambda: bool(NAMES.member(one.id) in other.gateway.read(NAMES.root).entries), "it")
        until(lambda: agree([one, other], 2), "both to agree")


def test_draining_and_weights_are_told(etcd: Etcd) -> None:
    with joined(etcd, 3) as members:
        one = members[0]
        before = fingerprints(members)
        one.members.drain()
        until(lambda: all(each.roster.member(one.id).state == DRAINING for each in members), "it")
        assert fingerprints(members) == before
        one.members.set_weight(7)
        until(lambda: all(each.roster.member(one.id).weight == 7 for each in members), "the weight")
        until(lambda: agree(members, 3), "all to agree")
        assert fingerprints(members) != before
        assert leaves(members) == 0


def test_a_silent_endpoint_is_left_for_another(etcd: Etcd, tmp_path: Path) -> None:
    """Two addresses of one etcd: that of a stopped process, and the right one."""
    with Etcd(tmp_path / "stopped") as stopped:
        stopped.pause()
        try:
            with joined(etcd, 2, endpoints=[stopped.endpoint, etcd.endpoint]) as members:
                assert agree(members, 2)
        finally:
            stopped.go_on()


@contextmanager
def with_users(etcd: Etcd, access: Access) -> Iterator[list[Joined]]:
    """An etcd that asks who is there, and two members whose answer it takes."""
    for user, password in (("root", "secret of root"), ("pool", "right")):
        etcd.ask("auth/user/add", name=user, password=password)
        etcd.ask("auth/role/add", name=user)
        etcd.ask("auth/user/grant", user=user, role=user)
    span = {"key": encoded("/kvpool/"), "range_end": encoded(range_end("/kvpool/"))}
    etcd.ask("auth/role/grant", name="pool", perm={"permType": "READWRITE", **span})
    etcd.ask("auth/enable")
    with joined(etcd, 2, access=access) as members:
        yield members


def test_users_and_passwords(tmp_path: Path) -> None:
    right = Access(None, "pool", "right")
    with Etcd(tmp_path / "users", "--bcrypt-cost=4") as etcd, with_users(etcd, right) as members:
        wrong = Joined(etcd, access=Access(None, "pool", "wrong"))
        nobody = Joined(etcd)
        elsewhere = Joined(etcd, access=right, names=Names("/other", "one"))
        try:
            for each, reason in (
                (wrong, "authentication failed"),
                (nobody, "set user and password_file"),
                (elsewhere, "read and write the prefix"),
            ):
                until(lambda each=each: "etcd refuses" in each.told.events(), reason)
                assert reason in str(each.told.last_error)
                assert not each.roster.is_entered
        finally:
            for each in (wrong, nobody, elsewhere):
                each.close()
        for each in members:  # as if the token had run out
            each.gateway._login.accept("no such token")
        time.sleep(TTL_S + 1)
        assert agree(members, 2)
        assert leaves(members) == 0


def test_by_tls_whoever_does_not_trust_or_speak_it_says_so(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=etcd of a test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    options = [f"--cert-file={cert}", f"--key-file={key}"]
    with Etcd(tmp_path / "etcd", *options, scheme="https") as etcd:
        with joined(etcd, 2, access=Access(tls_context(cert, None, None))) as members:
            assert agree(members, 2)
        for tls, reason in ((None, "https://"), (tls_context(None, None, None), "CERTIFICATE_")):
            one = Joined(etcd, access=Access(tls))
            try:
                until(lambda one=one: bool(one.told.last_error), reason)
                assert reason in str(one.told.last_error)
            finally:
                one.close()


def test_a_user_where_etcd_knows_none(etcd: Etcd) -> None:
    with joined(etcd, 1, access=Access(None, "pool", "right")) as members:
        assert agree(members, 1)


def test_nothing_is_left_after_close(etcd: Etcd) -> None:
    before = threads(), descriptors()
    with joined(etcd, 5):
        assert threads() == before[0] + 10
    until(lambda: (threads(), descriptors()) == before, "threads and descriptors to go")
    assert etcd.gateway().read(NAMES.root).entries.keys() == {NAMES.pool}
    silent = Joined(etcd)
    until(lambda: silent.roster.is_entered, "it to enter")
    etcd.pause()
    begin = time.monotonic()
    silent.close()
    assert time.monotonic() - begin < 3
    etcd.go_on()
    until(lambda: (threads(), descriptors()) == before, "threads and descriptors to go")


def test_a_gateway_that_is_off_or_a_wrong_port_is_named(tmp_path: Path) -> None:
    with Etcd(tmp_path / "etcd", "--enable-grpc-gateway=false") as etcd:
        one = Joined(etcd)
        try:
            until(lambda: "etcd refuses" in one.told.events(), "the refusal")
            assert "enable-grpc-gateway" in str(one.told.last_error)
        finally:
            one.close()


def test_the_calls_against_a_real_etcd(etcd: Etcd) -> None:
    gateway = etcd.gateway()
    lease, ttl_s = gateway.grant(5)
    assert ttl_s == 5
    assert gateway.keep(lease) == 5
    put = gateway.put_if("/a/b", b"\x00\xff", lease, 0)
    assert put.done
    again = gateway.put_if("/a/b", b"other", lease, 0)
    assert (again.done, again.other.value if again.other else b"") == (False, b"\x00\xff")
    found = gateway.read("/a/")
    assert found.entries["/a/b"].created == put.revision
    watch = gateway.watch("/a/", found.revision + 1)
    assert watch.cluster == found.cluster
    gateway.revoke(lease)
    batch = next(iter(watch))
    assert [(each.key, each.entry) for each in batch.events] == [("/a/b", None)]
    watch.release()
    assert gateway.keep(lease) == 0
    for _ in range(3):
        gateway.put_if(secrets.token_hex(4), b"", 0, 0)
    etcd.ask("kv/compaction", revision=gateway.read("/a/").revision)
    watch = gateway.watch("/a/", 1)
    with pytest.raises(Compacted):
        next(iter(watch))
    watch.release()
    etcd.stop()
    with pytest.raises(Unanswered):
        etcd.gateway(timeout_s=0.5).read("/a/")
    gateway.close()
