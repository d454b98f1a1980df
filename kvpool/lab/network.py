"""A network in memory: hosts with a cable each to one router, which can be pulled, and a router
that can drop what goes from some hosts to others.

What is dropped is dropped in silence, as by a switch that died: senders are told nothing, and find
out by their own clocks.

    10.77.N.0/30: host N is .2, its side of the router .1
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence

from kvpool.lab.linux import LabError, Result, before_child, in_network, new_network

HOSTS_MAX = 200
CONNECT_S = 10.0
_RULES = 100  # preference of the rules that drop


class Host:
    """One machine's network."""

    def __init__(self, number: int, network: int) -> None:
        """Owns the descriptor."""
        self.number = number
        self.network = network

    @property
    def address(self) -> str:
        return f"10.77.{self.number}.2"

    def run(self, work: Callable[[], Result]) -> Result:
        """What work() gives on this host. Sockets that it makes stay there."""
        return in_network(self.network, work)

    def connect(self, host: str, port: int, timeout_s: float = CONNECT_S) -> socket.socket:
        """Raises OSError."""
        return self.run(lambda: socket.create_connection((host, port), timeout_s))


class Network:
    """A context manager. Raises LabError where none can be made."""

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            raise LabError("there is no `ip`: install iproute2")
        self.hosts: list[Host] = []
        self._dropped: list[str] = []
        self._router = new_network()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. What runs there goes on until it is ended."""
        for each in self.hosts:
            os.close(each.network)
        self.hosts = []
        if self._router >= 0:
            os.close(self._router)
        self._router = -1

    def add(self) -> Host:
        """One more host, with its cable in place."""
        number = len(self.hosts) + 1
        if number > HOSTS_MAX:
            raise LabError(f"a network has at most {HOSTS_MAX} hosts")
        host = Host(number, new_network())
        self.hosts.append(host)
        end = f"/proc/{os.getpid()}/fd/{host.network}"
        self._tell(
            f"link add p{number} type veth peer name eth0 netns {end}",
            f"address add 10.77.{number}.1/30 dev p{number}",
            f"link set p{number} up",
        )
        _ip(
            host.network,
            "link set lo up",
            f"address add {host.address}/30 dev eth0",
            "link set eth0 up",
            f"route add default via 10.77.{number}.1",
        )
        return host

    # --- trouble ---------------------------------------------------------------------------------

    def pull(self, host: Host) -> None:
        """Its cable."""
        self._tell(f"link set p{host.number} down")

    def plug(self, host: Host) -> None:
        """Back in."""
        self._tell(f"link set p{host.number} up")

    def part(self, *groups: Sequence[Host]) -> None:
        """Nothing gets from one of these groups to another. Hosts in none of them reach all, and
        are reached. Groups of before are forgotten."""
        self.heal()
        self._dropped = [
            f"from {one.address} to {other.address} pref {_RULES} blackhole"
            for one, other in _across(groups)
        ]
        self._tell(*(f"rule add {each}" for each in self._dropped))

    def heal(self) -> None:
        """Idempotent. Cables that were pulled stay so."""
        self._tell(*(f"rule del {each}" for each in self._dropped))
        self._dropped = []

    # --- the router ------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._tell("link set lo up", "route add blackhole 10.77.0.0/16 metric 4000")
        in_network(self._router, _forward)

    def _tell(self, *lines: str) -> None:
        _ip(self._router, *lines)


def _across(groups: Sequence[Sequence[Host]]) -> Iterator[tuple[Host, Host]]:
    for one, other in itertools.permutations(groups, 2):
        yield from itertools.product(one, other)


def _forward() -> None:
    with open("/proc/sys/net/ipv4/ip_forward", "w", encoding="ascii") as switch:
        switch.write("1")


def _ip(network: int, *lines: str) -> None:
    """Commands of ip(8) in that network, all of them at a time."""
    if not lines:
        return
    done = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        preexec_fn=before_child(network),
    )
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise LabError(f"ip {lines[0]!r}{' and more' if lines[1:] else ''}: {said}")
