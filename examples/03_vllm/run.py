"""Two vLLM engines in two processes: what the first computed of a prompt, the second reads.

    python examples/03_vllm/run.py [--python PATH] [--model DIR]

A daemon; engine A, a fresh process, which computes three prompts and saves their KV; engine B,
another one, which finds it in the daemon. The table shows how long each waited for its first token,
and that both wrote the same text.

The engines run in a Python that has vLLM and kvpool: .venv-vllm/bin/python, unless it is named. The
model is SmolLM2-135M, made once below build/, unless it is named. Without a GPU, on two cores, all
of it takes a minute.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPT_CHARACTERS = (2_000, 8_000, 20_000)
TEXT_TOKENS = 24


def engine(address: str, model: str, results: str) -> None:
    """What engine A and engine B do, in a Python that has vLLM. They are told the same."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=8192,
        # All that makes the engine use the pool; --kv-transfer-config of a server says the same.
        kv_transfer_config={
            "kv_connector": "KvpoolConnector",
            "kv_connector_module_path": "kvpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": address},
        },
    )
    one_token = SamplingParams(temperature=0, max_tokens=1)
    text = SamplingParams(temperature=0, max_tokens=TEXT_TOKENS)
    llm.generate(["Wake up."], one_token, use_tqdm=False)  # what is done once
    rows = []
    for prompt in prompts():
        started = time.perf_counter()
        (first,) = llm.generate([prompt], one_token, use_tqdm=False)
        ttft_ms = 1e3 * (time.perf_counter() - started)
        (whole,) = llm.generate([prompt], text, use_tqdm=False)
        rows.append(
            {
                "tokens": len(first.prompt_token_ids),
                "cached": first.num_cached_tokens,
                "ttft_ms": ttft_ms,
                "text": whole.outputs[0].text,
            }
        )
    Path(results).write_text(json.dumps(rows), encoding="utf-8")


def prompts() -> list[str]:
    """Documents of three lengths, none the beginning of another, each with the same question."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return [
        f"Document {number}.\n\n{page[:characters]}\n\nIn one sentence, this document is about"
        for number, characters in enumerate(PROMPT_CHARACTERS, 1)
    ]


def run_engine(python: Path, address: str, model: Path, folder: str) -> list[dict[str, Any]]:
    """A fresh process, so that nothing but the daemon can know what the last one computed."""
    results, log = Path(folder) / "results.json", Path(folder) / "log"
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process is enough, and starts sooner
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; on a GPU vLLM decides itself
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python), __file__, "engine", address, str(model), str(results)]
    with log.open("wb") as said:
        done = subprocess.run(command, env=environment, stdout=said, stderr=said)
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        sys.exit("\n".join(["an engine failed; the end of what it said:", *lines[-20:]]))
    rows: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
    return rows


@contextlib.contextmanager
def daemon(folder: str) -> Iterator[str]:
    """The address of a daemon that ends with the `with`."""
    socket = f"{folder}/node.sock"
    command = [sys.executable, "-m", "kvpool", "serve", "--dram", "1GiB", "--socket", socket]
    with subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE) as serve:
        try:
            assert serve.stdout is not None
            assert serve.stdout.readline(), "the daemon did not become ready"
            yield f"unix:{socket}"
        finally:
            serve.terminate()


def show(computed: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> bool:
    """Prints the table; whether all texts are the same and all of B's prompts came from A."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="time to the first token")
    for column in ("prompt, tokens", "A computes, ms", "from the pool", "B loads, ms", "times"):
        table.add_column(column, justify="right")
    table.add_column("the same text")
    holds = True
    for a, b in zip(computed, loaded, strict=True):
        is_same = a["text"] == b["text"]
        holds &= is_same and b["cached"] > 0
        times = a["ttft_ms"] / b["ttft_ms"]
        numbers = (a["tokens"], a["ttft_ms"], b["cached"], b["ttft_ms"])
        table.add_row(
            *(f"{number:,.0f}" for number in numbers),
            f"{times:.1f}",
            "[green]yes[/]" if is_same else "[bold red]no[/]",
        )
    console = Console()
    console.print(table)
    console.print(f"both wrote: [italic]{loaded[-1]['text'].strip()}[/] ...", highlight=False)
    return holds


def main() -> None:
    from kvpool.bench.rows import BenchError
    from kvpool.bench.vllm_model import model_at
    from kvpool.bench.vllm_plan import check_python, engine_python

    parser = argparse.ArgumentParser(description="Two vLLM engines share KV through a daemon.")
    parser.add_argument("--python", type=Path, help="one with vLLM and kvpool")
    parser.add_argument("--model", type=Path, help="a model's folder")
    asked = parser.parse_args()
    try:
        python = engine_python(asked.python)
        print(check_python(python, needs_kvpool=True))
        model = model_at(asked.model, python, print).folder
    except BenchError as error:
        sys.exit(f"This example runs vLLM: {error}")
    with tempfile.TemporaryDirectory() as folder, daemon(folder) as address:
        print("engine A starts, computes and saves ...")
        computed = run_engine(python, address, model, folder)
        print("engine B starts, and finds what A saved ...")
        loaded = run_engine(python, address, model, folder)
    sys.exit(0 if show(computed, loaded) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine(*sys.argv[2:])
    else:
        main()
