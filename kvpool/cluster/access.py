"""How etcd is convinced to answer: TLS, and a user with a password."""

from __future__ import annotations

import os
import ssl
import threading
from dataclasses import dataclass, field

from kvpool.errors import BadArgument


@dataclass(frozen=True, slots=True)
class Access:
    """tls: None for plain HTTP. user: None where etcd knows no users."""

    tls: ssl.SSLContext | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)


class Login:
    """The token of a login, which all calls share. Thread-safe."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._guard = threading.Lock()
        self._token: str | None = None
        self._is_off = access.user is None

    @property
    def token(self) -> str | None:
        with self._guard:
            return self._token

    @property
    def is_needed(self) -> bool:
        """Whether to log in before anything else is asked."""
        with self._guard:
            return not self._is_off and self._token is None

    def credentials(self) -> dict[str, str]:
        return {"name": self._access.user or "", "password": self._access.password or ""}

    def accept(self, token: str) -> None:
        with self._guard:
            self._token = token

    def forget(self) -> None:
        """Ask again: etcd may know users by now, too."""
        with self._guard:
            self._token = None
            self._is_off = self._access.user is None

    def switch_off(self) -> None:
        """This etcd knows no users, so there is nothing to prove."""
        with self._guard:
            self._token, self._is_off = None, True


def tls_context(ca_file: str | None, cert_file: str | None, key_file: str | None) -> ssl.SSLContext:
    """Of a client who checks the server's name. Raises BadArgument, which begins with the option.

    ca_file None: the authorities that the system trusts.
    """
    named = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    for name, path in named.items():
        if path is not None and not os.access(path, os.R_OK):
            reason = "cannot be read" if os.path.exists(path) else "is not there"
            raise BadArgument(f"{name} is {path!r}, which {reason}")
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise BadArgument(f"ca_file is {ca_file!r}: no certificates in PEM: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert_file is None:
        return context
    try:
        # Asked for a passphrase, OpenSSL would read it from the terminal.
        context.load_cert_chain(cert_file, key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        raise BadArgument(
            f"cert_file is {cert_file!r}: it and its key_file do not go together: {error}"
        ) from None
    return context
