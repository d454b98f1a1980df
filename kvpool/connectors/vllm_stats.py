"""What the connector counts, as vLLM logs it and as Prometheus scrapes it.

One flat dict of numbers: each side counts, vLLM adds up the sides and ranks. Names:
`vllm:kvpool_<name>`; a reason is a label. Blocks are counted per KV cache group and rank.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvpool.connectors.vllm_counts import COUNTERS, REASONS

_PREFIX = "vllm:kvpool_"


class KvpoolStats(KVConnectorStats):
    """Counters of one interval."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: the counters, and the rate of the loads."""
        shown: dict[str, int | float] = {
            f"kvpool {name}": round(amount, 4) for name, amount in sorted(self.data.items())
        }
        if self.data.get("load_seconds"):
            rate = self.data["loaded_bytes"] / self.data["load_seconds"] / 1e9
            shown["kvpool load GB/s"] = round(rate, 3)
        return shown

    def is_empty(self) -> bool:
        return not self.data


class KvpoolMetrics(KVConnectorPromMetrics):
    """The counters, each with the labels of its engine."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._plain = {
            name: self._counter_cls(
                name=_PREFIX + name, documentation=text, labelnames=self._labelnames
            )
            for name, text in COUNTERS.items()
        }
        self._reasoned = {
            name: self._counter_cls(
                name=_PREFIX + name, documentation=text, labelnames=[*self._labelnames, "reason"]
            )
            for name, text in REASONS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, reason = key.partition(".")
            if reason and name in self._reasoned:
                self._reasoned[name].labels(*labels, reason).inc(amount)
            elif name in self._plain:
                self._plain[name].labels(*labels).inc(amount)


def metrics_for(given: tuple[Any, ...]) -> KvpoolMetrics:
    """For KVConnectorBase_V1.build_prom_metrics()."""
    assert Counter in given[1]
    return KvpoolMetrics(*given)
