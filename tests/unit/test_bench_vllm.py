"""`kvpool bench vllm` proves what it counts. The engine is a stand-in here: its rules are vLLM's as
the bench relies on them, and each can be broken. tests/engines has real ones."""

import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool import cli
from kvpool.bench import vllm_child, vllm_engines, vllm_ttft
from kvpool.bench.rows import BenchError
from kvpool.bench.vllm_child import Answer, engine
from kvpool.bench.vllm_engines import Pair
from kvpool.bench.vllm_plan import Model, Plan
from kvpool.bench.vllm_systems import System, running

TTFT = {
    "work", "system", "prompt_tokens", "ttft_ms", "lowest_ms", "highest_ms", "rounds",
    "external_tokens", "times_recompute", "same_token",
}  # fmt: skip
OVERHEAD = {
    "work", "system", "prompt_tokens", "threads", "rounds", "tokens_per_s", "none_tokens_per_s",
    "pairs_ratio", "ratio",
}  # fmt: skip
TURNS = {
    "work", "system", "sessions", "turns", "rounds", "tokens_per_s", "times_none", "hit_rate",
    "local_rate", "external_rate",
}  # fmt: skip
CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}
# An engine with a prefix cache of its own and a connector that keeps what it has seen. It breaks
# the rule that $BREAKS names, and appends `SYSTEM TOKENS` to $LOG for each prompt.
STAND_IN = """
import os
from types import SimpleNamespace as Of

print("a library that prints to stdout")
BREAKS, LOG = os.environ.get("BREAKS"), os.environ.get("LOG")

def SamplingParams(*, temperature, max_tokens, detokenize, ignore_eos):
    assert temperature == 0 and ignore_eos and not detokenize
    return max_tokens

class LLM:
    def __init__(self, model, block_size, max_model_len, kv_transfer_config=None, **rest):
        if BREAKS == "start":
            raise RuntimeError("no such device")
        assert rest["disable_log_stats"] is False and "VLLM_CPU_KVCACHE_SPACE" in os.environ
        assert os.environ["OMP_NUM_THREADS"] == os.environ.get("THREADS", "1")
        self.name = (kv_transfer_config or {}).get("kv_connector", "none")
        self.block, self.longest = block_size, max_model_len
        self.local, self.outside, self.held = set(), set(), False
        self.llm_engine = Of(step=self.step)
        self.hits = {"vllm:prefix_cache_hits": 0, "vllm:external_prefix_cache_hits": 0}

    def get_metrics(self):
        other = Of(name="vllm:histogram", sum=1.0)
        return [other, *[Of(name=name, value=count) for name, count in self.hits.items()]]

    def step(self):
        self.held = BREAKS == "holds"

    def reset_prefix_cache(self):
        if BREAKS != "forgets" and not self.held:
            self.local.clear()
        return not self.held

    def generate(self, asked, tokens, use_tqdm):
        if BREAKS == "dies":
            os._exit(3)
        return [self.one(each["prompt_token_ids"], tokens) for each in asked]

    def one(self, prompt, tokens):
        assert len(prompt) + tokens <= self.longest
        if LOG:
            with open(LOG, "a") as log:
                log.write(f"{self.name} {len(prompt)}\\n")
        blocks = [tuple(prompt[:end]) for end in range(self.block, len(prompt), self.block)]
        local = next((i for i, b in enumerate(blocks) if b not in self.local), len(blocks))
        found = next((i for i, b in enumerate(blocks) if b not in self.outside), len(blocks))
        self.hits["vllm:prefix_cache_hits"] += local * self.block
        if self.name != "none" or BREAKS == "none":
            self.hits["vllm:external_prefix_cache_hits"] += max(0, found - local) * self.block
            self.outside.update(blocks if BREAKS != "stores" else ())
            if BREAKS == "loses" and found:
                self.outside.clear()
        self.local.update(blocks)
        self.held = True  # until a step without work
        output = [prompt[0]] * (tokens - (BREAKS == "short"))
        return Of(outputs=[Of(token_ids=output, finish_reason="length")])
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its folder; the Python of the tests is one with vLLM then."""
    folder = tmp_path / "site"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text(STAND_IN, encoding="utf-8")
    (folder / "vllm-0.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.1\n"
    (folder / "vllm-0.1.dist-info/METADATA").write_text(metadata, encoding="utf-8")
    known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *known]))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def plan(model: Path, said: list[str] | None = None, **other: object) -> Plan:
    usual = {
        "python": Path(sys.executable),
        "model": Model(model, 512, 1000, 8192),
        "systems": ("none", "example"),
        "lengths_tokens": (320, 640),
        "works": ("ttft",),
        "rounds": 2,
        "threads": 1,
        "installs": {},
        "seed": 3,
        "is_quick": True,
        "say": (said if said is not None else []).append,
    }
    return Plan(**{**usual, **other})


def asked(model: Path, *more: str):
    usual = ["bench", "vllm", "--json", "--quick", "--python", sys.executable]
    return CliRunner().invoke(cli.app, [*usual, "--model", str(model), *more])


@pytest.mark.usefixtures("stand_in")
def test_every_work_gives_its_rows(model: Path, monkeypatch) -> None:
    monkeypatch.setenv("THREADS", "3")
    done = asked(model, "--systems", "kvpool,example", "--rounds", "2", "--threads", "3")
    assert done.exit_code == 0, done.output
    assert "vllm 0.1" in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    fields = {"ttft": TTFT, "overhead": OVERHEAD, "turns": TURNS}
    assert all(set(row) == fields[row["work"]] for row in rows)
    ttft = [row for row in rows if row["work"] == "ttft"]
    wanted = itertools.product((160, 288), ("none", "kvpool", "example"))
    assert [(row["prompt_tokens"], row["system"]) for row in ttft] == list(wanted)
    for row in ttft:
        whole = (row["prompt_tokens"] - 2) // 128 * 128
        assert row["external_tokens"] == (0 if row["system"] == "none" else whole)
        assert row["lowest_ms"] <= row["ttft_ms"] <= row["highest_ms"]
        assert row["rounds"] == row["same_token"] == 2
    (overhead,) = [row for row in rows if row["work"] == "overhead"]
    assert (overhead["rounds"], overhead["threads"]) == (1, 3)
    alone, pooled = [row for row in rows if row["work"] == "turns"]
    assert (alone["system"], pooled["system"]) == ("none", "kvpool")
    assert alone["external_rate"] == 0 < alone["hit_rate"]
    assert pooled["hit_rate"] == pytest.approx(pooled["local_rate"] + pooled["external_rate"])


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("loses", "example served 0 of 160 tokens, not 128: no sample"),
        ("none", "none served 128 of 0 tokens"),
        ("forgets", "example: the engine's own cache served 128 tokens"),
        ("short", "an output is not of 1 tokens"),
        ("start", "no such device"),
        ("dies", "the engine for 'none' has ended"),
    ],
)
def test_what_is_not_proven_is_no_sample(model: Path, monkeypatch, rule, complaint) -> None:
    monkeypatch.setenv("BREAKS", rule)
    done = asked(model, "--systems", "example", "--works", "ttft", "--threads", "1")
    assert done.exit_code == 1
    assert complaint in done.stderr, done.stderr
    assert not done.stdout


@pytest.mark.usefixtures("stand_in")
def test_a_system_that_never_stores_is_named(model: Path, monkeypatch) -> None:
    monkeypatch.setenv("BREAKS", "stores")
    monkeypatch.setattr(vllm_ttft, "STORE_PAUSE_S", 0.0)
    with pytest.raises(BenchError, match=r"example does not serve 256 .* 10 times"):
        list(vllm_ttft.ttft(plan(model)))


@pytest.mark.usefixtures("stand_in")
def test_systems_take_turns_round_by_round(model: Path, monkeypatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    list(vllm_ttft.ttft(plan(model, lengths_tokens=(320,), rounds=4)))
    names = [line.split()[0] for line in log.read_text().splitlines()]
    stored = ["none", "ExampleConnector", "ExampleConnector"]  # once to store, once to be sure
    there, back = ["none", "ExampleConnector"], ["ExampleConnector", "none"]
    assert names == [*stored, *there, *back, *there, *back]


@pytest.mark.usefixtures("stand_in")
def test_engines_that_do_not_fit_run_there_and_back(model: Path, monkeypatch, tmp_path) -> None:
    log, said = tmp_path / "log", []
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setattr(vllm_engines, "memory_available_bytes", lambda: 1 << 20)
    found = list(vllm_ttft.ttft(plan(model, said, lengths_tokens=(320,), rounds=3)))
    assert [row.fields["rounds"] for row in found] == [4, 4]
    names = [name for name, _ in itertools.groupby(log.read_text().split()[::2])]
    assert names == ["none", "ExampleConnector", "none"]
    assert any("one after the other" in line for line in said)


def test_prompts_share_no_block_and_follow_the_seed(model: Path) -> None:
    lengths = (512, 1024, 4096)
    found = [vllm_ttft.prompt_of(plan(model), tokens) for tokens in lengths]
    assert [len(prompt) for prompt in found] == list(lengths)
    assert len({tuple(prompt[:8]) for prompt in found}) == len(lengths)
    assert vllm_ttft.prompt_of(plan(model), 512) == found[0]
    assert vllm_ttft.prompt_of(plan(model, seed=4), 512) != found[0]


def measured(**ms: list[float]) -> vllm_ttft.Measured:
    return {
        (name, 4096): vllm_ttft.Samples(times, [0] * len(times), [7] * len(times))
        for name, times in ms.items()
    }


@pytest.mark.parametrize(
    ("kvpool_ms", "is_fastest", "is_quick"), [(9.0, True, True), (30.0, False, False)]
)
def test_kvpool_is_held_to_the_fastest_other_and_to_recompute(
    model: Path, kvpool_ms: float, is_fastest: bool, is_quick: bool
) -> None:
    systems = ("none", "kvpool", "example", "lmcache")
    of = plan(model, systems=systems, lengths_tokens=(4096,))
    times = measured(none=[100.0], kvpool=[kvpool_ms], example=[20.0], lmcache=[40.0])
    rows = list(vllm_ttft._rows(of, times, 4096))
    assert [row.holds for row in rows] == [None, is_fastest, None, None, is_quick]
    assert rows[1].bar == "ttft_ms <= 20"
    assert rows[4].bar == "times_recompute >= 10"


@pytest.mark.parametrize(
    ("chunk_tokens", "prompt_tokens", "least"),
    [(128, 512, 384), (128, 514, 512), (256, 512, 256), (256, 200, 1)],
)
def test_whole_chunks_before_the_last_token_must_be_served(
    chunk_tokens: int, prompt_tokens: int, least: int
) -> None:
    system = System("lmcache", transfer={}, chunk_tokens=chunk_tokens)
    pair = Pair(system, engine=None)  # type: ignore[arg-type]
    assert vllm_ttft.served_min(pair, prompt_tokens) == least
    vllm_ttft.check(pair, prompt_tokens, Answer(1.0, [[1]], 0, least))
    with pytest.raises(BenchError, match="no sample"):
        vllm_ttft.check(pair, prompt_tokens, Answer(1.0, [[1]], 0, least - 1))
    with pytest.raises(BenchError, match="own cache"):
        vllm_ttft.check(pair, prompt_tokens, Answer(1.0, [[1]], 1, least))


@pytest.mark.usefixtures("stand_in")
def test_an_engine_ends_with_its_processes(model: Path) -> None:
    llm = {"model": str(model), "block_size": 128, "max_model_len": 512, "disable_log_stats": False}
    space = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with engine(Path(sys.executable), "none", llm, environment=space) as child:
        assert child.generate([[1, 2, 3]], 2).outputs == [[1, 1]]
        pid = child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("stand_in")
def test_an_engine_that_is_late_is_ended(model: Path, monkeypatch) -> None:
    monkeypatch.setattr(vllm_child, "START_S_MAX", 0.0)
    with (
        pytest.raises(BenchError, match="the engine for 'none' has ended"),
        engine(Path(sys.executable), "none", {"model": str(model)}, environment={}),
    ):
        pass


@pytest.mark.usefixtures("stand_in")
def test_an_engine_that_holds_its_blocks_is_named(model: Path, monkeypatch) -> None:
    program = vllm_child.ENGINE.read_text(encoding="utf-8")
    impatient = model / "engine.py"
    impatient.write_text(program.replace("FORGET_S_MAX = 30.0", "FORGET_S_MAX = 0.0"))
    monkeypatch.setattr(vllm_child, "ENGINE", impatient)
    monkeypatch.setenv("BREAKS", "holds")
    with pytest.raises(BenchError, match="blocks are held"):
        list(vllm_ttft.ttft(plan(model)))


def test_a_daemon_that_does_not_rest_is_named(monkeypatch) -> None:
    class Busy:
        spent_s = 0.0

        def cpu_s(self) -> float:
            self.spent_s += 1.0
            return self.spent_s

    monkeypatch.setattr(vllm_engines, "QUIET_S_MAX", 0.0)
    with pytest.raises(BenchError, match="does not come to rest"):
        vllm_engines.quiet(Busy())  # type: ignore[arg-type]


MASTER = """
import socket, sys, threading
wanted = dict(part.lstrip("-").split("=", 1) for part in sys.argv[1:])
ports = [int(wanted[name]) for name in ("rpc_port", "http_metadata_server_port")]
kept = [socket.create_server(("127.0.0.1", port)) for port in ports]
threading.Event().wait()
"""


def test_mooncake_runs_from_its_folder(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moon"
    (folder / "mooncake").mkdir(parents=True)
    master = folder / "mooncake/mooncake_master"
    of = plan(model, installs={"mooncake": folder})
    with pytest.raises(BenchError, match=r"there is no .*mooncake_master"):  # noqa: SIM117
        with running("mooncake", of, 1 << 28):
            pass
    master.write_text(f"#!{sys.executable}\n{MASTER}", encoding="utf-8")
    master.chmod(0o755)
    with running("mooncake", of, 1 << 28) as system:
        assert system.transfer == {
            "kv_role": "kv_both",
            "kv_connector": "MooncakeStoreConnector",
        }
        assert system.environment["PYTHONPATH"].split(os.pathsep)[0] == str(folder)
        config = json.loads(Path(system.environment["MOONCAKE_CONFIG_PATH"]).read_text())
        assert config["global_segment_size"] == 1 << 28
    master.write_text(f"#!{sys.executable}\nraise SystemExit('no luck')\n", encoding="utf-8")
    with pytest.raises(BenchError, match="did not begin to listen: no luck"):  # noqa: SIM117
        with running("mooncake", of, 1 << 28):
            pass


def test_lmcache_runs_from_its_folder(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lmc"
    package = folder / "lmcache/v1/multiprocess"
    package.mkdir(parents=True)
    server = """
    import socket, sys, threading
    listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
    threading.Event().wait()
    """
    (package / "server.py").write_text(textwrap.dedent(server), encoding="utf-8")
    with running("lmcache", plan(model, installs={"lmcache": folder}), 1 << 30) as system:
        assert system.transfer is not None
        assert system.transfer["kv_connector"] == "LMCacheMPConnector"
        assert system.hides_numba


def test_a_system_that_is_not_installed_says_what_it_needs(model: Path) -> None:
    with (
        pytest.raises(BenchError, match="mooncake needs --mooncake DIR"),
        running("mooncake", plan(model), 1 << 28),
    ):
        pass


def test_the_engine_program_loads_nothing_of_kvpool() -> None:
    code = f"""
import runpy, sys
runpy.run_path({str(vllm_child.ENGINE)!r}, run_name="engine")
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("kvpool", "numpy", "vllm")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
