"""The scheduler's half of the connector: it alone decides what is loaded and what is saved.

A request that is new, or was preempted, is looked up: what all ranks have of its prompt beyond the
engine's own cache is leased and offered, to be loaded between steps. Blocks that a step completes
are named in that step's message, to be saved when it has run.

Promises:  1. nothing here waits for the pool: what needs a request, a disk or another host runs on
              a thread of ours while the engine is told to ask again, and is given up at a deadline;
           2. a lease lives from its lookup until the load is over, and no longer than the request,
              its preemption or the deadline;
           3. a prefix whose load failed is computed: the request is not offered it again;
           4. without a node every prompt is a miss at once.
Thread rule: the engine's scheduler thread, but for what is given to the executor.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from kvpool.connectors.attach import Attachment
from kvpool.connectors.options import Options
from kvpool.connectors.vllm_counts import Counts
from kvpool.connectors.vllm_events import StoredEvents
from kvpool.connectors.vllm_lookup import Lookup, Offer, Ranks
from kvpool.connectors.vllm_messages import Load, Part, Report, Save, Step
from kvpool.connectors.vllm_pace import Pace
from kvpool.connectors.vllm_ranks import RankSpaces, private_salt
from kvpool.connectors.vllm_requests import (
    BLOCKS_PARAM,
    NAMESPACE_PARAM,
    EngineShape,
    Followed,
    Query,
    unit_of,
)
from kvpool.types import Miss, Tier

NULL_PAGE = 0  # vLLM's block for tokens that no layer of a group sees any more
_CHUNK_TOKENS_MIN = 16  # of one request in one step: fewer are decode, or drafts
_THREADS = 8
_WAITERS = 32
_INLINE_KEYS = 4096  # of all ranks and groups, that are looked up at once: some 3 ms
_INLINE_PINS = 256  # of a client, without a request to its node (csrc/node/client_page.h)
_OFFER_S = 30.0  # that an engine without free pages may take to accept an offer
_IDLE_WAIT_S = 0.01  # of a lookup; one that ends wakes it
_NOTHING = (0, False)

log = logging.getLogger("vllm.kvpool")


class SchedulerHalf:
    """See the head of this file. All hooks are called by vLLM's scheduler."""

    def __init__(
        self,
        engine: EngineShape,
        options: Options,
        attachment: Attachment,
        *,
        saves: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """saves: "all", "prompt" or "none", as the role of this engine has it."""
        self._options = options
        self._attachment = attachment
        self._saves = saves
        self._clock = clock
        self._shapes = engine.groups
        self._lookup = Lookup(self._shapes, unit_of(self._shapes))
        self._has_eagle = engine.has_eagle
        self._ranks = RankSpaces(attachment)
        self._executor = ThreadPoolExecutor(_THREADS, "kvpool-lookup")
        # Of their own: they last for seconds where a prefill engine died.
        self._waiters = ThreadPoolExecutor(_WAITERS, "kvpool-wait")
        self._may_sleep = engine.may_sleep
        self._engine = engine.name
        self._requests: dict[str, Followed] = {}
        self._leaving: dict[str, Followed] = {}  # finished while a load was under way
        self._loads: list[Load] = []
        # Under way: when scheduled, tokens of prompts. Engines schedule a step or two ahead.
        self._steps: deque[tuple[float, int]] = deque(maxlen=8)
        self._stepped_at = 0.0
        self._generation = 0  # resets so far
        self.pace = Pace()
        self.counts = Counts()
        self.events = StoredEvents(engine.publishes_events)

    # --- the ranks -------------------------------------------------------------------------------

    def set_ranks(self, manifests: dict[Any, list[bytes]]) -> None:
        """What namespaces the workers have; opened now, so that the first request finds them."""
        self._ranks.set([manifests[rank] for rank in sorted(manifests)])
        opening = self._executor.submit(self._ranks.open, "")
        try:
            opening.result(timeout=self._options.connect_timeout_s)
        except TimeoutError:
            log.info("kvpool: the node has not opened the namespaces yet; going on without it")

    # --- lookup ----------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """A request arrived."""
        self._requests[request.request_id] = Followed(request)

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens beyond the `local` ones that can be loaded; None: ask again."""
        followed = self._requests.setdefault(request.request_id, Followed(request))
        if request.num_preemptions != followed.preemptions:
            followed.preemptions = request.num_preemptions
            followed.forget_lookup()
            followed.is_done = followed.is_old = False
        nobody_asked = followed.offer is None and followed.asked is None
        if nobody_asked and not self._begin(followed, local):
            return _NOTHING
        if followed.asked is not None and not self._collect(followed):
            return None, False
        return self._answer(followed, local)

    def _begin(self, followed: Followed, local: int) -> bool:
        """Look up now, or on a thread. False: there is nothing to be had."""
        request = followed.request
        if followed.is_done or request.skip_reading_prefix_cache:
            return False
        limit = min(self._most_tokens(request, local), self._hashed_tokens(request))
        if limit - local < self._lookup.unit * self._options.min_blocks:
            followed.saved = max(followed.saved, local // self._shapes[0].block_tokens)
            return False
        reason = self._reason_to_wait()
        if reason:
            followed.is_done = True
            self.counts.add("no_hit", reason=reason)
            return False
        self.counts.add("lookups")
        self.counts.add("lookup_blocks", (limit - local) // self._lookup.unit)
        awaited = self._awaited_tokens(request)
        query = Query(list(request.block_hashes), limit, local, awaited)
        ranks = self._ranks.opened("" if request.lora_request is None else followed.adapter)
        if ranks is None or awaited or not self._attachment.shares_memory:
            return self._begin_on_thread(followed, query)
        if self._has_many_keys(ranks, query):
            return self._begin_on_thread(followed, query)
        offer = self._prefix(ranks, query)
        if offer.tokens > local and not self._is_quick(offer):
            return self._begin_on_thread(followed, query)
        followed.adapter = followed.adapter or ""
        followed.offer = self._leased(ranks, query, offer)
        followed.offered_at = self._clock()
        return True

    def _reason_to_wait(self) -> str:
        """Why nothing can be looked up now; empty if it can."""
        if self._ranks.count == 0:
            return "no_ranks"
        if self._attachment.pool is None:
            return "no_node"
        return ""

    def _begin_on_thread(self, followed: Followed, query: Query) -> bool:
        executor = self._waiters if query.awaited else self._executor
        followed.asked = executor.submit(self._find, followed, query)
        wait_s = self._options.wait_s if query.awaited else 0.0
        followed.asked_until = self._clock() + self._options.load_timeout_s + wait_s
        return True

    def _most_tokens(self, request: Any, local: int) -> int:
        """The last token is computed in any case. vLLM goes back by one token where all were loaded
        between steps; a window may have lost what that token sees. And a last block alone, of a
        prompt that the engine has otherwise, is not worth a step of its own.
        """
        tokens = int(request.num_tokens)
        has_window = any(shape.window is not None for shape in self._shapes)
        return tokens - 1 if has_window or tokens - local <= self._lookup.unit else tokens

    def _hashed_tokens(self, request: Any) -> int:
        shape = self._shapes[0]
        hashes: int = len(request.block_hashes)
        return hashes // shape.hashes_per_block * shape.block_tokens

    def _awaited_tokens(self, request: Any) -> int:
        """Tokens of the prompt that another engine said it stores, where we would find them."""
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            return 0
        blocks = params.get(BLOCKS_PARAM)
        if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks <= 0:
            return 0
        if params.get(NAMESPACE_PARAM, self._ranks.name) != self._ranks.name:
            self.counts.add("no_hit", reason="other_namespace")  # another shard or another dtype
            return 0
        return min(blocks * self._lookup.unit, int(request.num_tokens))

    def _is_quick(self, offer: Offer) -> bool:
        """Whether it is pinned without asking: more than some, or what is on SSD or on another
        node, takes a while."""
        everyone = (*self._requests.values(), *self._leaving.values())
        held = sum(each.offer.pins for each in everyone if each.offer is not None)
        blocks = sum(
            offer.tokens // shape.block_tokens - shape.first_needed(offer.tokens)
            for shape in self._shapes
        )
        is_near = max(offer.tiers, default=Tier.DRAM) <= Tier.DRAM
        return is_near and held + blocks * self._ranks.count <= _INLINE_PINS

    def _find(self, followed: Followed, query: Query) -> Offer:
        """On a thread: what may take a request, a disk, or until another engine has stored it."""
        followed.adapter = self._ranks.adapter_of(followed.request.lora_request)
        ranks = None if followed.adapter is None else self._ranks.open(followed.adapter)
        if ranks is None:
            return Offer()
        if query.awaited:
            self._await(ranks, query.hashes, min(query.awaited, query.limit))
        return self._leased(ranks, query, self._prefix(ranks, query))

    def _prefix(self, ranks: Ranks, query: Query) -> Offer:
        """What is there, pinned or not; a block less for a draft model, with its own windows."""
        offer = self._lookup.find(ranks, query.hashes, query.limit)
        if self._has_eagle and offer.tokens:
            offer = self._lookup.find(ranks, query.hashes, offer.tokens - self._lookup.unit)
        return offer

    def _has_many_keys(self, ranks: Ranks, query: Query) -> bool:
        """Of a prompt whose first block is there; a miss of that one is always quick."""
        blocks = sum(query.limit // shape.block_tokens for shape in self._shapes)
        if blocks * len(ranks) <= _INLINE_KEYS:
            return False
        return self._lookup.find(ranks, query.hashes, self._lookup.unit).tokens > 0

    def _leased(self, ranks: Ranks, query: Query, offer: Offer) -> Offer:
        """Pinned, if it is of use; a pool elsewhere would fetch the bytes, to the wrong process."""
        if offer.tokens <= query.local or not self._attachment.shares_memory:
            return offer
        return self._lookup.lease(ranks, query.hashes, offer)

    def _await(self, ranks: Ranks, hashes: list[bytes], tokens: int) -> None:
        """Until the prefill engine has stored its blocks, wait_s at most."""
        until = self._clock() + self._options.wait_s
        for spaces in ranks:
            for shape, space in zip(self._shapes, spaces, strict=True):
                keys = space.fold(shape.hashes(hashes, tokens))[shape.first_needed(tokens) :]
                space.wait(keys, max(0.0, until - self._clock()))

    def _collect(self, followed: Followed) -> bool:
        """What the thread found. False: it is still at it, and has time."""
        asked = followed.asked
        assert asked is not None
        if not asked.done():
            if self._clock() < followed.asked_until:
                return False
            self.counts.add("no_hit", reason="late")
            followed.forget_lookup()
            followed.offer = Offer()
            return True
        followed.asked = None
        followed.offered_at = self._clock()
        try:
            followed.offer = asked.result()
        except Exception:  # whatever it was: the engine must not end for a lookup
            log.exception("kvpool: a lookup failed; the prompt is computed")
            self.counts.add("no_hit", reason="failed")
            followed.offer = Offer()
        return True

    def _answer(self, followed: Followed, local: int) -> tuple[int, bool]:
        offer = followed.offer
        assert offer is not None
        # What the pool lost is saved again, from the engine's own cache.
        followed.saved = offer.tokens // self._shapes[0].block_tokens
        fresh = max(0, offer.tokens - local)
        reason = self._reason_against(fresh, offer.miss)
        if reason:
            self.counts.add("no_hit", reason=reason)
            followed.drop_offer()
            followed.is_done = True
            return _NOTHING
        followed.local = local
        return fresh, True

    def _reason_against(self, fresh: int, miss: Miss) -> str:
        if fresh == 0:
            return "not_present" if miss in (Miss.NONE, Miss.ABSENT) else miss.name.lower()
        if fresh < self._options.min_blocks * self._lookup.unit:
            return "too_few"
        if self._options.recompute_estimate and not self.pace.is_worth(
            fresh, fresh * self._ranks.bytes_per_token(self._shapes)
        ):
            return "not_worth"
        return ""

    # --- load ------------------------------------------------------------------------------------

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The engine has pages for a request; `external` tokens of it are to be loaded."""
        followed = self._requests.get(request.request_id)
        if followed is None or followed.offer is None:
            return
        if external == 0:
            followed.drop_offer()
            followed.is_done = True
            return
        parts = self._parts(followed, blocks.get_block_ids(), external)
        followed.loading = {page for part in parts for page in part.pages}
        followed.is_done = True
        self.counts.add("hit_blocks", sum(len(part.pages) for part in parts))
        self._loads.append(
            Load(request.request_id, followed.adapter or "", parts, self._generation)
        )

    def lost(self, request: Any, blocks: Any) -> None:
        """After a fault of ours in allocated(): the engine waits for a load, so there is one.

        It has no hashes, which fails it: the engine computes all of the prompt.
        """
        pages = [page for page in blocks.get_block_ids()[0] if page != NULL_PAGE]
        self._loads.append(Load(request.request_id, "", [Part(0, pages, [])]))

    def _parts(
        self, followed: Followed, pages: Sequence[Sequence[int]], external: int
    ) -> list[Part]:
        """Every page that will count as computed: a window's pages too that no token sees.

        The engine takes all of them into its own cache, so that one left unwritten would be taken
        for its prefix later.
        """
        parts = []
        for at, (shape, ids) in enumerate(zip(self._shapes, pages, strict=True)):
            first = followed.local // shape.block_tokens
            last = (followed.local + external) // shape.block_tokens
            hashes = shape.hashes(followed.request.block_hashes, last * shape.block_tokens)
            wanted = [i for i in range(first, last) if ids[i] != NULL_PAGE]
            parts.append(Part(at, [ids[i] for i in wanted], [hashes[i] for i in wanted]))
        return parts

    def sources(self, request: Any, external: int) -> dict[Tier, int]:
        """Tokens of a load by the tier that they come from."""
        followed = self._requests.get(request.request_id)
        if followed is None or followed.offer is None:
            return {}
        counts = followed.offer.tokens_by_tier(followed.local, self._shapes[0].block_tokens)
        return counts if sum(counts.values()) == external else {}

    # --- steps -----------------------------------------------------------------------------------

    def next_step(self, output: Any) -> Step:
        """What the workers do in and after this step."""
        self._expire()
        is_idle = self._may_sleep and not output.total_num_scheduled_tokens
        step = Step(self._loads, [], is_idle, self._generation)
        self._loads = []
        if step.is_idle and not step.loads:
            self._sleep_until_found()
        if self._saves != "none" and self._attachment.pool is not None and self._ranks.count:
            for request_id in output.num_scheduled_tokens:
                try:
                    save = self._save_of(request_id, output)
                except Exception:  # a fault of ours must not take the step's loads along
                    log.exception("kvpool: a fault of kvpool itself; blocks are not stored")
                    self.counts.add("unsaved_blocks", reason="failed")
                    continue
                if save is not None:
                    step.saves.append(save)
        scheduled = output.num_scheduled_tokens.values()
        if output.total_num_scheduled_tokens:  # others may have no answer
            prefill = sum(tokens for tokens in scheduled if tokens >= _CHUNK_TOKENS_MIN)
            self._steps.append((self._clock(), prefill))
        return step

    def _sleep_until_found(self) -> None:
        """An engine that could only ask again leaves the interpreter to the threads that look."""
        asked = [each.asked for each in self._requests.values() if each.asked is not None]
        if asked:
            wait(asked, timeout=_IDLE_WAIT_S, return_when=FIRST_COMPLETED)

    def _save_of(self, request_id: str, output: Any) -> Save | None:
        followed = self._requests.get(request_id)
        if followed is None or followed.is_old:
            return None
        request = followed.request
        if request.lora_request is not None and followed.adapter is None:
            return None  # it was never looked up: nobody knows what its KV depends on
        shape = self._shapes[0]
        tokens = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
        if self._saves == "prompt":
            tokens = min(tokens, request.num_prompt_tokens)
        tokens = min(tokens, self._hashed_tokens(request))
        tokens = tokens // self._lookup.unit * self._lookup.unit
        first = followed.saved * shape.block_tokens
        if tokens <= first:
            return None
        pages = output.kv_connector_block_state.get_block_ids(request_id)
        if pages is None:
            return None
        followed.saved = tokens // shape.block_tokens
        parts = [
            self._saved_part(at, request, pages[at], first, tokens) for at in range(len(pages))
        ]
        save = Save(0, followed.adapter or "", [part for part in parts if part.pages])
        self.events.expect(save, request, shape)
        return save

    def _saved_part(
        self, at: int, request: Any, ids: Sequence[int], first_token: int, tokens: int
    ) -> Part:
        shape = self._shapes[at]
        hashes = shape.hashes(request.block_hashes, tokens)
        first = first_token // shape.block_tokens
        kept = [i for i in range(first, min(len(hashes), len(ids))) if ids[i] != NULL_PAGE]
        # What is left of a window begins later; blocks before it were saved when they were full.
        parent = hashes[kept[0] - 1] if kept and kept[0] > 0 else None
        return Part(at, [ids[i] for i in kept], [hashes[i] for i in kept], parent)

    def stepped(self, output: Any) -> None:
        """The workers' answer to a step."""
        now = self._clock()
        if self._steps:
            at, tokens = self._steps.popleft()
            # Where steps are scheduled ahead, one begins when the one before it is over.
            self.pace.computed(tokens, now - max(at, self._stepped_at))
        self._stepped_at = now
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            self.pace.loaded(report.load_bytes, report.load_s)
            self.events.stored(report, self._ranks.count)
        for request_id in output.finished_recving or ():
            self._loaded(request_id, output)

    def _loaded(self, request_id: str, output: Any) -> None:
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None:
            leaving.drop_offer()
        followed = self._requests.get(request_id)
        if followed is None:
            return
        has_failed = request_id in (output.failed_recving or ()) or bool(
            followed.loading & (output.invalid_block_ids or set())
        )
        if has_failed:
            self.counts.add("no_hit", reason="load_failed")
            followed.saved = followed.local // self._shapes[0].block_tokens
        followed.loading = set()
        followed.drop_offer()

    def _expire(self) -> None:
        """Offers that the engine has no pages for are looked up again when it has."""
        now = self._clock()
        for followed in self._requests.values():
            if followed.loading:
                continue
            if followed.offer is not None and now - followed.offered_at > _OFFER_S:
                followed.drop_offer()
            # An engine that is full does not come back for an answer: what it has pinned goes.
            asked = followed.asked
            if asked is not None and asked.done() and now - followed.asked_until > _OFFER_S:
                followed.forget_lookup()

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request ended. Returns what a decode engine must know of its prefix."""
        followed = self._requests.pop(request.request_id, None)
        if followed is None:
            return None
        if followed.loading:
            self._leaving[request.request_id] = followed  # a worker still writes its pages
        else:
            followed.forget_lookup()
        shape = self._shapes[0]
        stored = min(followed.saved, request.num_prompt_tokens // shape.block_tokens)
        return {
            BLOCKS_PARAM: stored * shape.block_tokens // self._lookup.unit,
            NAMESPACE_PARAM: self._ranks.name,
        }

    def reset(self) -> None:
        """Go on in namespaces of this engine alone: its weights may have changed.

        Nothing of before is found any more, and nothing that is computed now is found by others.
        What others have is left: their weights are what they were. Requests that go on with KV of
        before are not stored. Saves under way go where they belong, to the namespaces of before.
        """
        if self._options.on_reset == "keep":
            return
        self._generation += 1
        self._ranks.set_private(private_salt(self._engine, self._generation))
        for followed in self._requests.values():
            followed.forget_lookup()
            followed.is_old = followed.request.num_computed_tokens > 0 or bool(followed.loading)
            followed.saved = 0

    def close(self) -> None:
        """Unpin everything and leave the node."""
        for followed in [*self._requests.values(), *self._leaving.values()]:
            followed.forget_lookup()
        for executor in (self._executor, self._waiters):
            executor.shutdown(wait=False, cancel_futures=True)
        self._attachment.close()
