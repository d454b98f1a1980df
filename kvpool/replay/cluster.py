"""A trace through simulated clusters: the product's policies and owners, no bytes, no network.

Relies on: the core's ClusterReplay, which says what is simulated, and its Replay for the pool of
           the same size and for Belady, which stand beside each cluster.
Promises:  all clusters see the same requests, in order, in one pass over the trace. One thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvpool import _core
from kvpool.replay.run import Watch
from kvpool.replay.score import ORACLE
from kvpool.replay.simulate import GHOSTS_FACTOR
from kvpool.replay.trace import Request, Trace, TraceError, batches, spread

NODES_MAX = 4095  # members of one cluster
BY_RUN_ABOVE = 16  # nodes; beyond that an owner for each key is asked for by too many messages
ROUTES = ("round-robin", "random", "prefix")
KEEPS = ("warm", "always", "never")
PICKS = ("load", "first")
WINDOW_S = 10  # of the busiest time of a node


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What clusters have in common. `replicate_above`: heat; 0 makes no replicas."""

    route: str = ROUTES[0]
    route_blocks: int = 2
    seed: int = 1
    keep: str = KEEPS[0]
    pick: str = PICKS[0]
    replicate_above: float = 0.0
    replicas_max: int = 3
    spare_last: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to replay: each policy in each cluster. `sizes`: nodes, and blocks of all together."""

    trace: Trace
    policies: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    options: ClusterOptions
    tau_s: float = 0.0
    block_bytes: int = 64 << 10
    spreads: bool = False  # requests of one time, over the time until the next


@dataclasses.dataclass(frozen=True, slots=True)
class Messages:
    """Of the directory, under one sharding; a node's words to itself are none.

    A request asks some owners for keys; a node tells owners in batches what came and went.
    `busiest`: messages to the node that had most. `asks_p99`: of one request.
    """

    asks: int
    asked_keys: int
    asks_p99: int
    asks_max: int
    publishes: int
    withdraws: int
    told_keys: int
    busiest: int

    @property
    def told(self) -> int:
        return self.publishes + self.withdraws

    def skew(self, nodes: int) -> float | None:
        """Messages of the busiest owner over those of the mean; None without any."""
        messages = self.asks + self.told
        return self.busiest * nodes / messages if messages else None


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterScore:
    """One policy in one cluster over one trace. Counts of blocks, save where a name says else.

    `one_pool_hits`, `belady_hits`: of a pool with the capacity of all nodes together. `kept`: of
    remote hits, those that left a copy. `sent`: by node, to others, replicas too; `routed`: by
    node, requests. `hidden`: requests that ended at a block that some node had and the directory
    did not know of. `sources`: nodes fetched from, summed over requests.
    """

    policy: str
    nodes: int
    capacity_blocks: int
    one_pool_hits: int
    belady_hits: int
    requests: int
    blocks: int
    local_hits: int
    remote_hits: int
    kept: int
    replicas: int
    evictions: int
    last_evicted: int
    hidden: int
    crowded: int
    sources: int
    busiest_window: int
    routed: tuple[int, ...]
    sent: tuple[int, ...]
    by_key: Messages
    by_run: Messages
    seconds: float

    @property
    def hits(self) -> int:
        return self.local_hits + self.remote_hits

    @property
    def hit_rate(self) -> float:
        return self.share(self.hits)

    @property
    def remote_share(self) -> float:
        """Of the hits, those that another node had."""
        return self.remote_hits / self.hits if self.hits else 0.0

    @property
    def sent_skew(self) -> float | None:
        """What the node that sent most sent, over the mean; None when nothing was sent."""
        total = sum(self.sent)
        return max(self.sent) * self.nodes / total if total else None

    @property
    def sharding(self) -> str:
        """The one that suits this size."""
        return "by_run" if self.nodes > BY_RUN_ABOVE else "by_key"

    def share(self, blocks: int) -> float:
        return blocks / self.blocks if self.blocks else 0.0

    def per_request(self, count: int) -> float:
        return count / self.requests if self.requests else 0.0


def replay_clusters(plan: ClusterPlan, watch: Watch) -> list[ClusterScore]:
    """Scores of every policy at every size, policy by policy. Raises TraceError."""
    runs = [(policy, *size) for policy in plan.policies for size in plan.sizes]
    clusters = _core.ClusterReplay()
    for policy, nodes, capacity in runs:
        clusters.add(nodes, capacity, **_options(plan, policy))
    capacities = list(dict.fromkeys(capacity for _, capacity in plan.sizes))
    pairs = [(name, each) for name in (*plan.policies, ORACLE) for each in capacities]
    pools = _core.Replay(pairs, ghosts_factor=GHOSTS_FACTOR, tau_s=plan.tau_s)
    requests = watch(f"{len(runs)} clusters", plan.trace)
    _feed(spread(requests) if plan.spreads else requests, clusters, pools)
    if not plan.trace.requests:
        raise TraceError(f"{plan.trace.path} holds no request")
    hits = {(row["policy"], row["capacity_blocks"]): row["hit_blocks"] for row in pools.results()}
    return [
        _score(run, row, (hits[run[0], run[2]], hits[ORACLE, run[2]]))
        for run, row in zip(runs, clusters.results(), strict=True)
    ]


def _options(plan: ClusterPlan, policy: str) -> dict[str, Any]:
    own = {"policy": policy, "tau_s": plan.tau_s, "ghosts_factor": GHOSTS_FACTOR}
    return dataclasses.asdict(plan.options) | own


def _feed(requests: Iterable[Request], *replays: _core.ClusterReplay | _core.Replay) -> None:
    for batch in batches(requests):
        for each in replays:
            each.feed(batch.times_s, batch.lengths, batch.ids)
    for each in replays:
        each.finish()


def _score(
    run: tuple[str, int, int], row: Mapping[str, Any], beside: tuple[int, int]
) -> ClusterScore:
    told = ("routed", "sent", "by_key", "by_run")
    names = {field.name for field in dataclasses.fields(ClusterScore)} - set(told)
    return ClusterScore(
        policy=run[0],
        nodes=run[1],
        capacity_blocks=run[2],
        one_pool_hits=beside[0],
        belady_hits=beside[1],
        routed=tuple(row["routed"]),
        sent=tuple(row["sent"]),
        by_key=Messages(**row["by_key"]),
        by_run=Messages(**row["by_run"]),
        **{name: row[name] for name in names if name in row},
    )
