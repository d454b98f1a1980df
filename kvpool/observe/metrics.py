"""A Report as Prometheus metrics: one report a scrape, so that all of its numbers belong together.

Promises:  1. every number is the report's; over the namespaces they sum up to the tenant's;
           2. the count of series is bounded, whatever clients connect and open: what is beyond
              NAMESPACES_MAX and CLIENTS_MAX is counted as "other";
           3. no counter ever falls while the daemon lives: who has a series keeps it, and what was
              counted as "other" stays counted.
Relies on: prometheus_client, loaded with this module and by nothing else of kvpool.
Thread rule: one thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvpool.observe import events_metrics
from kvpool.observe import report as model
from kvpool.observe.cluster_metrics import ClusterSeries
from kvpool.observe.metric_names import (
    CLIENT_GAUGES,
    DRAM_GAUGES,
    POLICY_COUNTERS,
    POLICY_GAUGES,
    SSD_COUNTERS,
    SSD_GAUGES,
    TENANT_GAUGES,
    TRAFFIC_COUNTERS,
    TRAFFIC_SPLIT,
    Named,
)

NAMESPACES_MAX = 64  # with series of their own, of all tenants together; about 80 series each
CLIENTS_MAX = 64
OTHER = "other"

_AGES = ("under_1s", "under_10s", "under_60s", "under_600s", "older")  # report.LEASE_AGES_S
_Space = tuple[str, int]  # tenant, number


class Exposition:
    """Turns reports into text. Keeps who has series of its own, from one scrape to the next."""

    def __init__(self) -> None:
        self._spaces = _Chosen(NAMESPACES_MAX)
        self._clients = _Chosen(CLIENTS_MAX)
        self._other: dict[str, _Others] = {}
        self._cluster = ClusterSeries()
        self._process = ProcessCollector(registry=None)

    def text(
        self, report: model.Report, accept: str = "", tenant: str | None = None
    ) -> tuple[bytes, str]:
        """The body and its content type, in the format that `accept` prefers.

        report: of all tenants, even where only one tenant's part is to be shown: then `tenant` says
        which, and nothing about the others or the process is in the text.
        """
        families = [*self._families(report, tenant)]
        registry = CollectorRegistry()
        registry.register(_Given(families))
        if tenant is None:
            registry.register(self._process)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def _families(self, report: model.Report, tenant: str | None) -> Iterator[Metric]:
        self._choose(report)
        shown = [each for each in report.tenants if tenant in (None, each.name)]
        if tenant is None:
            yield from _of_daemon(report)
            yield from events_metrics.families(report.events)
        yield from _build(report)
        rows = [row for each in shown for row in self._rows(each)]
        yield from _traffic(rows)
        yield from _spaces(shown, self._spaces)
        yield from _tiers(shown)
        yield from _tenants(shown)
        yield from self._of_clients(shown)
        yield from self._cluster.families(report.cluster, tenant)

    def _choose(self, report: model.Report) -> None:
        spaces: dict[_Space, int] = {}
        clients: dict[_Space, int] = {}
        for tenant in report.tenants:
            for space in tenant.namespaces:
                spaces[tenant.name, space.number] = _weight(space.traffic)
            for client in tenant.clients:
                clients[tenant.name, client.number] = client.bytes_in + client.bytes_out
        self._spaces.follow(spaces)
        self._clients.follow(clients)
        for tenant in report.tenants:
            others = self._other.setdefault(tenant.name, _Others())
            others.add(tenant.clients, {id_ for name, id_ in self._clients if name == tenant.name})

    def _rows(self, tenant: model.Tenant) -> list[_Row]:
        """One for each namespace with series of its own, and one for the others together."""
        labels = _space_labels(tenant.namespaces)
        rows, others = [], []
        for space in tenant.namespaces:
            if (tenant.name, space.number) in self._spaces:
                rows.append(_Row(tenant.name, labels[space.number], space.traffic, _tokens(space)))
            else:
                others.append(space)
        if others:
            traffic = model.total(each.traffic for each in others)
            tokens = sum((_tokens(each) for each in others), Counter[_Part]())
            rows.append(_Row(tenant.name, OTHER, traffic, tokens))
        return rows

    def _of_clients(self, tenants: Sequence[model.Tenant]) -> Iterator[Metric]:
        moved = CounterMetricFamily(
            "kvpool_client_bytes",
            "Bytes that sockets and lanes carried from (in) and to (out) a connected client. Reads "
            "through shared memory are not in it. client=other: all that have no series.",
            labels=["tenant", "client", "name", "direction"],
        )
        gauges = _gauges(CLIENT_GAUGES, ["tenant", "client", "name"])
        for tenant in tenants:
            others = self._other[tenant.name]
            for direction, value in (("in", others.bytes_in), ("out", others.bytes_out)):
                moved.add_metric([tenant.name, OTHER, "", direction], value)
            for client in tenant.clients:
                if (tenant.name, client.number) not in self._clients:
                    continue
                labels = [tenant.name, str(client.number), client.name]
                moved.add_metric([*labels, "in"], client.bytes_in)
                moved.add_metric([*labels, "out"], client.bytes_out)
                for family, (_, _, field) in zip(gauges, CLIENT_GAUGES, strict=True):
                    family.add_metric(labels, getattr(client, field))
        yield moved
        yield from gauges


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Chosen:
    """At most `most` of what comes by, the heaviest first; whoever is in stays while it exists."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in: set[_Space] = set()

    def follow(self, weights: Mapping[_Space, int]) -> None:
        self._in &= weights.keys()
        free = self._most - len(self._in)
        waiting = weights.keys() - self._in
        self._in.update(sorted(waiting, key=lambda each: (-weights[each], each))[:free])

    def __contains__(self, each: _Space) -> bool:
        return each in self._in

    def __iter__(self) -> Iterator[_Space]:
        return iter(self._in)


class _Others:
    """Bytes of clients without series: their growth is added up, so that one that leaves takes
    nothing back. What a client moved before it got series stays here, and is in its own as well.
    """

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self._last: dict[int, tuple[int, int]] = {}

    def add(self, clients: Iterable[model.Client], chosen: set[int]) -> None:
        now = {each.number: (each.bytes_in, each.bytes_out) for each in clients}
        for number, (bytes_in, bytes_out) in now.items():
            if number not in chosen:
                last_in, last_out = self._last.get(number, (0, 0))
                self.bytes_in += max(0, bytes_in - last_in)
                self.bytes_out += max(0, bytes_out - last_out)
        self._last = now


# --- traffic -------------------------------------------------------------------------------------

_Part = tuple[str, str]  # hit, missed, loaded or failed; the tier or the reason


@dataclass(frozen=True, slots=True)
class _Row:
    tenant: str
    namespace: str
    traffic: model.Traffic
    tokens: Counter[_Part]


def _weight(traffic: model.Traffic) -> int:
    return traffic.requested + traffic.asked + traffic.given


def _space_labels(spaces: Iterable[model.Namespace]) -> dict[int, str]:
    """A name for each number, different ones: what clients call theirs, or the id's beginning."""
    labels: dict[int, str] = {}
    taken = {OTHER}
    for space in sorted(spaces, key=lambda each: each.number):
        label = space.name or f"id:{space.id[:12]}"
        if label in taken:
            label = f"{label}#{space.number}"
        taken.add(label)
        labels[space.number] = label
    return labels


def _parts(traffic: model.Traffic) -> dict[str, dict[str, int]]:
    """Blocks by what became of them, and there by tier or reason."""
    return {
        "hit": {
            "dram": traffic.hit_dram,
            "ssd": traffic.hit_ssd,
            "remote": traffic.hit_remote,
        },
        "missed": traffic.missed,
        "loaded": {
            "dram": traffic.loaded_dram,
            "ssd": traffic.loaded_ssd,
            "remote": traffic.loaded_remote,
        },
        "failed": traffic.failed,
        "refused": traffic.refused,
    }


def _tokens(space: model.Namespace) -> Counter[_Part]:
    return Counter(
        {
            (what, label): blocks * space.block_tokens
            for what, by in _parts(space.traffic).items()
            for label, blocks in by.items()
            if what != "refused"
        }
    )


def _traffic(rows: Sequence[_Row]) -> Iterator[Metric]:
    for name, help_text, field in TRAFFIC_COUNTERS:
        family = CounterMetricFamily(name, help_text, labels=["tenant", "namespace"])
        for row in rows:
            family.add_metric([row.tenant, row.namespace], getattr(row.traffic, field))
        yield family
    for name, help_text, what, label in TRAFFIC_SPLIT:
        family = CounterMetricFamily(name, help_text, labels=["tenant", "namespace", label])
        in_tokens = name.endswith("_tokens")
        for row in rows:
            for part, blocks in _parts(row.traffic)[what].items():
                value = row.tokens[what, part] if in_tokens else blocks
                family.add_metric([row.tenant, row.namespace, part], value)
        yield family


def _spaces(tenants: Sequence[model.Tenant], chosen: _Chosen) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "kvpool_namespace_blocks",
        "Blocks of the namespace in any tier. Near 0 with many refused puts: no room for it.",
        labels=["tenant", "namespace"],
    )
    size = GaugeMetricFamily(
        "kvpool_namespace_block_bytes",
        "Bytes of one block. Times kvpool_namespace_blocks: what the namespace takes.",
        labels=["tenant", "namespace"],
    )
    about = InfoMetricFamily(
        "kvpool_namespace",
        "What a namespace is for. Two of one model here: their engines differ in a field of the "
        "manifest and share nothing; kvpool explain says in which.",
        labels=["tenant", "namespace"],
    )
    for tenant in tenants:
        labels = _space_labels(tenant.namespaces)
        others = 0
        for space in tenant.namespaces:
            if (tenant.name, space.number) not in chosen:
                others += space.blocks
                continue
            key = [tenant.name, labels[space.number]]
            blocks.add_metric(key, space.blocks)
            size.add_metric(key, space.block_bytes)
            facts = {"id": space.id, "model": space.model, "block_tokens": str(space.block_tokens)}
            about.add_metric(key, facts)
        if len(labels) > sum((tenant.name, number) in chosen for number in labels):
            blocks.add_metric([tenant.name, OTHER], others)
    yield from (blocks, size, about)


# --- tiers, tenants, the daemon ------------------------------------------------------------------


def _gauges(names: Sequence[Named], labels: Sequence[str]) -> list[GaugeMetricFamily]:
    return [GaugeMetricFamily(name, help_text, labels=labels) for name, help_text, _ in names]


def _each(
    kind: Callable[..., GaugeMetricFamily] | Callable[..., CounterMetricFamily],
    names: Sequence[Named],
    parts: Sequence[tuple[str, object]],
) -> Iterator[Metric]:
    """A family for each name, and in it a sample for each part, which has the field."""
    for name, help_text, field in names:
        family = kind(name, help_text, labels=["tenant"])
        for tenant, part in parts:
            family.add_metric([tenant], getattr(part, field))
        yield family


def _tiers(tenants: Sequence[model.Tenant]) -> Iterator[Metric]:
    with_ssd = [(each.name, each.ssd) for each in tenants if each.ssd is not None]
    yield from _each(GaugeMetricFamily, DRAM_GAUGES, [(each.name, each.dram) for each in tenants])
    yield from _each(GaugeMetricFamily, SSD_GAUGES, with_ssd)
    yield from _each(CounterMetricFamily, SSD_COUNTERS, with_ssd)
    read_only = GaugeMetricFamily(
        "kvpool_ssd_read_only",
        "1 while the SSD tier takes no writes. kvpool stat tells the reason; docs/operating.md has "
        "what to do about each.",
        labels=["tenant"],
    )
    faults = CounterMetricFamily(
        "kvpool_ssd_faults",
        "Reads and writes that the disk failed (read, write, commit), copies that were not whole "
        "(damaged), reads given up (late). Each was a miss, never a wrong byte. Growing: look at "
        "the disk.",
        labels=["tenant", "kind"],
    )
    evictions = CounterMetricFamily(
        "kvpool_evictions",
        "Blocks that left a tier for room. Many, at a hit ratio below what the curve of /v1/mrc "
        "promises for more bytes: give the tier more.",
        labels=["tenant", "tier"],
    )
    for tenant in tenants:
        evictions.add_metric([tenant.name, "dram"], tenant.dram.evictions)
        if tenant.ssd is not None:
            evictions.add_metric([tenant.name, "ssd"], tenant.ssd.evictions)
            read_only.add_metric([tenant.name], bool(tenant.ssd.read_only_reason))
            for kind, count in tenant.ssd.faults.items():
                faults.add_metric([tenant.name, kind], count)
    yield from (read_only, faults, evictions)


def _tenants(tenants: Sequence[model.Tenant]) -> Iterator[Metric]:
    policies = [(each.name, each.policy) for each in tenants]
    yield from _each(GaugeMetricFamily, POLICY_GAUGES, policies)
    yield from _each(CounterMetricFamily, POLICY_COUNTERS, policies)
    yield from _each(GaugeMetricFamily, TENANT_GAUGES, [(each.name, each) for each in tenants])
    clients = GaugeMetricFamily(
        "kvpool_clients",
        "Connected clients. 0 while engines run: they serve without the pool; read their logs.",
        labels=["tenant"],
    )
    leases = GaugeMetricFamily(
        "kvpool_leases",
        "Leases by age. Old ones keep blocks from being evicted: find their client by "
        "kvpool_client_leases.",
        labels=["tenant", "age"],
    )
    limits = GaugeMetricFamily(
        "kvpool_tenant_limit",
        "What the configuration gives the tenant, in the unit that the limit's name has; 0: none.",
        labels=["tenant", "limit"],
    )
    refused = CounterMetricFamily(
        "kvpool_tenant_refused",
        "Connections and operations of the tenant that were refused. Growing: the reason says "
        "which limit or right is missing.",
        labels=["tenant", "reason"],
    )
    for tenant in tenants:
        clients.add_metric([tenant.name], len(tenant.clients))
        for age, count in zip(_AGES, tenant.lease_ages, strict=False):
            leases.add_metric([tenant.name, age], count)
        for limit, value in tenant.limits.items():
            limits.add_metric([tenant.name, limit], value)
        for reason, count in tenant.refused.items():
            refused.add_metric([tenant.name, reason], count)
    yield from (clients, leases, limits, refused)


def _build(report: model.Report) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "kvpool_build", "The version that serves.", value={"version": report.version}
    )


def _of_daemon(report: model.Report) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "kvpool_ready", "1 while clients are served; 0 while it begins or ends.", report.is_ready
    )
    yield GaugeMetricFamily(
        "kvpool_start_time_seconds", "Unix time of the daemon's start.", report.started_s
    )
    yield GaugeMetricFamily(
        "kvpool_dram_budget_bytes",
        "DRAM for the blocks of all tenants together. Raise it live with kvpool resize.",
        report.budget_bytes,
    )
    refused = CounterMetricFamily(
        "kvpool_connections_refused",
        "Connections refused before they belonged to a tenant. bad_token growing: somebody has an "
        "old token, or guesses.",
        labels=["reason"],
    )
    for reason, count in report.refused.items():
        refused.add_metric([reason], count)
    yield refused
