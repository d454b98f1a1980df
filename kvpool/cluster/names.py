"""How the keys of a cluster are named in etcd.

    <prefix>/<cluster>/pool             random, made once: an etcd that lost its data has another
    <prefix>/<cluster>/members/<id>     one for each member, under its lease

Promises:  two clusters with different names, or with different prefixes, never read each other's
members: what is not a member's id in its place is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpool.errors import BadArgument, shown

CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
PREFIX = re.compile(r"(/[A-Za-z0-9][A-Za-z0-9._-]{0,63}){1,8}")
NODE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Names:
    """Of one cluster."""

    prefix: str
    cluster: str

    @property
    def root(self) -> str:
        """What every key of the cluster begins with, and no key of another one."""
        return f"{self.prefix}/{self.cluster}/"

    @property
    def pool(self) -> str:
        return f"{self.root}pool"

    def member(self, node_id: str) -> str:
        return f"{self.root}members/{node_id}"

    def member_of(self, key: str) -> str | None:
        """What stands where a member's id stands; None: this key is no member's."""
        before = f"{self.root}members/"
        return key[len(before) :] if key.startswith(before) else None


def check_cluster(label: str, name: str) -> str:
    if CLUSTER.fullmatch(name) is None:
        raise BadArgument(
            f"{label} is {shown(name)}; a cluster's name is 1..64 of A-Z, a-z, 0-9, _ and -, and"
            " begins with a letter or a digit"
        )
    return name


def check_prefix(label: str, prefix: str) -> str:
    if PREFIX.fullmatch(prefix) is None:
        raise BadArgument(
            f"{label} is {shown(prefix)}; write names of A-Z, a-z, 0-9, ., _ and -, each behind a"
            " slash, such as /kvpool"
        )
    return prefix


def is_node_id(text: str) -> bool:
    return NODE_ID.fullmatch(text) is not None
