"""vLLM's own OpenAI server as a process, on a unix socket: no port that another test may take."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.engines.rig import ANSWER_S, START_S, Child, Metrics, Model, Prompt, environment
from tests.served import wait_for


class Server:
    """Starts at once; the first request waits until it is ready. One thread at a time each."""

    SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
    LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')

    def __init__(
        self,
        model: Model,
        folder: Path,
        name: str,
        *,
        connector: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """It starts at once; the first request waits until it is ready. options: more flags."""
        self.model = model
        folder.mkdir(parents=True, exist_ok=True)
        self._path = str(folder / f"{name}.sock")
        given = {
            **model.arguments(),
            "served_model_name": "model",
            "uds": self._path,
            "distributed_executor_backend": "uni",
            "num_gpu_blocks_override": 512,
            **({} if connector is None else {"kv_transfer_config": json.dumps(connector)}),
            **options,
        }
        # As a module: the command of the package for CPUs looks for a package of another name.
        command = ["-m", "vllm.entrypoints.openai.api_server", *_flags(given)]
        own = {"VLLM_SERVER_DEV_MODE": "1"}  # for reset_prefix_cache
        log = (folder / f"{name}.log").open("ab")
        with log:
            self.child = Child(command, folder, name, stdout=log, env={**environment(), **own})
        self._is_ready = False

    def complete(self, prompt: Prompt, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """Greedy: the answer to POST /v1/completions."""
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        return dict(json.loads(self.request("POST", "/v1/completions", body)))

    def reset_prefix_cache(self) -> None:
        self.request("POST", "/reset_prefix_cache")

    def metrics(self) -> Metrics:
        text = self.request("GET", "/metrics")
        return Metrics.of(
            [
                (name, dict(self.LABEL.findall(labels)), float(value))
                for name, labels, value in self.SAMPLE.findall(text)
            ]
        )

    def request(self, method: str, path: str, body: Any = None) -> str:
        self.wait_ready()
        status, text = self._request(method, path, body, ANSWER_S)
        if status != 200:
            raise self.child.failure(f"answers {method} {path} with {status}: {text}")
        return text

    def wait_ready(self) -> "Server":
        if not self._is_ready:
            wait_for(self._is_healthy, START_S, f"{self._path} answers")
            self._is_ready = True
        return self

    def close(self) -> None:
        self.child.close()

    def _is_healthy(self) -> bool:
        if not self.child.is_running:
            raise self.child.failure("has ended")
        with contextlib.suppress(OSError):
            return self._request("GET", "/health", None, ANSWER_S)[0] == 200
        return False

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, str]:
        connection = _UnixConnection(self._path, timeout_s)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif value is not False:
            yield from (flag, str(value))
