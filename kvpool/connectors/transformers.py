"""A prefix cache for Hugging Face models, without a serving engine.

    model = AutoModelForCausalLM.from_pretrained(...)
    model = with_prefix_cache(model, kvpool.connect())
    model.generate(**inputs)

Promises:  1. generate() gives what it gave without the pool: the blocks it takes up are those of
              the same tokens before, by the same weights, shapes, dtype and attention;
           2. a failure of the pool is a miss and a counter, never an error of generate();
           3. the model itself is not touched: `cached.model` is the plain one at any time.
Thread rule: generate() may be called by as many threads as the model allows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from kvpool.config import check_count, check_type
from kvpool.connectors.transformers_calls import Prompt, prompt_of
from kvpool.connectors.transformers_model import (
    Shape,
    Weights,
    empty_cache,
    manifest_of,
    observe,
    require_prefix_cache,
)
from kvpool.connectors.transformers_pages import load_prefix, save_blocks
from kvpool.errors import BadArgument, Unreachable
from kvpool.namespace import Namespace
from kvpool.pool import Pool

BLOCK_TOKENS = 16
BLOCK_TOKENS_MAX = 4096
RETRY_S = 5.0  # until a namespace that could not be had is asked for again
CLOSED = Prompt(None, "closed")

_log = logging.getLogger("kvpool.transformers")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What became of the calls of generate() so far. `calls` = served + sum(passed.values())."""

    calls: int = 0
    served: int = 0  # looked up in the pool, whatever was found
    hits: int = 0  # took up at least one block
    prompt_tokens: int = 0  # of served calls
    loaded_tokens: int = 0  # of those, that were not computed
    stored_blocks: int = 0
    passed: dict[str, int] = field(default_factory=dict)  # left alone, by reason
    failed: dict[str, int] = field(default_factory=dict)  # of the pool, by what it raised or said


def with_prefix_cache(
    model: Any,
    pool: Pool,
    *,
    block_tokens: int = BLOCK_TOKENS,
    salt: str = "",
    name: str = "",
    weights: str = "",
) -> CachedModel:
    """A model whose generate() takes up prompts at the longest prefix that the pool has.

    model: a decoder-only transformers model of text, in eval mode, whose layers all keep K and V
    of every token. Others are refused: sliding windows, states, encoders, images, ropes that move.
    pool: kvpool.open() or kvpool.connect(); it stays the caller's. block_tokens: tokens per block.
    salt: separates users who must not share. name: of the namespace; a model of that name with
    another manifest is told. weights: your own word for which weights these are, instead of a
    digest of them; then nobody looks whether they change.

    Served are calls with one prompt of tokens, no padding, no cache of their own, greedy or
    sampling; whole blocks of at most all tokens but one are loaded before, and new ones of the
    prompt and the output stored after. All other calls go through untouched (CacheStats.passed).
    Raises BadArgument, BadType; ManifestMismatch (the name). Cost: three forward passes of a few
    tokens and one pass over the weights (memory speed); each call then looks at samples of them.
    """
    check_type("pool", pool, Pool)
    check_count("block_tokens", block_tokens, 1, BLOCK_TOKENS_MAX)
    for argument, value in (("salt", salt), ("name", name), ("weights", weights)):
        check_type(argument, value, str)
    return CachedModel(model, _Spaces(model, pool, block_tokens, salt, name, weights))


class CachedModel:
    """What with_prefix_cache() gives: the model, with another generate(). A context manager.

    Everything else is the model's. Outside of `with`, or after close(), generate() is too.
    """

    _OWN = frozenset({"model", "_spaces", "_lock", "_counts", "_reasons", "_failures", "_is_open"})

    def __init__(self, model: Any, spaces: _Spaces) -> None:
        """For with_prefix_cache()."""
        self.model = model
        self._spaces = spaces
        self._lock = threading.Lock()  # guards the three counters below
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._is_open = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.model, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave all later calls to the model alone. The pool stays open."""
        self._is_open = False

    def refresh(self) -> None:
        """Look at the model anew at the next call: for a change that nothing else shows.

        That is one of few elements written through `.data`, or by another library in place.
        """
        self._spaces.forget()

    @property
    def stats(self) -> CacheStats:
        """Counters since the beginning."""
        with self._lock:
            return CacheStats(
                **self._counts, passed=dict(self._reasons), failed=dict(self._failures)
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's generate(); see with_prefix_cache() for which calls use the pool.

        Raises what that raises. Cost beside it: a lookup and a copy of the blocks that are loaded
        before, and a copy of the new ones after.
        """
        prompt, reason = prompt_of(self.model, args, kwargs) if self._is_open else CLOSED
        known = None if reason else self._known()
        with self._lock:
            self._counts["calls"] += 1
            if known is None:
                self._reasons[reason or "no_namespace"] += 1
        if known is None:
            return self.model.generate(*args, **kwargs)
        space, shape = known
        cache, loaded = self._load(space, shape, prompt)
        answer = self.model.generate(*args, **{**kwargs, "past_key_values": cache})
        self._store(space, prompt, loaded, cache, answer)
        return answer

    def _known(self) -> tuple[Namespace, Shape] | None:
        try:
            return self._spaces.current()
        except Exception as error:
            self._failed(error)
            return None

    def _load(self, space: Namespace, shape: Shape, prompt: Any) -> tuple[Any, int]:
        count = len(prompt)
        loaded = 0
        try:
            # The last token is computed in any case: its logits are the first that are wanted.
            keys = space.keys(prompt[: count - 1].cpu().numpy())
            cache, loaded = load_prefix(space, keys, self.model, shape)
        except Exception as error:
            self._failed(error)
            cache = empty_cache(self.model)
        with self._lock:
            self._counts["served"] += 1
            self._counts["hits"] += loaded > 0
            self._counts["prompt_tokens"] += count
            self._counts["loaded_tokens"] += loaded * space.manifest.block_tokens
        return cache, loaded

    def _store(self, space: Namespace, prompt: Any, loaded: int, cache: Any, answer: Any) -> None:
        try:
            sequence = getattr(answer, "sequences", answer)[0]
            known = cache.get_seq_length()  # the last token that came out was never put in
            if known > len(sequence) or not bool((sequence[: len(prompt)] == prompt).all()):
                raise BadArgument("the answer does not begin with the prompt")
            keys = space.keys(sequence[:known].cpu().numpy())
            if len(keys) <= loaded:
                return
            result = save_blocks(space, keys, loaded, cache)
        except Exception as error:
            self._failed(error)
            return
        with self._lock:
            self._counts["stored_blocks"] += result.stored
            if result.no_room:
                self._failures[result.reason.name] += 1

    def _failed(self, error: Exception) -> None:
        kind = type(error).__name__
        with self._lock:
            is_first = not self._failures[kind]
            self._failures[kind] += 1
        if is_first:
            _log.warning("the prefix cache does without the pool: %s: %s", kind, error)


class _Spaces:
    """The namespace of a model as it is now; another one after its weights have changed."""

    def __init__(
        self, model: Any, pool: Pool, block_tokens: int, salt: str, name: str, weights: str
    ) -> None:
        self._model, self._pool, self._block_tokens = model, pool, block_tokens
        self._salt, self._name, self._word = salt, name, weights
        self._lock = threading.Lock()  # guards what follows
        self._known: tuple[Namespace, Shape] | None = None
        self._weights: Weights | None = None
        self._attention = ""
        self._retry_at = 0.0
        self._look()

    def forget(self) -> None:
        with self._lock:
            self._known = None
            self._retry_at = 0.0

    def current(self) -> tuple[Namespace, Shape] | None:
        """None while the node cannot be asked. Raises what with_prefix_cache() raises."""
        with self._lock:
            if self._known is None or not self._is_same():
                self._known = None
                if time.monotonic() >= self._retry_at:
                    self._look()
            return self._known

    def _is_same(self) -> bool:
        if self._model.config._attn_implementation != self._attention:
            return False
        return self._weights is None or self._weights.is_current(self._model)

    def _look(self) -> None:
        """Describe the model, and ask for its namespace. A node that is away is asked later."""
        self._retry_at = time.monotonic() + RETRY_S
        require_prefix_cache(self._model)
        # Before the digest: what changes meanwhile is found to have changed at the next call.
        self._weights = None if self._word else Weights(self._model)
        self._attention = self._model.config._attn_implementation
        shape = observe(self._model)
        manifest = manifest_of(
            self._model,
            shape,
            self._block_tokens,
            salt=self._salt,
            name=self._name,
            weights=self._word,
        )
        try:
            self._known = self._pool.namespace(manifest), shape
            self._retry_at = 0.0
        except Unreachable as error:
            _log.warning("no namespace for the prefix cache yet: %s", error)
