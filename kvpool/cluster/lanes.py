"""Whether members read out of each other's memory over UCX, and how that is opened (docs/ucx.md).

Promises:  1. nothing is opened over which UCX checks no remote key, unless its user has named it,
              and then on the loopback device unless he has named another;
           2. where it was left to the node, what is missing costs the lane alone, with a line in
              the log; where it was asked for, the node does not begin without.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvpool.errors import BadArgument, KvpoolError
from kvpool.serve_log import EventLog

CHOICES = ("auto", "off", "on")
DEVICES = "/sys/class/infiniband"
# Of UCX: over these the network card reads by itself, and looks at the remote key.
CHECKED = frozenset({"rc", "rc_v", "rc_verbs", "rc_x", "rc_mlx5", "dc", "dc_x", "dc_mlx5"})
RDMA = "rc,dc"
STAND_INS = ("tcp", "cma")
_SEGMENTS = (("TCP_TX_SEG_SIZE", "256k"), ("TCP_RX_SEG_SIZE", "256k"))  # 8 KiB else: half as fast
# Without these two UCX uses no shared memory where it is to notice that a peer is gone; a program
# can set only the first.
_SHARED = (("MM_ERROR_HANDLING", "y"),)
_SHARED_VARIABLE = "UCX_CMA_MEMORY_INVALIDATE"


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What is opened. is_required: the node is not to begin without. library: one that was found
    besides the system's; empty: none."""

    transports: str
    devices: str
    settings: tuple[tuple[str, str], ...] = ()
    is_unchecked: bool = False
    is_required: bool = False
    library: str = ""


class HasLane(Protocol):
    def open_ucx(
        self,
        transports: str,
        devices: str,
        library: str,
        settings: list[tuple[str, str]],
        is_unchecked: bool,
    ) -> str: ...
    @property
    def ucx_address(self) -> bytes: ...


def lane_plan(
    label: str, told: str, environment: Mapping[str, str], *, is_sealed: bool
) -> LanePlan | None:
    """None: blocks of other members come over TCP. Raises BadArgument, which begins with label."""
    if told not in CHOICES:
        raise BadArgument(f"{label} is {told!r}; it can be {', '.join(CHOICES)}")
    named = environment.get("UCX_TLS", "")
    devices = environment.get("UCX_NET_DEVICES", "")
    if told == "off" or (told == "auto" and not has_rdma()):
        return None
    if told == "auto":
        return LanePlan(RDMA, devices, library=wheel())
    if not is_sealed:
        raise BadArgument(
            f"{label} is 'on', but the arena is elastic: memory that others read has to stay; set"
            " [pool] arena = 'sealed' (--arena sealed)"
        )
    if not named and not has_rdma():
        raise BadArgument(
            f"{label} is 'on', but there is no RDMA device on this machine; to try it without, name"
            f" what stands in for one: UCX_TLS={' or UCX_TLS='.join(STAND_INS)} (docs/ucx.md says"
            " what that opens)"
        )
    transports = [each.strip() for each in (named or RDMA).split(",")]
    if set(transports) <= CHECKED:
        return LanePlan(",".join(transports), devices, is_required=True, library=wheel())
    return _stand_in(label, transports, devices, environment)


def _stand_in(
    label: str, transports: list[str], devices: str, environment: Mapping[str, str]
) -> LanePlan:
    settings: tuple[tuple[str, str], ...] = _SEGMENTS if "tcp" in transports else ()
    if "cma" in transports:
        if environment.get(_SHARED_VARIABLE) != "y":
            raise BadArgument(
                f"{label} is 'on' and UCX_TLS names cma: set {_SHARED_VARIABLE}=y in the"
                " environment as well, without which UCX does not use it"
            )
        settings += _SHARED
        if "posix" not in transports:  # by it both sides get to know each other
            transports = ["posix", *transports]
    if not devices and "tcp" in transports:
        devices = "lo"
    return LanePlan(
        ",".join(transports),
        devices,
        settings,
        is_unchecked=True,
        is_required=True,
        library=wheel(),
    )


def has_rdma() -> bool:
    try:
        return bool(os.listdir(DEVICES))
    except OSError:
        return False


def wheel() -> str:
    """The library of the package libucx, if it is installed. It has no RDMA in it."""
    spec = importlib.util.find_spec("libucx")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        path = os.path.join(folder, "lib", "libucp.so")
        if os.path.exists(path):
            return path
    return ""


def open_lane(core: HasLane, plan: LanePlan | None, tenant: str, log: EventLog) -> bytes:
    """What other members need to read out of that tenant's memory; empty: they cannot.

    Raises KvpoolError, where the lane was asked for.
    """
    if plan is None:
        return b""
    try:
        library = core.open_ucx(
            plan.transports,
            plan.devices,
            plan.library,
            list(plan.settings),
            plan.is_unchecked,
        )
    except KvpoolError as error:
        if plan.is_required:
            raise
        log.warning("ucx not opened", tenant=tenant, reason=error)
        return b""
    told = {"tenant": tenant, "library": library, "transports": plan.transports}
    if plan.is_unchecked:
        log.warning("ucx opened unchecked", **told, devices=plan.devices)
    else:
        log.info("ucx opened", **told)
    return core.ucx_address
