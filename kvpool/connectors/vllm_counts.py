"""What the connector counts. Needs no vLLM; vllm_stats.py hands it over."""

from __future__ import annotations

import threading

# name -> what it counts. Names with a dot are one metric with a label `reason`.
COUNTERS = {
    "lookups": "requests that were looked up in the pool",
    "lookup_blocks": "blocks that were asked for, beyond what the engine had itself",
    "hit_blocks": "blocks found and offered to the engine",
    "loaded_blocks": "blocks delivered into the engine's pages",
    "loaded_bytes": "bytes delivered into the engine's pages",
    "load_seconds": "time that loads took, from their start to their end",
    "failed_loads": "blocks that were offered and not delivered: computed again, or the request "
    "ends with an error, as kv_load_failure_policy says",
    "saved_blocks": "blocks stored",
    "saved_bytes": "bytes stored",
    "present_blocks": "blocks that were in the pool already when they were to be stored",
}
REASONS = {
    "no_hit": "requests for which nothing was loaded, by reason",
    "unsaved_blocks": "blocks that were computed and not stored, by reason",
}


class Counts:
    """Counters since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, reason: str = "") -> None:
        """reason: for the names in REASONS."""
        key = f"{name}.{reason}" if reason else name
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + amount

    def take(self) -> dict[str, float]:
        """What was counted; counting begins anew."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts
