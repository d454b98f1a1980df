"""Who a client is: which tenant, and whether an administrator. Pure.

A peer on the unix socket is the user that the kernel names; a peer that has proved a token is who
has that token; a peer over TCP that has proved nothing is nobody, unless the node has no token for
anybody and one tenant, and its plan says that this is meant.

Promises:  1. the answer is one tenant or a refusal; nobody becomes another tenant by naming it;
           2. an unknown tenant and a wrong token are refused with the same words, after the same
              work: nobody learns by asking which tenants there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool import wire
from kvpool.tenants.plans import AdminPlan, TenantPlan
from kvpool.wire_proof import Exchange, is_same

ROOT_UID = 0
_NO_TOKEN = "the node needs a token: give connect() the right one"
_WRONG = "the node knows no such tenant with this token"
_UNPROVED = "-"  # compared with where there is nothing to compare with


@dataclass(frozen=True, slots=True)
class Claim:
    """What is known of a peer. uid: None over TCP; exchange and proof: where it gave a proof."""

    uid: int | None
    tenant: str = ""
    exchange: Exchange | None = None
    proof: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """tenant: None for an administrator who is none of them. token: the one that was proved."""

    tenant: str | None
    is_admin: bool
    token: str | None = field(default=None, repr=False)


class Identities:
    """The tenants and administrators of one configuration."""

    def __init__(
        self,
        tenants: Mapping[str, TenantPlan],
        admin: AdminPlan,
        own_uid: int,
        *,
        needs_token: bool = False,
    ) -> None:
        """needs_token: over TCP in any case, though there may be none that anybody has (any more):
        where others than those of this machine can connect, or there were tenants."""
        self._tenants = tenants
        self._admin = admin
        self._admin_uids = {ROOT_UID, own_uid} if admin.same_uid else {ROOT_UID}
        self._by_uid = {uid: each.name for each in tenants.values() for uid in each.uids or ()}
        # Of a node without tenants everybody is the only one that there is.
        self._only = next(iter(tenants)) if len(tenants) == 1 else None
        has_tokens = admin.token is not None or any(each.token for each in tenants.values())
        self._needs_token = needs_token or has_tokens

    def of(self, claim: Claim) -> Identity:
        """Raises RefusedByPeer, as what the peer is to be told."""
        is_admin = claim.uid in self._admin_uids
        if claim.exchange is not None:
            return self._proved(claim, claim.exchange, is_admin)
        if claim.uid is not None:
            return self._user(claim.uid, claim.tenant, is_admin)
        if self._needs_token or self._only is None:
            raise wire.RefusedByPeer("token", _NO_TOKEN, "no_token")
        if claim.tenant not in ("", self._only):
            raise wire.RefusedByPeer("token", _WRONG, "bad_token")
        return Identity(self._only, is_admin=False)

    def _user(self, uid: int, named: str, is_admin: bool) -> Identity:
        home = self._by_uid.get(uid)
        if home is None and self._only is not None:
            is_open = self._tenants[self._only].uids is None
            home = self._only if is_open or is_admin else None
        if named and named != home:
            if not is_admin or named not in self._tenants:
                text = f"user {uid} is not the tenant that was named; its uids say who is"
                if is_admin:  # who may know
                    text = f"there is no tenant {named!r}; there are: {', '.join(self._tenants)}"
                raise wire.RefusedByPeer("tenant", text, "unknown_uid")
            home = named
        if home is None and not is_admin:
            text = (
                f"user {uid} is no tenant of this node; add it to the uids of one, or give a token"
            )
            raise wire.RefusedByPeer("tenant", text, "unknown_uid")
        return Identity(home, is_admin)

    def _proved(self, claim: Claim, exchange: Exchange, is_admin: bool) -> Identity:
        found: Identity | None = None
        for token, tenant, has_rights in self._candidates(exchange.tenant):
            # All of them, whichever fits: how long it takes does not tell.
            if is_same(exchange.client_proof(token or _UNPROVED), claim.proof) and token:
                found = Identity(tenant, has_rights or is_admin, token)
        if found is None:
            raise wire.RefusedByPeer("token", _WRONG, "bad_token")
        return found

    def _candidates(self, named: str) -> list[tuple[str | None, str | None, bool]]:
        """(token, tenant, whether an administrator's)."""
        if not named:
            found = [(each.token, each.name, False) for each in self._tenants.values()]
            return [*found, (self._admin.token, self._only, True)]
        tenant = self._tenants.get(named)
        is_known = tenant is not None
        admin = self._admin.token if is_known else None
        return [(tenant.token if tenant else None, named, False), (admin, named, True)]
