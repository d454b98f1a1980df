"""Whether an engine can go on from KV that it did not compute. Most can; one kind says nothing."""

from __future__ import annotations

from typing import Any

from kvpool.errors import BadArgument


def require_prefixes(config: Any) -> None:
    """Raises BadArgument for an engine whose kernels ignore a prefix that was loaded.

    Where vLLM has multi-head latent attention on a CPU without AMX it turns chunked prefill and
    prefix caching off by itself: its kernels attend to what is in the step, and give other tokens.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and config.model_config.use_mla):
        return
    if not (
        config.cache_config.enable_prefix_caching or config.scheduler_config.enable_chunked_prefill
    ):
        raise BadArgument(
            "this engine has multi-head latent attention on CPUs without AMX, whose kernels ignore"
            " a prefix that was loaded: there is nothing that a pool could do for it"
        )
