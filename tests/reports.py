"""Reports for tests of what shows them. The numbers differ from each other, so that no field can
stand in for another unnoticed; they hold to the promises of kvpool.observe.report."""

from __future__ import annotations

from typing import Any

from kvpool.observe import report
from kvpool.types import Miss, Put, Reason

NOW_S = 1_800_000_000.0


def counted(number: int = 0, scale: int = 1, block_bytes: int = 65_536) -> dict[str, Any]:
    """An entry of Node.traffic()."""
    missed = [0] * (max(Miss) + 1)
    missed[Miss.ABSENT], missed[Miss.BEHIND], missed[Miss.MOVED] = 7 * scale, 30 * scale, scale
    status = [0] * (max(Reason) + 1)
    status[Put.STORED], status[Put.PRESENT] = 700 * scale, 50 * scale
    status[Reason.POOL_PINNED], status[Reason.CHAIN_BROKEN] = 3 * scale, 11 * scale
    return {
        "number": number,
        "id": bytes([number + 1]) * 16,
        "block_bytes": block_bytes,
        "blocks": 640 * scale,
        "lookups": 100 * scale,
        "lookup_blocks": 1000 * scale,
        "lookup_dram": 510 * scale,
        "lookup_ssd": 90 * scale,
        "lookup_remote": 0,
        "lookup_missed": 80 * scale,
        "gets": 95 * scale,
        "get_blocks": 620 * scale,
        "loaded_dram": 500 * scale,
        "loaded_ssd": 82 * scale,
        "loaded_remote": 0,
        "missed": missed,
        "put_blocks": 764 * scale,
        "put_status": status,
    }


def namespace(number: int = 0, name: str = "chat", scale: int = 1) -> report.Namespace:
    """With the traffic of counted()."""
    counts = counted(number, scale)
    return report.Namespace(
        name=name,
        id=counts["id"].hex(),
        number=number,
        model="llama-3-8b",
        block_tokens=16,
        block_bytes=counts["block_bytes"],
        blocks=counts["blocks"],
        traffic=report.traffic_of(counts, 16),
    )


def client(number: int = 1, name: str = "engine") -> report.Client:
    """One with shared memory."""
    return report.Client(
        number=number,
        name=name,
        pid=4000 + number,
        peer="uid:1001",
        age_s=321.5,
        has_shm=True,
        bytes_in=5_000_001,
        bytes_out=6_000_002,
        requests=777,
        leases=3,
        leased_bytes=196_608,
        gets=95,
        loaded=582,
        loaded_bytes=582 * 65_536,
    )


def tenant(name: str = "default", scale: int = 1, *, has_ssd: bool = True) -> report.Tenant:
    """Two namespaces, two clients."""
    spaces = [namespace(0, "chat", scale), namespace(1, "", 2 * scale)]
    ssd = report.Ssd(
        capacity_bytes=8 << 30,
        used_bytes=3 << 30,
        index_bytes=64 << 20,
        index_used_bytes=9 << 20,
        blocks=1111 * scale,
        queue_blocks=12,
        written_blocks=1300,
        written_bytes=1300 * 65_536,
        read_blocks=260,
        read_bytes=260 * 65_536,
        evictions=44,
        faults={"read": 1, "write": 0, "commit": 0, "damaged": 2, "late": 5},
        quarantined_blocks=2,
        read_only_reason="",
    )
    return report.Tenant(
        name=name,
        dram=report.Dram(
            limit_bytes=2 << 30,
            max_bytes=8 << 30,
            committed_bytes=1900 << 20,
            used_bytes=1800 << 20,
            book_bytes=7 << 20,
            blocks=809 * scale,
            pinned_blocks=21,
            held_slots=4,
            evictions=345 * scale,
        ),
        ssd=ssd if has_ssd else None,
        policy=report.Policy(
            tau_s=88.5, ghosts=9000, ghost_hits=123, demotions=222, promotions=99, not_worth=17
        ),
        traffic=report.total(each.traffic for each in spaces),
        namespaces=spaces,
        clients=[client(1, "prefill"), client(2, "decode")],
        lease_ages=[4, 2, 1, 0, 0],
        pinned_prefixes=1,
        limits={"max_clients": 512, "put_bytes_per_s": 0, "get_bytes_per_s": 0},
        refused={"not_admin": 2},
    )


def example(*, tenants: tuple[str, ...] = ("default",), has_ssd: bool = True) -> report.Report:
    """Tenant n counts n times as much as the first."""
    return report.Report(
        version="0.4.0",
        pid=4242,
        started_s=NOW_S - 86_400,
        now_s=NOW_S,
        is_ready=True,
        budget_bytes=4 << 30,
        tenants=[tenant(name, i + 1, has_ssd=has_ssd) for i, name in enumerate(tenants)],
        refused={"bad_token": 6, "malformed": 1},
    )
