"""The cluster's part of the metrics.

Promises:  1. at most PEERS_MAX members have series of their own; the others are counted together,
              and what was counted stays counted when a member leaves;
           2. one tenant's part has no other tenant's numbers.
Relies on: prometheus_client. Thread rule: one thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from kvpool.observe.cluster import BREAKERS, Cluster, Directory, Link, Node

PEERS_MAX = 64  # members with series, for each tenant
OTHER = "other"

Named = tuple[str, str, str]  # name, HELP, field

DIRECTORY_GAUGES: tuple[Named, ...] = (
    (
        "kvpool_cluster_directory_slots",
        "Of the 65,536 parts of the directory, those that this node keeps. 0: it is no member.",
        "slots",
    ),
    (
        "kvpool_cluster_directory_keys",
        "Keys in this node's shard of the directory.",
        "keys",
    ),
    ("kvpool_cluster_directory_bytes", "Memory of this node's shard of the directory.", "bytes"),
    (
        "kvpool_cluster_publish_queue_keys",
        "Changes here that other members have not been told yet. Growing: those who keep the "
        "directory are slow, or gone and not off the list yet.",
        "queued",
    ),
    (
        "kvpool_cluster_published",
        "1 while all that is here stands in the directory. 0 for long: blocks that are here are "
        "not found from elsewhere.",
        "is_told",
    ),
)
DIRECTORY_COUNTERS: tuple[Named, ...] = (
    (
        "kvpool_cluster_directory_evicted_keys",
        "Keys that made room for others in this node's shard: those blocks are not found from "
        "elsewhere. Growing: more members, or a larger directory.",
        "evicted",
    ),
    ("kvpool_cluster_published_keys", "Blocks that came, and were told.", "published"),
    ("kvpool_cluster_withdrawn_keys", "Blocks that went, and were told.", "withdrawn"),
    (
        "kvpool_cluster_announced_keys",
        "Keys told once more, as another member keeps them now. Grows with each member that comes "
        "or goes, and slowly all the time.",
        "announced",
    ),
    (
        "kvpool_cluster_publish_lost",
        "Times that more changed than could be kept until it was told; all of it is told again. "
        "Growing: the network is too slow for what engines put.",
        "lost",
    ),
    (
        "kvpool_cluster_copied_bytes",
        "Of what is hot here: fetched by other members, as this node asked them to.",
        "copied_bytes",
    ),
)
LINK_GAUGES: tuple[Named, ...] = (
    ("kvpool_peer_streams", "Connections to a member.", "streams"),
    ("kvpool_peer_in_flight_bytes", "Asked for at a member, and not here yet.", "in_flight_bytes"),
)
LINK_COUNTERS: tuple[Named, ...] = (
    (
        "kvpool_peer_fetched_blocks",
        "Blocks that were fetched from a member. One much above the others: what it has is hot.",
        "fetched_blocks",
    ),
    (
        "kvpool_peer_failures",
        "Requests to a member that failed; each was a miss, or another member was asked. Growing: "
        "kvpool nodes says why it was not reached.",
        "failed",
    ),
    (
        "kvpool_peer_ucx_blocks",
        "Of the fetched blocks, those that were read out of the member's memory over UCX.",
        "ucx_blocks",
    ),
    (
        "kvpool_peer_ucx_failures",
        "Times that such reads failed; those blocks came over TCP, or were misses. Growing: the "
        "log says why.",
        "ucx_failed",
    ),
)
_MOVED = (
    "kvpool_peer_bytes",
    "Payload fetched from (in) and given to (out) a member. peer=other: all that have no series.",
)
_COUNTED = ("fetched_blocks", "failed", "bytes_in", "bytes_out", "ucx_blocks", "ucx_failed")


class ClusterSeries:
    """Keeps who has series of its own, from one scrape to the next."""

    def __init__(self) -> None:
        self._chosen: dict[str, set[str]] = {}  # tenant -> members
        self._last: dict[tuple[str, str], Counter[str]] = {}  # of those without series
        self._others: dict[str, Counter[str]] = {}

    def families(self, cluster: Cluster | None, tenant: str | None) -> Iterator[Metric]:
        """cluster: the whole; tenant: whose part is shown."""
        if cluster is None:
            return
        self._follow(cluster)
        if tenant is None:
            yield from _of_members(cluster)
        yield from _of_directories(
            [each for each in cluster.directories if tenant in (None, each.tenant)]
        )
        yield from self._of_links(cluster, tenant)

    def _follow(self, cluster: Cluster) -> None:
        there: dict[tuple[str, str], Link] = {
            (link.tenant, node.id): link for node in cluster.nodes for link in node.links
        }
        for tenant in {name for name, _ in there}:
            chosen = self._chosen.setdefault(tenant, set())
            chosen &= {node for name, node in there if name == tenant}
            waiting = [key for key in there if key[0] == tenant and key[1] not in chosen]
            waiting.sort(key=lambda key: (-_weight(there[key]), key))
            chosen.update(node for _, node in waiting[: PEERS_MAX - len(chosen)])
        now = {key: _counts(link) for key, link in there.items()}
        for key, counts in now.items():
            others = self._others.setdefault(key[0], Counter())
            if key[1] not in self._chosen[key[0]]:
                others.update(counts - self._last.get(key, Counter()))  # what grew
        self._last = now

    def _of_links(self, cluster: Cluster, tenant: str | None) -> Iterator[Metric]:
        labels = ["tenant", "peer"]
        gauges = [GaugeMetricFamily(name, told, labels=labels) for name, told, _ in LINK_GAUGES]
        counters = [
            CounterMetricFamily(name, told, labels=labels) for name, told, _ in LINK_COUNTERS
        ]
        moved = CounterMetricFamily(*_MOVED, labels=[*labels, "direction"])
        latency = GaugeMetricFamily(
            "kvpool_peer_latency_seconds",
            "To the first byte of a member's answer, smoothed. High for one: its host or its link "
            "is busy, and less is asked of it.",
            labels=labels,
        )
        breaker = GaugeMetricFamily(
            "kvpool_peer_breaker",
            "1 for the state that the way to a member is in. open: it failed, and is left alone "
            "for up to 30 s at a time.",
            labels=[*labels, "state"],
        )
        for node, link in self._shown(cluster, tenant):
            key = [link.tenant, node.id]
            _add(gauges, LINK_GAUGES, key, link)
            _add(counters, LINK_COUNTERS, key, link)
            moved.add_metric([*key, "in"], link.bytes_in)
            moved.add_metric([*key, "out"], link.bytes_out)
            latency.add_metric(key, link.latency_us / 1e6)
            for state in BREAKERS:
                breaker.add_metric([*key, state], link.breaker == state)
        for name, others in self._others.items():
            if tenant in (None, name):
                for family, (_, _, field) in zip(counters, LINK_COUNTERS, strict=True):
                    family.add_metric([name, OTHER], others[field])
                moved.add_metric([name, OTHER, "in"], others["bytes_in"])
                moved.add_metric([name, OTHER, "out"], others["bytes_out"])
        yield from (*gauges, *counters, moved, latency, breaker)

    def _shown(self, cluster: Cluster, tenant: str | None) -> Iterator[tuple[Node, Link]]:
        for node in cluster.nodes:
            for link in node.links:
                if tenant in (None, link.tenant) and node.id in self._chosen[link.tenant]:
                    yield node, link


def _weight(link: Link) -> int:
    return link.bytes_in + link.bytes_out


def _counts(link: Link) -> Counter[str]:
    return Counter({name: getattr(link, name) for name in _COUNTED})


def _add(
    families: Iterable[GaugeMetricFamily | CounterMetricFamily],
    names: Iterable[Named],
    labels: list[str],
    part: Link | Directory,
) -> None:
    for family, (_, _, field) in zip(families, names, strict=True):
        family.add_metric(labels, getattr(part, field))


def _of_members(cluster: Cluster) -> Iterator[Metric]:
    members = GaugeMetricFamily(
        "kvpool_cluster_members",
        "Members that this node knows, itself among them. Different on two nodes for long: one of "
        "them does not hear from etcd.",
        labels=["state"],
    )
    states = Counter(each.state for each in cluster.nodes)
    for state in ("up", "draining"):
        members.add_metric([state], states[state])
    yield members
    yield GaugeMetricFamily(
        "kvpool_cluster_frozen",
        "1 while etcd is away: members are kept as they were, and blocks are served on.",
        cluster.is_frozen,
    )
    yield GaugeMetricFamily(
        "kvpool_cluster_entered",
        "1 while this node surely stands in the list that others read. 0 for long: its log says "
        "what etcd answers.",
        cluster.is_entered,
    )
    yield GaugeMetricFamily(
        "kvpool_cluster_replaced",
        "1 once another process had this node's id: was its state directory copied?",
        cluster.is_replaced,
    )
    yield GaugeMetricFamily(
        "kvpool_cluster_view",
        "Number of the view of the members: grows with each change.",
        cluster.version,
    )
    yield InfoMetricFamily(
        "kvpool_cluster",
        "The cluster, and the fingerprint of its members: the same on all nodes that see the same.",
        value={"name": cluster.name, "node": cluster.own, "fingerprint": cluster.fingerprint},
    )


def _of_directories(directories: Iterable[Directory]) -> Iterator[Metric]:
    gauges = [
        GaugeMetricFamily(name, told, labels=["tenant"]) for name, told, _ in DIRECTORY_GAUGES
    ]
    counters = [
        CounterMetricFamily(name, told, labels=["tenant"]) for name, told, _ in DIRECTORY_COUNTERS
    ]
    for each in directories:
        _add(gauges, DIRECTORY_GAUGES, [each.tenant], each)
        _add(counters, DIRECTORY_COUNTERS, [each.tenant], each)
    yield from (*gauges, *counters)
