"""Whether an engine can go on from KV that it did not compute. Some cannot, and do not say so."""

from __future__ import annotations

from typing import Any

from kvpool.errors import BadArgument


def require_prefixes(config: Any) -> None:
    """Raises BadArgument for an engine that ignores a prefix that was loaded, or trips over it.

    Pooling over all tokens needs all of them computed. Where vLLM has multi-head latent attention
    on a CPU without AMX it turns chunked prefill and prefix caching off by itself: its kernels
    attend to what is in the step, and give other tokens.
    """
    from vllm.platforms import current_platform

    if not config.model_config.is_prefix_caching_supported:
        raise BadArgument(
            f"vLLM says that {config.model_config.model}, used as it is, cannot go on from a part"
            " of a prompt: a pool has nothing for it"
        )
    if not (current_platform.is_cpu() and config.model_config.use_mla):
        return
    if not (
        config.cache_config.enable_prefix_caching or config.scheduler_config.enable_chunked_prefill
    ):
        raise BadArgument(
            "this engine has multi-head latent attention on CPUs without AMX, whose kernels ignore"
            " a prefix that was loaded: there is nothing that a pool could do for it"
        )
