"""What a second look at the vLLM connector asked for."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvpool
from tests.served import Served, served
from tests.vllm_fakes import BLOCK, BLOCK_BYTES, Rig, a_request, a_step


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    with kvpool.open(dram="64MiB") as pool:
        yield pool


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram="64MiB", log_level="warning") as daemon:
        yield daemon


def test_what_an_adapter_computed_is_not_stored_as_that_of_the_files_that_replaced_it(
    pool: kvpool.Pool, tmp_path: Path
) -> None:
    """A trainer writes the next adapter over the last one; the engine still has the last one."""
    (tmp_path / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(bytes(64))
    lora = SimpleNamespace(
        lora_name="x", lora_int_id=1, lora_path=str(tmp_path), load_inplace=False, adapter_id=1
    )
    rig = Rig(pool)
    digests = []
    for name in ("a", "b"):
        request = rig.arrive(a_request(name, lora_request=lora))
        assert rig.offered(request) == 0
        step = rig.half.next_step(a_step({name: 100}, {name: [list(range(1, 8))]}))
        digests += [save.adapter for save in step.saves]
        weights.write_bytes(b"1" * 64)
    assert len(set(digests)) <= 1, digests


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_what_one_client_may_pin(daemon: Served, ranks: int) -> None:
    count = 9600 // ranks  # of 4 KiB: more than a quarter of 64 MiB in all
    hashes = [at.to_bytes(16, "big") * 2 for at in range(count)]
    with daemon.connect(timeout=5.0) as pool:
        rig = Rig(pool, ranks=ranks)
        for space in rig.spaces():
            data = np.zeros(BLOCK_BYTES * count, np.uint8)
            assert space.put(space.fold(hashes), data).stored == count
        request = a_request("a", tokens=0, block_hashes=hashes)
        request.num_tokens = request.num_prompt_tokens = count * BLOCK + 1
        offered = rig.offered(rig.arrive(request))
        counted = rig.counted()
        rig.half.close()
    assert offered > 0, counted
