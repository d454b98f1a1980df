"""Who may see what by HTTP. Pure: headers go in, an answer comes out.

Promises:  1. without a token and without tenants, on loopback, everything is open; a token or a
              tenant closes it, and whoever says no token sees nothing;
           2. the admin's token sees all, a tenant's that tenant and nothing else;
           3. comparing takes the same time whichever token comes near, and however near;
           4. on loopback a page of another site cannot read through a name that it points here: the
              Host header must be a name of this host.
Not promised: secrecy on the way. HTTP carries the token as it is; beyond loopback it needs a proxy
with TLS before it, and tokens that open nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

TOKEN_BYTES_MAX = 512
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class Viewer:
    """Somebody who may see: all (tenant None), or one tenant's part."""

    tenant: str | None = None

    def may_see(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == tenant


@dataclass(frozen=True, slots=True)
class Access:
    """What is configured. Tokens are texts of which nobody else has the like; "" is none."""

    is_loopback: bool
    admin_token: str = field(default="", repr=False)
    tenant_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)  # tenant -> token
    has_tenants: bool = False  # configured, with tokens or without
    is_for_all: bool = False  # whoever configures this says so: nobody need say a token

    @property
    def is_open(self) -> bool:
        """Whether nobody need say a token."""
        if self.is_for_all:
            return True
        closed = self.admin_token or any(self.tenant_tokens.values()) or self.has_tenants
        return self.is_loopback and not closed

    @property
    def opens_to_nobody(self) -> bool:
        """Whether there is no token that would do: whoever configures this should be told."""
        return not (self.is_open or self.admin_token or any(self.tenant_tokens.values()))

    def viewer(self, authorization: str | None) -> Viewer | None:
        """None: this one may see nothing. authorization: the header's value, None without one."""
        if self.is_open:
            return Viewer()
        given = _digest(_bearer(authorization))
        found = None
        for tenant, token in [*self.tenant_tokens.items(), (None, self.admin_token)]:
            if hmac.compare_digest(given, _digest(token)) and token:
                found = Viewer(tenant)
        return found

    def knows_host(self, host: str | None) -> bool:
        """Of a Host header. Beyond loopback any: there a token is needed, which other pages have
        not; where it is not (is_for_all), such a page in a browser of that network can read."""
        if not self.is_loopback:
            return True
        name, colon, port = (host or "").lower().rpartition(":")
        if not colon or port.endswith("]"):  # no port: all of it is the name
            name, port = (host or "").lower(), "0"
        return name in _LOCAL_NAMES and port.isascii() and port.isdigit()


def is_loopback(host: str) -> bool:
    """Of an address to listen on; a name other than localhost may come to be any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _bearer(authorization: str | None) -> str:
    kind, _, token = (authorization or "").partition(" ")
    token = token.strip()
    return token if kind.lower() == "bearer" and len(token) <= TOKEN_BYTES_MAX else ""


def _digest(token: str) -> bytes:
    """Of one length, whatever the token's."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
