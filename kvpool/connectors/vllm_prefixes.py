"""Whether an engine can go on from KV that it did not compute. Some cannot, and do not say so."""

from __future__ import annotations

from typing import Any

from kvpool.errors import BadArgument


def require_prefixes(config: Any) -> None:
    """Raises BadArgument for an engine that ignores a prefix that was loaded, or trips over it.

    Pooling over all tokens needs all of them computed.

    Multi-head latent attention is not refused, though vLLM 0.32 turns prefix caching off for it on
    CPUs without AMX: its kernels attend to what was loaded (tests/engines/test_same_tokens.py).
    What is wrong there is the rotation of positions that are not scaled, with a pool or without:
    what such a model says depends on how many tokens are computed at once.
    """
    if not config.model_config.is_prefix_caching_supported:
        raise BadArgument(
            f"vLLM says that {config.model_config.model}, used as it is, cannot go on from a part"
            " of a prompt: a pool has nothing for it"
        )
