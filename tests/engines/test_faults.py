"""Whatever becomes of the daemon and its blocks, and whenever: an engine says what it says without.

Engines by shared memory and by TCP, whose policy for failed loads is to compute; and one whose
policy is to fail. A test leaves a daemon that runs, and engines that go on.
"""

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.connectors import kvpool_connector
from tests.engines.faulty_daemon import FaultyDaemon
from tests.engines.rig import Engine, Model, Output, engines
from tests.engines.tokens import assert_same, loadable_tokens, random_prompts
from tests.served import running, served
from tests.tiers import DATA_OFFSET

# Before a load that was decided on: by then it is known what the pool has.
BEFORE_LOAD = "kvpool.connectors.vllm_worker:WorkerHalf._deliver"
LOAD_TIMEOUT_S = 4.0
# Deadlines of a lookup and of a load, and what a busy machine needs for the rest.
SLACK_S = 40.0
LIMIT_S = 2 * LOAD_TIMEOUT_S + SLACK_S
MAX_TOKENS = 8
TOKENS = 200
SECTOR_BYTES = 512
CHANNELS = ("shm", "tcp")


@dataclass
class Asked:
    """Prompts whose blocks are in the pool and in no engine, and what is right."""

    prompts: list[list[int]]
    right: Sequence[Output]


@dataclass
class Rig:
    model: Model
    daemon: FaultyDaemon
    plain: Engine
    by: dict[str, Engine]

    def asked(self, engine: Engine, rng: np.random.Generator) -> Asked:
        """New prompts; this engine has computed them, saved them and forgotten them."""
        found = self.new(rng)
        engine.wait_connected()
        assert_same(self.model, found.right, engine.generate(found.prompts, MAX_TOKENS))
        engine.wait_saved()
        engine.reset_prefix_cache()
        return found

    def new(self, rng: np.random.Generator) -> Asked:
        prompts = random_prompts(rng, 2, TOKENS)
        return Asked(prompts, self.plain.generate(prompts, MAX_TOKENS))

    def assert_says_the_same(self, engine: Engine, asked: Asked) -> None:
        """Of a generate that was begun: in time, too."""
        assert_same(self.model, asked.right, engine.outputs(LIMIT_S))

    def assert_goes_on(self, engine: Engine, asked: Asked) -> None:
        """With the daemon as it is now: all blocks come from the pool."""
        engine.wait_connected()
        engine.reset_prefix_cache()
        with engine.counting() as counted:
            engine.begin(asked.prompts, MAX_TOKENS)
            self.assert_says_the_same(engine, asked)
        loadable = loadable_tokens(self.model, asked.right)
        assert counted.external_tokens == loadable, counted.named("kvpool")


@pytest.fixture(scope="module")
def rig(model: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    llama = model("llama")
    folder = tmp_path_factory.mktemp("faults")
    ssd = {"ssd": str(folder / "tier"), "ssd_capacity": "256MiB", "ssd_free_floor": "0"}
    daemon = FaultyDaemon(folder, dram="64MiB", durability="durable", **ssd)
    with running(daemon):
        unix, tcp = daemon.unix_address, daemon.tcp_address
        quick = {"load_timeout_s": LOAD_TIMEOUT_S}
        with engines(
            Engine(llama, folder, "plain"),
            Engine(llama, folder, "shm", connector=kvpool_connector(unix, **quick)),
            Engine(llama, folder, "tcp", connector=kvpool_connector(tcp, **quick)),
            Engine(
                llama, folder, "failing", connector=kvpool_connector(tcp, policy="fail", **quick)
            ),
        ) as (plain, shm, tcp_engine, failing):
            by = {"shm": shm, "tcp": tcp_engine, "failing": failing}
            yield Rig(llama, daemon, plain, by)


@pytest.fixture(params=CHANNELS)
def engine(request: pytest.FixtureRequest, rig: Rig) -> Engine:
    return rig.by[request.param]


@contextlib.contextmanager
def stopped(daemon: FaultyDaemon) -> Iterator[None]:
    daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.signal(signal.SIGCONT)


# --- the daemon dies -----------------------------------------------------------------------------


def test_a_daemon_that_died_before_the_lookup(
    rig: Rig, engine: Engine, rng: np.random.Generator
) -> None:
    asked = rig.asked(engine, rng)
    rig.daemon.kill()
    with engine.counting() as counted:
        engine.begin(asked.prompts, MAX_TOKENS)
        rig.assert_says_the_same(engine, asked)
    assert counted.external_tokens == 0
    rig.daemon.start()
    rig.assert_goes_on(engine, asked)


def test_a_daemon_that_dies_between_lookup_and_load(
    rig: Rig, engine: Engine, rng: np.random.Generator
) -> None:
    """What is read in place stays readable; what is fetched from elsewhere is computed."""
    asked = rig.asked(engine, rng)
    engine.hold(BEFORE_LOAD)
    with held_generate(rig, engine, asked) as counted:
        rig.daemon.kill()
    assert counted.external_tokens > 0
    if engine is rig.by["tcp"]:
        assert counted.value("kvpool_failed_loads_total") > 0
    rig.daemon.start()
    rig.assert_goes_on(engine, asked)


@contextlib.contextmanager
def held_generate(rig: Rig, engine: Engine, asked: Asked) -> Iterator[Any]:
    """What is done in the with happens while the engine is held where hold() said."""
    with engine.counting() as counted:
        engine.begin(asked.prompts, MAX_TOKENS)
        engine.wait_held()
        try:
            yield counted
        finally:
            engine.go()
        rig.assert_says_the_same(engine, asked)


def test_a_daemon_that_dies_while_it_reads_what_is_wanted(
    rig: Rig, engine: Engine, rng: np.random.Generator
) -> None:
    """By shared memory that is while the blocks are leased; by TCP while they are sent."""
    asked = rig.asked(engine, rng)
    rig.daemon.kill()
    rig.daemon.start()  # now they are on its SSD alone
    engine.wait_connected()
    rig.daemon.fault("pause", "ssd.read")
    engine.begin(asked.prompts, MAX_TOKENS)
    rig.daemon.wait_paused("ssd.read")
    rig.daemon.kill()
    rig.assert_says_the_same(engine, asked)
    rig.daemon.start()
    rig.assert_goes_on(engine, asked)


def test_a_daemon_that_dies_while_it_stores(
    rig: Rig, engine: Engine, rng: np.random.Generator
) -> None:
    engine.wait_connected()
    asked = rig.new(rng)
    rig.daemon.fault("pause", "put.copy")
    engine.begin(asked.prompts, MAX_TOKENS)
    rig.assert_says_the_same(engine, asked)
    rig.daemon.wait_paused("put.copy")
    rig.daemon.kill()
    engine.wait_saved()  # or given up
    engine.reset_prefix_cache()
    engine.begin(asked.prompts, MAX_TOKENS)
    rig.assert_says_the_same(engine, asked)
    rig.daemon.start()
    engine.wait_connected()
    engine.reset_prefix_cache()
    engine.begin(asked.prompts, MAX_TOKENS)
    rig.assert_says_the_same(engine, asked)
    engine.wait_saved()
    rig.assert_goes_on(engine, asked)


# --- the daemon says nothing ---------------------------------------------------------------------


def test_a_daemon_that_is_stopped_before_the_lookup(
    rig: Rig, engine: Engine, rng: np.random.Generator
) -> None:
    asked = rig.asked(engine, rng)
    with stopped(rig.daemon):
        engine.begin(asked.prompts, MAX_TOKENS)
        rig.assert_says_the_same(engine, asked)
    rig.assert_goes_on(engine, asked)


def test_a_daemon_that_is_stopped_between_lookup_and_load(
    rig: Rig, engine: Engine, rng: np.random.Generator
) -> None:
    asked = rig.asked(engine, rng)
    engine.hold(BEFORE_LOAD)
    with contextlib.ExitStack() as until_said:
        with held_generate(rig, engine, asked) as counted:
            until_said.enter_context(stopped(rig.daemon))
        failed = counted.value("kvpool_failed_loads_total")
        assert (failed > 0) == (engine is rig.by["tcp"])
    rig.assert_goes_on(engine, asked)


# --- the policy that fails -----------------------------------------------------------------------


def test_a_load_that_fails_ends_the_request_where_that_is_the_policy(
    rig: Rig, rng: np.random.Generator
) -> None:
    """That request alone: the engine goes on."""
    engine = rig.by["failing"]
    asked = rig.asked(engine, rng)
    engine.hold(BEFORE_LOAD)
    engine.begin(asked.prompts[:1], MAX_TOKENS)
    engine.wait_held()
    rig.daemon.kill()
    engine.go()
    (output,) = engine.outputs(LIMIT_S)
    assert output.finish == "error"
    engine.begin(asked.prompts, MAX_TOKENS)
    rig.assert_says_the_same(engine, asked)
    rig.daemon.start()
    rig.assert_goes_on(engine, asked)


# --- blocks --------------------------------------------------------------------------------------


def test_blocks_that_were_damaged_on_the_ssd(
    rig: Rig, engine: Engine, rng: np.random.Generator
) -> None:
    asked = rig.asked(engine, rng)
    rig.daemon.stop()
    damage(rig.daemon.folder / "tier" / "slabs")
    rig.daemon.start()
    engine.wait_connected()
    engine.begin(asked.prompts, MAX_TOKENS)
    rig.assert_says_the_same(engine, asked)
    with rig.daemon.connect() as pool:
        assert pool.stats()["ssd_hits"] == 0
        assert pool.stats()["ssd_damaged"] > 0


def damage(path: Path) -> None:
    """A bit of every sector that has one."""
    content = np.fromfile(path, np.uint8)
    content[DATA_OFFSET::SECTOR_BYTES] ^= 1
    content.tofile(path)


def test_strangers_on_one_pool_find_their_own_blocks_alone(
    rig: Rig, model: Callable[[str], Model], rng: np.random.Generator, tmp_path: Path
) -> None:
    """Another dtype; and other weights under the same name."""
    engine, llama = rig.by["shm"], rig.model
    strangers = [model("llama-bfloat16"), replace(llama, folder=other_weights(llama, tmp_path))]
    connector = kvpool_connector(rig.daemon.unix_address)
    started = [
        Engine(each, tmp_path, f"stranger{number}", connector=connector)
        for number, each in enumerate(strangers)
    ]
    with engines(*started):
        asked = rig.asked(engine, rng)
        for other in started:
            with other.counting() as counted:
                first = other.generate(asked.prompts, MAX_TOKENS)
            assert counted.external_tokens == 0
            other.wait_saved()
            rig.assert_goes_on(engine, asked)
            other.reset_prefix_cache()
            with other.counting() as counted:
                assert_same(other.model, first, other.generate(asked.prompts, MAX_TOKENS))
            assert counted.external_tokens == loadable_tokens(other.model, first)


def other_weights(model: Model, place: Path) -> Path:
    """A folder of the same name, in which every weight differs by a bit of its fraction."""
    folder = place / "other" / model.folder.name
    shutil.copytree(model.folder, folder)
    (path,) = folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")  # behind the header
    content[start + 2 :: 4] = (np.frombuffer(content[start + 2 :: 4], np.uint8) ^ 16).tobytes()
    path.write_bytes(content)
    return folder


def test_a_pool_that_is_too_small_for_what_is_asked(
    rig: Rig, rng: np.random.Generator, tmp_path: Path
) -> None:
    prompts = random_prompts(rng, 12, 300)
    right = rig.plain.generate(prompts, MAX_TOKENS)
    with served(tmp_path, dram="4MiB") as daemon:
        connector = kvpool_connector(daemon.unix_address)
        with engines(Engine(rig.model, tmp_path, connector=connector)) as (engine,):
            for _ in range(2):
                with engine.counting() as counted:
                    assert_same(rig.model, right, engine.generate(prompts, MAX_TOKENS))
                engine.wait_saved()
                engine.reset_prefix_cache()
    assert 0 < counted.external_tokens < loadable_tokens(rig.model, right)
