"""Who is which tenant and who an administrator, by user and by token: every case of it."""

from pathlib import Path

import pytest

from kvpool import wire
from kvpool.tenants.identity import Claim, Identities, Identity
from kvpool.tenants.plans import AdminPlan, Limits, TenantPlan
from kvpool.wire_proof import Exchange

OWN_UID = 500
LIMITS = Limits(0, 0, 0, 1, 0, 0, 0)


def tenant(name: str, uids: set[int] | None = None, token: str | None = None) -> TenantPlan:
    return TenantPlan(name, None if uids is None else frozenset(uids), token, None, LIMITS, {}, {})


def identities(
    *tenants: TenantPlan, admin: str | None = "admin token", same_uid: bool = True
) -> Identities:
    named = {each.name: each for each in tenants}
    return Identities(named, AdminPlan(admin, same_uid), OWN_UID)


TWO = identities(tenant("a", {1001, 1002}, "token a"), tenant("b", set(), "token b"))
ONE = identities(tenant("default"), admin=None)
ONE_BY_TOKEN = identities(tenant("default", None, "token"), admin=None)
ONE_BY_UID = identities(tenant("default", {1001}), admin=None)


def by_token(token: str, name: str = "", uid: int | None = None) -> Claim:
    exchange = Exchange(bytes(32), b"c" * 32, name)
    return Claim(uid, name, exchange, exchange.client_proof(token))


def of(known: Identities, claim: Claim) -> tuple[str | None, bool] | str:
    """(tenant, whether an administrator), or why not."""
    try:
        found = known.of(claim)
    except wire.RefusedByPeer as error:
        return error.reason
    return found.tenant, found.is_admin


@pytest.mark.parametrize(
    ("known", "claim", "expected"),
    [
        # By user.
        (TWO, Claim(1001), ("a", False)),
        (TWO, Claim(1002, "a"), ("a", False)),
        (TWO, Claim(1001, "b"), "unknown_uid"),
        (TWO, Claim(1001, "nobody"), "unknown_uid"),
        (TWO, Claim(1003), "unknown_uid"),
        (TWO, Claim(1003, "a"), "unknown_uid"),
        (TWO, Claim(0), (None, True)),
        (TWO, Claim(0, "b"), ("b", True)),
        (TWO, Claim(0, "nobody"), "unknown_uid"),
        (TWO, Claim(OWN_UID), (None, True)),
        (TWO, Claim(OWN_UID, "a"), ("a", True)),
        # By token.
        (TWO, by_token("token a"), ("a", False)),
        (TWO, by_token("token b", "b"), ("b", False)),
        (TWO, by_token("token a", "b"), "bad_token"),
        (TWO, by_token("token a", "nobody"), "bad_token"),
        (TWO, by_token("wrong"), "bad_token"),
        (TWO, by_token("-"), "bad_token"),
        (TWO, by_token("-", "nobody"), "bad_token"),
        (TWO, by_token("admin token"), (None, True)),
        (TWO, by_token("admin token", "b"), ("b", True)),
        (TWO, by_token("admin token", "nobody"), "bad_token"),
        (TWO, by_token("token b", uid=1001), ("b", False)),  # the token is the better word
        (TWO, by_token("token b", uid=0), ("b", True)),
        (TWO, by_token("wrong", uid=0), "bad_token"),
        (TWO, by_token("wrong", uid=1001), "bad_token"),
        # Over TCP without a token.
        (TWO, Claim(None), "no_token"),
        (TWO, Claim(None, "a"), "no_token"),
        # A node without tenants.
        (ONE, Claim(1234), ("default", False)),
        (ONE, Claim(1234, "default"), ("default", False)),
        (ONE, Claim(1234, "a"), "unknown_uid"),
        (ONE, Claim(OWN_UID), ("default", True)),
        (ONE, Claim(None), ("default", False)),
        (ONE, Claim(None, "a"), "bad_token"),
        (ONE, by_token("any"), "bad_token"),
        (ONE, by_token("-"), "bad_token"),
        (ONE_BY_TOKEN, Claim(1234), ("default", False)),
        (ONE_BY_TOKEN, Claim(None), "no_token"),
        (ONE_BY_TOKEN, by_token("token"), ("default", False)),
        (ONE_BY_UID, Claim(1001), ("default", False)),
        (ONE_BY_UID, Claim(1234), "unknown_uid"),
        (ONE_BY_UID, Claim(0), ("default", True)),
    ],
)
def test_who_is_who(
    known: Identities, claim: Claim, expected: tuple[str | None, bool] | str
) -> None:
    assert of(known, claim) == expected


def test_without_any_token_tcp_may_be_closed_all_the_same() -> None:
    """As after a reload: the only tenant has lost its token, or the sockets are still far ones."""
    gone = {"a": tenant("a", set())}
    known = Identities(gone, AdminPlan(None, True), OWN_UID, needs_token=True)
    assert of(known, Claim(None)) == "no_token"
    assert of(known, Claim(None, "a")) == "no_token"
    assert of(known, by_token("any")) == "bad_token"
    assert of(known, Claim(1001)) == "unknown_uid"


def test_which_tenants_there_are_is_told_to_administrators_alone() -> None:
    for uid, text in ((OWN_UID, "there are: a, b"), (1001, "not the tenant that was named")):
        with pytest.raises(wire.RefusedByPeer, match=text):
            TWO.of(Claim(uid, "nobody"))


def test_root_alone_where_the_daemon_s_user_is_nobody_special() -> None:
    known = identities(tenant("a", {1001}), same_uid=False)
    assert of(known, Claim(OWN_UID)) == "unknown_uid"
    assert of(known, Claim(0)) == ("a", True)  # the only one that there is
    root = Identities({"a": tenant("a", {1001})}, AdminPlan(None, False), 0)
    assert of(root, Claim(0)) == ("a", True)


def test_an_unknown_tenant_and_a_wrong_token_are_refused_in_the_same_words() -> None:
    told = set()
    for claim in (
        by_token("token a", "nobody"),
        by_token("wrong", "a"),
        by_token("wrong", "nobody"),
        by_token("wrong"),
        by_token("token a", "b"),
    ):
        with pytest.raises(wire.RefusedByPeer) as error:
            TWO.of(claim)
        told.add((error.value.code, str(error.value)))
    assert len(told) == 1


def test_a_token_is_in_no_repr(tmp_path: Path) -> None:
    found = TWO.of(by_token("token a"))
    assert found.token == "token a"
    for each in (found, tenant("a", None, "token a"), AdminPlan("token a", True)):
        assert "token a" not in repr(each)
    assert Identity("a", False).token is None
