"""One vLLM engine in this process, told what to do by lines of JSON: engine.py ARGUMENTS

ARGUMENTS: keyword arguments of vllm.LLM, as JSON. A request is {"op": name, ...}; its answer is one
line, {"ok": ...} or {"error": text}. Beside answers there are events: {"held": place} says that a
thread came to a place that `hold` named, and waits there for {"op": "go"}.

Thread rule: the engine belongs to the main thread. Another one reads the requests, so that whoever
is held, in whatever thread, can be let go while the engine works.
"""

import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

# What vLLM and its libraries print goes to stderr: answers have the pipe for themselves.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

GO_S = 120.0  # the longest that a thread is held, if nobody lets it go

writing = threading.Lock()  # guards ANSWERS
going = queue.SimpleQueue[str]()


def say(message: dict[str, Any]) -> None:
    with writing:
        ANSWERS.write(json.dumps(message) + "\n")


class Engine:
    """The operations, by their names."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(**arguments)

    def generate(
        self,
        prompts: list[Any],
        max_tokens: int,
        salts: list[str] | None = None,
        kv_transfer_params: list[Any] | None = None,
    ) -> list[dict[str, Any]]:
        """All prompts at once; greedy, and never ended by a token. A prompt: text, or tokens."""
        texts = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
        for text, salt in zip(texts, salts or [], strict=bool(salts)):
            text["cache_salt"] = salt
        extra = kv_transfer_params or [None] * len(texts)
        sampling = [
            self._vllm.SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=2,
                extra_args=None if each is None else {"kv_transfer_params": each},
            )
            for each in extra
        ]
        outputs = self._llm.generate(texts, sampling, use_tqdm=False)
        return [
            {
                "prompt_tokens": len(each.prompt_token_ids),
                "tokens": list(each.outputs[0].token_ids),
                "gaps": [gap_of(found) for found in each.outputs[0].logprobs or []],
                "finish": each.outputs[0].finish_reason,
                "kv_transfer_params": each.kv_transfer_params,
            }
            for each in outputs
        ]

    def reset_prefix_cache(self) -> bool:
        """Of the engine alone: what a connector has stays."""
        return bool(self._llm.reset_prefix_cache())

    def wait_saved(self, timeout_s: float) -> None:
        """Until what was computed so far is stored, or dropped: saves go on behind the answers."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        buffer = get_kv_transfer_group()._worker._buffer
        wait_for(lambda: buffer.free == buffer.slots, timeout_s, "all blocks are saved")

    def wait_connected(self, timeout_s: float) -> None:
        """Until both halves of the connector have a node, which may be another than before."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        for half in (scheduler._scheduler, get_kv_transfer_group()._worker):
            wait_for(lambda half=half: is_connected(half), timeout_s, "the engine has a node")

    def metrics(self) -> list[list[Any]]:
        """[name, labels, value] of every sample that vLLM has."""
        from prometheus_client import REGISTRY

        return [
            [sample.name, sample.labels, sample.value]
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith("vllm:")
        ]

    def hold(self, place: str, after: bool = False, skip: int = 0) -> None:
        """The next call of a function waits before (after) it, once, `skip` calls left out.

        place: "module:Class.method". Calls on objects that were bound before are not seen.
        """
        owner, name, function = found(place)
        passes = iter([False] * skip + [True])

        def wait() -> None:
            if next(passes, False):
                setattr(owner, name, function)
                say({"held": place})
                going.get(timeout=GO_S)

        def held(*arguments: Any, **options: Any) -> Any:
            if not after:
                wait()
            result = function(*arguments, **options)
            if after:
                wait()
            return result

        setattr(owner, name, held)


def wait_for(true: Callable[[], bool], timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.001)


def is_connected(half: Any) -> bool:
    pool = half._attachment.pool
    return pool is not None and bool(pool.stats()["client"]["connected"])


def gap_of(candidates: dict[int, Any]) -> float:
    best, second, *_ = sorted((each.logprob for each in candidates.values()), reverse=True)
    return float(best - second)


def found(place: str) -> tuple[Any, str, Callable[..., Any]]:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    return owner, name, getattr(owner, name)


def read_requests(requests: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "go":
            going.put("go")
        else:
            requests.put(request)
    requests.put(None)


def main() -> None:
    requests = queue.SimpleQueue[dict[str, Any] | None]()
    threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
    try:
        engine = Engine(json.loads(sys.argv[1]))
    except BaseException:
        say({"error": traceback.format_exc()})
        raise
    say({"ok": "ready"})
    while (request := requests.get()) is not None:
        operation = getattr(engine, request.pop("op"))
        try:
            say({"ok": operation(**request)})
        except Exception:
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
