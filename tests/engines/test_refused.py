"""Starts that must fail, and say why: afterwards it would be too late."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.connectors import kvpool_connector
from tests.engines.rig import Engine, Model, engines

# model, more options of the connector, what is said
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "an option that is none": ("llama", {"min_block": 2}, "min_blocks"),
    "a value that is none": ("llama", {"load_timeout_s": -1}, "load_timeout_s"),
    "an address that is none": ("llama", {"address": "http://here"}, "address"),
}


def test_what_a_start_is_refused_for(model: Callable[[str], Model], tmp_path: Path) -> None:
    connector = kvpool_connector(f"unix:{tmp_path}/nobody.sock")
    asked = {
        name: {
            **connector,
            "kv_connector_extra_config": {**connector["kv_connector_extra_config"], **options},
        }
        for name, (_, options, _) in CASES.items()
    }
    with engines(
        *(
            Engine(model(CASES[name][0]), tmp_path, f"engine {at}", connector=asked[name])
            for at, name in enumerate(CASES)
        )
    ) as started:
        for engine, (_, _, said) in zip(started, CASES.values(), strict=True):
            with pytest.raises(AssertionError, match=said):
                engine.wait_ready()
