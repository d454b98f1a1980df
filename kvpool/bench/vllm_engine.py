"""One vLLM engine of `kvpool bench vllm`, told by lines on its stdin. Runs in the engine's Python.

    PYTHON -P vllm_engine.py '{"llm": {...}, "hides_numba": false}'     llm: arguments of vllm.LLM

It says `{"ready": true}` and then answers each line, a JSON object, with another:

    {"prompts": [[1, 2], ...], "output_tokens": 1}     one continuous batch, greedy
        -> {"seconds", "outputs": [[7], ...], "local", "external"}

The engine forgets its own prefix cache first, unless the order says `"keeps": true`. `local` and
`external` are the prompt tokens that this cache and a connector served, by the engine's counters.
Nothing of kvpool is imported here, so that an engine without a connector is one without kvpool.
What libraries print goes to stderr. One thread, one order at a time; the end of stdin ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

FORGET_S_MAX = 30.0  # a connector may hold blocks until what it stores of them is stored
STEP_S = 0.001
COUNTERS = {"local": "vllm:prefix_cache_hits", "external": "vllm:external_prefix_cache_hits"}


class Engine:
    """An engine in this process, so that what is timed has no queue between processes in it."""

    def __init__(self, llm: dict[str, Any], *, hides_numba: bool) -> None:
        if hides_numba:
            _let_numba_be()
        vllm: Any = importlib.import_module("vllm")
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(**llm)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if not order.get("keeps"):
            self._forget()
        before = self._served()
        seconds, outputs = self._generate(order["prompts"], order["output_tokens"])
        served = {name: count - before[name] for name, count in self._served().items()}
        return {"seconds": seconds, "outputs": outputs, **served}

    def _generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        params = self._params(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        done = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        outputs = [list(each.outputs[0].token_ids) for each in done]
        if any(len(output) != tokens for output in outputs):
            reasons = {each.outputs[0].finish_reason for each in done}
            raise RuntimeError(f"an output is not of {tokens} tokens; the engine says {reasons}")
        return seconds, outputs

    def _forget(self) -> None:
        """Blocks that are held yet make the engine refuse; it frees them in steps without work."""
        deadline = time.monotonic() + FORGET_S_MAX
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError("the engine does not forget its prefix cache: blocks are held")
            self._llm.llm_engine.step()
            time.sleep(STEP_S)

    def _served(self) -> dict[str, int]:
        """Sums over all label sets of the counters, as they are now."""
        found = dict.fromkeys(COUNTERS, 0)
        for metric in self._llm.get_metrics():
            for name, counter in COUNTERS.items():
                if metric.name == counter:
                    found[name] += int(metric.value)
        return found


def _let_numba_be() -> None:
    """vLLM on a CPU looks for its kernels in every loaded module, and trips over numba's.

    Nothing is to be found there: a connector that loads numba starts when the search is left out.
    """
    dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    dispatcher._rebind_kernels = lambda *_args, **_kept: None


def _only_answers_on_stdout() -> TextIO:
    """The real stdout; whoever prints from here on, C++ included, prints to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    return answers


def main() -> None:
    answers = _only_answers_on_stdout()

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    setup = json.loads(sys.argv[1])
    engine = Engine(setup["llm"], hides_numba=setup["hides_numba"])
    answer({"ready": True})
    for line in sys.stdin:
        answer(engine.obey(json.loads(line)))


if __name__ == "__main__":
    main()
