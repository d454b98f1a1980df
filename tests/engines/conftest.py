"""What the tests with real engines share: models, and the command that they are run by."""

from collections.abc import Callable

import pytest

from tests.engines.rig import Model, engine_python, model_folder

MLA_BLOCK_TOKENS = 16  # the one that its attention on CPUs takes


@pytest.fixture(scope="session", autouse=True)
def _engine_is_there() -> None:
    """Without one nothing here is skipped: it fails, and says what to do."""
    engine_python()


@pytest.fixture(scope="session")
def model() -> Callable[[str], Model]:
    """By name: llama, llama-bfloat16, mla, hybrid, smollm."""

    def named(name: str) -> Model:
        base, _, dtype = name.partition("-")
        return Model(
            name,
            model_folder(base),
            dtype=dtype or "float32",
            block_tokens=MLA_BLOCK_TOKENS if base == "mla" else 32,
            has_tokenizer=base == "smollm",
            has_windows=base == "hybrid",
            backend="CPU_MLA" if base == "mla" else "",
        )

    return named
