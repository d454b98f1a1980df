"""The tables of `kvpool stat`: a Report in, what rich prints out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvpool.observe.report import LEASE_AGES_S, Namespace, Report, Tenant, Traffic
from kvpool.operate.feed import Sample, flow
from kvpool.operate.show import bar, count, duration, percent, rate, size, table

_BAR_WIDTH = 10


def tables(sample: Sample) -> Iterator[RenderableType]:
    """Everything, the most asked for first. Tables that would be empty are left out."""
    report = sample.report
    yield head(report, sample.where)
    yield tiers(report)
    yield hits(report)
    yield traffic(report)
    if sample.seconds:
        yield rates(sample)
    yield tenants(report)
    yield clients(report)
    yield leases(report)
    yield policies(report)
    if any(tenant.ssd and tenant.ssd.read_only_reason for tenant in report.tenants):
        yield read_only(report)
    yield reasons(report)


def head(report: Report, where: str) -> Text:
    """One line: who answers."""
    state = "ready" if report.is_ready else "not ready"
    up = duration(report.now_s - report.started_s)
    budget = f"DRAM budget {size(report.budget_bytes)}"
    return Text(f"kvpool {report.version}, {state}, pid {report.pid}, up {up}, {budget}, {where}")


def tiers(report: Report) -> Table:
    """What lies where."""
    made = table(
        "\ntiers",
        *("tenant", "tier", "used", "of", "filled", "blocks", "evicted", "also"),
        left=("tier", "filled", "also"),
    )
    for tenant in report.tenants:
        dram, ssd = tenant.dram, tenant.ssd
        filled = f"{bar(dram.used_bytes, dram.limit_bytes, _BAR_WIDTH)} " + percent(
            dram.used_bytes, dram.limit_bytes
        )
        also = f"{dram.pinned_blocks:,} pinned, {dram.held_slots:,} held, "
        also += f"books {size(dram.book_bytes)}"
        made.add_row(
            *(tenant.name, "DRAM", size(dram.used_bytes), size(dram.limit_bytes), filled),
            *(count(dram.blocks), count(dram.evictions), also),
        )
        if ssd is None:
            continue
        filled = f"{bar(ssd.used_bytes, ssd.capacity_bytes, _BAR_WIDTH)} " + percent(
            ssd.used_bytes, ssd.capacity_bytes
        )
        also = f"{ssd.queue_blocks:,} queued, {sum(ssd.faults.values()):,} faults"
        made.add_row(
            *(tenant.name, "SSD", size(ssd.used_bytes), size(ssd.capacity_bytes), filled),
            *(count(ssd.blocks), count(ssd.evictions), also),
        )
    return made


def hits(report: Report) -> Table:
    """Of what lookups asked for; `of gets` says what gets delivered of what they asked for.
    `others`: on other nodes of the cluster only."""
    is_far = report.cluster is not None
    made = table(
        "\nhit rates",
        *("tenant", "namespace", "requested", "hit", "DRAM", "SSD"),
        *(("others",) if is_far else ()),
        *("absent", "behind", "of gets"),
        left=("namespace",),
    )
    for tenant in report.tenants:
        for space in tenant.namespaces:
            made.add_row(tenant.name, name_of(space), *_hit_cells(space.traffic, is_far))
        made.add_row(tenant.name, "all", *_hit_cells(tenant.traffic, is_far), style="bold")
    return made


def _hit_cells(of: Traffic, is_far: bool) -> list[str]:
    asked = of.requested
    return [
        count(asked),
        percent(of.hit, asked),
        percent(of.hit_dram, asked),
        percent(of.hit_ssd, asked),
        *([percent(of.hit_remote, asked)] if is_far else []),
        percent(of.missed.get("absent", 0), asked),
        percent(of.missed.get("behind", 0), asked),
        percent(of.loaded, of.asked),
    ]


def traffic(report: Report) -> Table:
    """Since the daemon began."""
    made = table(
        "\ntraffic",
        *("tenant", "namespace", "model", "block", "resident", "lookups", "gets"),
        *("loaded", "stored", "present", "refused"),
        left=("namespace", "model"),
    )
    for tenant in report.tenants:
        for space in tenant.namespaces:
            of = space.traffic
            made.add_row(
                *(tenant.name, name_of(space), space.model, size(space.block_bytes)),
                *(count(space.blocks), count(of.lookups), count(of.gets)),
                *(size(of.loaded_bytes), size(of.stored_bytes), count(of.present)),
                count(sum(of.refused.values())),
            )
    return made


def name_of(space: Namespace) -> str:
    """Its name, else enough of its id."""
    return space.name or f"{space.id[:8]}.."


def rates(sample: Sample) -> Table:
    """Since the report before."""
    made = table(
        f"\nin the last {duration(sample.seconds)}",
        *("tenant", "lookups", "hit", "get", "put", "evicted", "SSD read", "SSD write"),
    )
    assert sample.before is not None
    for tenant in sample.report.tenants:
        now = flow([tenant], sample.before.tenants, sample.seconds)
        made.add_row(
            *(tenant.name, rate(now.lookups)),
            "-" if now.hit_ratio is None else f"{now.hit_ratio:.0%}",
            *(f"{size(int(now.loaded_bytes))}/s", f"{size(int(now.stored_bytes))}/s"),
            *(rate(now.evictions), f"{size(int(now.ssd_read_bytes))}/s"),
            f"{size(int(now.ssd_written_bytes))}/s",
        )
    return made


def tenants(report: Report) -> Table:
    """Who shares the daemon, and within which limits."""
    made = table(
        "\ntenants",
        *("tenant", "DRAM now", "limit", "clients", "namespaces", "prefixes kept", "limits"),
        left=("limits",),
    )
    for tenant in report.tenants:
        made.add_row(
            *(tenant.name, size(tenant.dram.committed_bytes), size(tenant.dram.limit_bytes)),
            *(f"{len(tenant.clients)}", f"{len(tenant.namespaces)}", f"{tenant.pinned_prefixes}"),
            ", ".join(_limit(name, value) for name, value in tenant.limits.items() if value),
        )
    return made


def _limit(name: str, value: int) -> str:
    """As the configuration calls it."""
    if name.endswith("_bytes_per_s"):
        return f"{name.removesuffix('_bytes_per_s')}_rate {size(value)}/s"
    return f"{name} {size(value) if name.startswith(('dram', 'ssd')) else f'{value:,}'}"


def clients(report: Report) -> Table:
    """Who is connected."""
    made = table(
        "\nclients",
        *("tenant", "client", "name", "pid", "peer", "for", "by", "loaded", "in", "out", "leases"),
        left=("client", "name", "peer", "by"),
    )
    for tenant in report.tenants:
        for each in tenant.clients:
            leases = f"{each.leases:,} ({size(each.leased_bytes)})" if each.leases else "0"
            made.add_row(
                *(tenant.name, f"{each.number}", each.name, f"{each.pid}", each.peer),
                *(duration(each.age_s), "memory" if each.has_shm else "socket"),
                *(size(each.loaded_bytes), size(each.bytes_in), size(each.bytes_out), leases),
            )
    return made


def leases(report: Report) -> Table:
    """Old ones are views that nobody closes."""
    bounds = [f"< {duration(bound)}" for bound in LEASE_AGES_S]
    made = table("\nleases by age", "tenant", *bounds, "older")
    for tenant in report.tenants:
        made.add_row(tenant.name, *(f"{number:,}" for number in tenant.lease_ages))
    return made


def policies(report: Report) -> Table:
    """Who goes first, and how often that was wrong: a ghost hit is a block missed after it went."""
    made = table(
        "\npolicy",
        *("tenant", "half-life", "ghosts", "ghost hits", "demoted", "promoted", "too cold for SSD"),
    )
    for tenant in report.tenants:
        of = tenant.policy
        made.add_row(
            *(tenant.name, duration(of.tau_s), count(of.ghosts), count(of.ghost_hits)),
            *(count(of.demotions), count(of.promotions), count(of.not_worth)),
        )
    return made


def read_only(report: Report) -> Table:
    """Tiers that take no more writes."""
    made = table("\nSSD tiers that are read-only", "tenant", "why", left=("why",))
    for tenant in report.tenants:
        if tenant.ssd is not None and tenant.ssd.read_only_reason:
            made.add_row(tenant.name, tenant.ssd.read_only_reason)
    return made


def reasons(report: Report) -> Table:
    """Everything that was not done as asked, with the count of each reason that occurred."""
    made = table("\nnot done", "tenant", "what", "reasons", left=("what", "reasons"))
    for tenant in report.tenants:
        for what, counts in _refusals(tenant).items():
            if any(counts.values()):
                made.add_row(tenant.name, what, _counted(counts))
    if any(report.refused.values()):
        made.add_row("-", "connections", _counted(report.refused))
    if not made.row_count:
        made.add_row("-", "nothing", "")
    return made


def _refusals(tenant: Tenant) -> dict[str, Mapping[str, int]]:
    return {
        "gets (blocks)": tenant.traffic.failed,
        "puts (blocks)": tenant.traffic.refused,
        "SSD": tenant.ssd.faults if tenant.ssd is not None else {},
        "connections, operations": tenant.refused,
    }


def _counted(counts: Mapping[str, int]) -> str:
    by_count = sorted(counts.items(), key=lambda each: -each[1])
    return ", ".join(f"{reason} {number:,}" for reason, number in by_count if number)
