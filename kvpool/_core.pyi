"""
The compiled core of kvpool. Its names may change; use `import kvpool`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray

def end_gil_sections() -> bool:
    """
    At exit: wait until no thread is inside a call without the GIL, 10 s at most.
    """

def prefix_hash(
    seed: object | None,
    tokens: object | None,
    block_tokens: int,
    extra: object | None,
    algorithm: str,
) -> bytes:
    """
    Chained keys of the whole blocks of `tokens`, 16 bytes each, packed.

    seed: 16 bytes, the namespace id or the last key of the chain that goes on. tokens: a
    contiguous 1-D buffer of int32, int64, uint32 or uint64 in 0..2^32-1. algorithm:
    'sha256' or 'xxh3'. Raises BadArgument with the first bad token. Releases the GIL when
    there is much to do; int32 and int64 are converted once, uint32 is read in place.
    """

def fold(seed: object | None, hashes: object | None, hash_bytes: int) -> bytes:
    """
    SHA-256(seed || hash)[:16] for each record of `hash_bytes` bytes in `hashes`, packed.

    Raises BadArgument for lengths that do not fit. Releases the GIL when there is much to
    do; no copy.
    """

def checksum(data: object | None) -> bytes:
    """
    XXH3-128 of a contiguous buffer as 16 bytes: the low half, then the high half, each
    little-endian. Releases the GIL from 256 KiB on; no copy.
    """

def policy_names() -> list[str]:
    """
    Names of the eviction policies; the last, 'belady', exists in Replay only.
    """

class Replay:
    """
    Replays block requests against policies, without payload.

    policies: (name, capacity in blocks) pairs; ghosts_factor: remembered blocks
    per block of capacity; tau_s: half-life of heat, 0 follows the workload.
    Raises ValueError for an unknown name or a value out of range.
    Not thread-safe: one caller at a time.
    """

    def __init__(
        self, policies: Sequence[tuple[str, int]], ghosts_factor: float = 16.0, tau_s: float = 0.0
    ) -> None: ...
    @overload
    def feed(
        self,
        times_s: Annotated[
            NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        lengths: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        ids: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None: ...
    @overload
    def feed(
        self,
        times_s: Annotated[
            NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        lengths: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        ids: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """
        Replays a batch of requests, in order, in every simulator.

        times_s: float64[n], seconds; a time before the one preceding it counts as that one.
        lengths: uint32[n], blocks of each request. ids: uint64 or int64[sum(lengths)], head to
        tail, requests one after the other. Raises ValueError when they disagree, TypeError for other
        dtypes, RuntimeError after finish(). Releases the GIL; keeps 4 bytes a block for Belady only.
        """

    def finish(self) -> None:
        """
        Ends the trace. Belady replays it now; the other policies are already done.

        Releases the GIL. Raises RuntimeError when called twice.
        """

    def results(self) -> list[dict[str, Any]]:
        """
        One dict for each (policy, capacity), in the order given.

        Keys: policy, capacity_blocks, requests, blocks, hit_blocks (leading resident blocks at
        arrival), evictions, ghosts_peak, tau_s (at the end), seconds (spent in this policy).
        Raises RuntimeError before finish().
        """

class ClusterReplay:
    """
    Replays block requests against simulated clusters, without payload.

    Not thread-safe: one caller at a time.
    """

    def __init__(self) -> None: ...
    def add(self, nodes: int, capacity_blocks: int, **options: Any) -> None:
        """
        One more cluster, of so many nodes and so many blocks in all; before the first feed().

        Options: policy, ghosts_factor, tau_s; route ('round-robin', 'random', 'prefix'),
        route_blocks, seed; keep ('warm', 'always', 'never'); pick ('load', 'first');
        replicate_above (heat; 0 never), replicas_max, spare_last. Raises ValueError for a
        value out of range, TypeError for an unknown option.
        """

    @overload
    def feed(
        self,
        times_s: Annotated[
            NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        lengths: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        ids: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None: ...
    @overload
    def feed(
        self,
        times_s: Annotated[
            NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        lengths: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        ids: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """
        Replays a batch of requests in every cluster; as Replay.feed(). Releases the GIL.
        """

    def finish(self) -> None:
        """Ends the trace. Releases the GIL."""

    def results(self) -> list[dict[str, Any]]:
        """
        One dict for each cluster, in the order added. Raises RuntimeError before finish().
        """

class Layers:
    """Paged KV tensors, planned once for save and load."""

    @staticmethod
    def make(
        layout: str,
        block_tokens: int,
        page_tokens: int,
        split_kv: bool,
        tensors: Sequence[tuple[int, int, int, Sequence[int], Sequence[int]]],
        dims: Sequence[str],
        keep: object,
        writable: bool,
    ) -> Layers: ...
    @property
    def layout(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def pages_per_block(self) -> int: ...
    @property
    def page_count(self) -> int: ...
    def gather(
        self,
        blocks: int,
        block_table: object | None,
        out: object | None,
        stride: object | None = None,
    ) -> None:
        """
        Copy `blocks` blocks out of the pages, in the order of bytes that save() stores.

        block_table: page numbers in token order, pages_per_block for each block. out: one
        writable buffer with block i at i * stride bytes (stride: block_bytes unless given), or
        a list of buffers of block_bytes each. Raises BadArgument; then nothing was written.
        Releases the GIL; cost: one copy.
        """

    def scatter(
        self,
        blocks: int,
        block_table: object | None,
        data: object | None,
        stride: object | None = None,
    ) -> None:
        """
        Copy `blocks` blocks into the pages: gather() backwards, with the same arguments.
        """

def release_blocks(blocks: list[Any]) -> None:
    """Release memoryviews, but those that something else was made from."""

class Pinned:
    """Pins of the blocks of one view; lives as long as a memoryview of them."""

class Reservation:
    """
    A slot to be filled in place (writable buffer), then committed.

    Aborted when it, and every buffer over it, is gone without commit.
    """

    def commit(self) -> int: ...
    @property
    def is_open(self) -> bool: ...

class Region:
    """Memory registered once; calls then carry offsets into it."""

    def __init__(self, memory: object | None) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def writable(self) -> bool: ...

class SsdScan:
    """
    A tier directory that no pool has open; see kvpool.ssd.

    Locks it until close(). Raises TierRefused when it is in use, damaged or no tier. Releases
    the GIL; about 1.5 s and 96 MB for 1,000,000 blocks.
    """

    def __init__(self, path: str) -> None: ...
    def facts(self) -> dict[str, Any]:
        """What the index says, and what was counted from it."""

    def ages(self, now_s: int) -> list[dict[str, Any]]:
        """Blocks, bytes and heat by seconds since the last use. O(blocks)."""

    def verify_some(self, blocks: int) -> tuple[int, int, int, bool]:
        """
        Reads and checks so many more blocks: (blocks done, bytes done, damaged, all done).

        Releases the GIL.
        """

    def damage(self) -> list[dict[str, Any]]:
        """What was found, the first 1,000 of it."""

    def close(self) -> None:
        """Gives the directory back. Again does nothing."""

class ManualClock:
    """Time that stands still until it is set: for replay and tests."""

    def __init__(self) -> None: ...
    def set(self, seconds: float) -> None:
        """
        Move the time forward; one before now() counts as now(). 0 to 1e12 s, else BadArgument.
        """

    def now(self) -> float: ...

class Node:
    """The pool of one process: tiers, index and policy. Thread-safe."""

    @staticmethod
    def open(
        dram: int,
        dram_max: int,
        max_blocks: int,
        policy: str,
        tau_s: float,
        prefault: str,
        evict_ahead: float,
        huge_pages: bool,
        salt: int,
        clock: ManualClock | None,
        sealed: bool = False,
        ssd: str = "",
        ssd_capacity: int = 0,
        durability: str = "async",
        ssd_admit: str = "second_use",
        ssd_free_floor: int = 0,
        ssd_io_threads: int = 8,
        ssd_direct: bool = True,
        ssd_timeout_s: float = 5.0,
    ) -> Node: ...
    def close(self, flush_timeout_s: object = 0.0) -> None: ...
    def flush(self, timeout_s: object) -> bool: ...
    def resize_ssd(self, capacity: int, timeout_s: object) -> int: ...
    def require_usable(self) -> None:
        """Raise PoolClosed or ForkedProcess where no call can be made."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def is_forked(self) -> bool: ...
    @property
    def base_address(self) -> int: ...
    def open_space(self, id: bytes, block_bytes: int) -> OpenedSpace: ...
    def drop(self, number: int) -> int:
        """
        Make every block of a namespace a miss, at once, and return how many there were.

        Their memory comes back in the background. With an SSD, returns once its index has
        been told; raises NoResource where that fails. Releases the GIL; O(1).
        """

    def temperature(self, number: int, key: object | None) -> float | None: ...
    def resize(self, dram: int | None, max_blocks: int | None, timeout_s: object | None) -> int: ...
    def trim(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def traffic(self) -> list[dict[str, Any]]:
        """
        What was asked of each namespace and what became of it, through all channels; by
        number. Blocks: lookup_blocks = lookup_dram + lookup_ssd + lookup_remote +
        lookup_missed + lookup_behind; get_blocks = loaded_dram + loaded_ssd + loaded_remote
        + sum(missed), by Miss, of gets and views; put_blocks = sum(put_status), by Reason
        (1: present). A drop leaves all as it is. Releases the GIL; about 1 us a namespace.
        """

    def settle(self, timeout_s: object | None) -> bool:
        """
        Wait until the node's thread has nothing left to do; False at the timeout.
        """

    def check(self) -> None:
        """Abort the process if the books do not add up. For tests; O(blocks)."""

    def fault_fail(self, point: str, times: int = 1, skip: int = 0) -> None: ...
    def fault_pause(self, point: str, at_most_s: float = 30.0) -> None: ...
    def fault_resume(self, point: str) -> None: ...
    def fault_clear(self) -> None: ...
    def fault_hits(self, point: str) -> int: ...
    def fault_waiting(self, point: str) -> int: ...
    def explain(self, number: int, keys: object | None) -> list[dict[str, Any]]:
        """
        One dict per key: where its block is, or why it is not.

        tiers: 1 = DRAM, 2 = SSD, 3 = both, 0 = nowhere; heat; temperature; idle_s (None where
        the policy keeps no times); pins; gone: None where nothing is known, or why, ago_s,
        heat, ssd (it had a copy there), status (of the put; of `refused` only); ghost_heat:
        what it would go on from. why: evicted, not_worth, evicted_ssd, removed, dropped, lost
        or refused. Changes nothing. Raises BadArgument for a number that is no namespace's.
        Releases the GIL; O(1) a key.
        """

    def tiers(self, number: int, keys: object | None) -> bytes:
        """
        One byte per key, as `tiers` of explain(), also of those behind a missing one. Neither
        counts nor heats. Releases the GIL.
        """

    def coldest_heat(self) -> float | None:
        """Of the block in DRAM that would leave next; None where nothing can."""

    def hottest(self, count: int) -> list[dict[str, Any]]:
        """
        The ends of prefixes in use, hottest first, one dict each.

        number (of the namespace), key (of the last block), depth (blocks up to and with it),
        heat, idle_s, tiers, children (resident blocks that go on from it). An end is a block
        whose hottest child has less than half its heat. count: 1..1000, else BadArgument.
        Releases the GIL; O(blocks), in pieces that hold nobody up for 1 ms.
        """

    def reuse(self) -> dict[str, Any]:
        """
        Sampled reuse distances: `all`, `spaces` by number, and the `bytes` they take.

        A curve has references (uses, faded with a half-life of an hour), sampled (of these,
        by blocks that are followed), samples (those blocks), rate (their share), seen_bytes (of
        all blocks, about: of larger sizes nothing is known), cold (first uses), bounds_bytes and
        counts: so many uses lie at distances up to that bound and above the one before; with
        cold they add up to references. Releases the GIL; O(bins).
        """

class Reuse:
    """
    Reuse distances in bytes of a stream of uses: the LRU hit rate at every size.

    samples: blocks followed at a time, a power of two; 44 bytes each. exact: follow all, with
    memory that grows with their number. half_life_s: of what is counted; 0 keeps it.
    reach_bytes: the largest size that will be asked for, 0 = any. Not thread-safe.
    """

    def __init__(
        self,
        *,
        samples: int = 16384,
        exact: bool = False,
        half_life_s: float = 0.0,
        reach_bytes: int = 0,
        salt: int = 0,
    ) -> None: ...
    @overload
    def add(
        self,
        ids: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        block_bytes: int,
        now: float = 0.0,
    ) -> None: ...
    @overload
    def add(
        self,
        ids: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        block_bytes: int,
        now: float = 0.0,
    ) -> None:
        """
        Uses of blocks, in order, all at the time `now` in seconds.

        ids: uint64[n] or int64[n], equal for uses of one block; block_bytes: size of each. Raises
        TypeError for other dtypes, BadArgument for a value out of range. Keeps the GIL: 3 ns a use
        that is not sampled, 0.3 us one that is.
        """

    def curve(self, now: float = 0.0) -> dict[str, Any]:
        """
        What has been counted, as of `now`; a dict as in Node.reuse(). O(bins).
        """

    @property
    def bytes(self) -> int:
        """Memory that this takes."""

class OpenedSpace:
    """A namespace, as a channel has opened it."""

class Space:
    """One namespace of a pool. Thread-safe."""

    def __init__(self, opened: OpenedSpace) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def count_present(self, keys: object | None) -> tuple[int, bytes, int]: ...
    def get_into(
        self,
        keys: object | None,
        out: object | None,
        stride: object | None = None,
        *,
        offsets: object | None = None,
        misses: object | None = None,
    ) -> int:
        """
        Copy the leading blocks that are present into `out` and return how many there were.

        keys: n keys in chain order, packed (n * 16 bytes) or a list. out: one writable buffer
        with block i at i * stride bytes (stride: block_bytes unless given), a list of n
        buffers of block_bytes each, or a Region with one byte offset per key.
        Delivered blocks hold exactly the bytes that were put. What lies at the places of the
        others is undefined. A missing block is not an error. Heats what it delivers.
        misses: a writable buffer of n bytes that receives a Miss per block.
        Raises BadArgument for wrong sizes, PoolClosed. Thread-safe, releases the GIL, takes
        no lock; cost: one copy.
        """

    def put_codes(
        self,
        keys: object | None,
        data: object | None,
        stride: object | None,
        offsets: object | None,
        parent: object | None,
        timeout_s: object | None,
    ) -> bytes: ...
    def save_codes(
        self,
        layers: Layers,
        block_table: object | None,
        keys: object | None,
        parent: object | None,
        timeout_s: object | None,
    ) -> bytes: ...
    def load_pages(
        self, layers: Layers, block_table: object | None, keys: object | None, misses: object | None
    ) -> int: ...
    def wait_present(self, keys: object | None, timeout_s: object | None) -> int: ...
    def view_blocks(self, keys: object | None) -> list[Any]: ...
    def reserve_slot(
        self, key: object | None, parent: object | None, timeout_s: object | None
    ) -> tuple[int, Any]: ...
    def remove(self, keys: object | None) -> int:
        """
        Take these keys out of the pool and return how many were there.

        Blocks that somebody views keep their bytes until released. Thread-safe, releases the
        GIL; O(n).
        """

class Server:
    """The connections of a node. Thread-safe; see net/server.h."""

    @staticmethod
    def create(
        node: Node,
        max_sources: int = 2048,
        lanes: int = 4,
        staging_bytes: int = 67108864,
        pin_bytes: int = 0,
        put_bytes_per_s: int = 0,
        get_bytes_per_s: int = 0,
    ) -> Server: ...
    def add_client(self) -> int: ...
    def drop_client(self, client: int) -> None:
        """Close all connections of a client."""

    def add_stream(
        self,
        client: int,
        descriptor: int,
        is_peer: bool = False,
        node: bytes = ...,
        incarnation: int = 0,
    ) -> None:
        """
        The socket is the server's from here on, also on failure. is_peer: another node, which
        has proved that it belongs to the cluster, is at its other end. node, incarnation: as
        whom; it may tell in no other name, and without one it may only ask.
        """

    def make_shm(self, client: int, descriptor: int) -> tuple[list[int], dict[str, int]]:
        """
        (descriptors to be sent and closed, what the client must know). The socket is the
        server's from here on, also on failure; start_shm() once the offer was sent.
        """

    def start_shm(self, client: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def clients(self) -> list[dict[str, Any]]:
        """
        What each client has done and holds. gets: copies out, views: in place; their blocks
        and bytes are those that were delivered. Releases the GIL; about 1 us a client.
        """

    def lease_ages(self) -> list[int]:
        """
        How many leases are younger than 1, 10, 60 and 600 s, and older. Releases the GIL.
        """

    def set_rates(self, put_bytes_per_s: int, get_bytes_per_s: int) -> None:
        """
        Payload that all connections together may put and get, from now on; 0: no limit. What
        is over it is refused as `limited`. Shared memory is read without a limit.
        """

    @property
    def sources(self) -> int: ...
    def sources_of(self, client: int) -> int:
        """Connections and lanes that a client has now."""

    def drain(self, timeout_s: object) -> bool:
        """
        Refuse new requests and wait for those under way; False: some were not done in time.
        """

    def close(self) -> None: ...

class Cluster:
    """
    A node's part in a cluster: its shard of the directory, its peers, what it
    tells them and fetches from them. Thread-safe; see cluster/cluster.h.
    """

    @staticmethod
    def open(
        node: Node,
        node_id: object,
        incarnation: object,
        *,
        directory_bytes: object = 67108864,
        streams_per_peer: object = 4,
        fetch_timeout_s: object = 1.0,
        locate_timeout_s: object = 0.25,
        max_replicas: object = 2,
        replica_bytes_per_s: object = 67108864,
    ) -> Cluster:
        """
        The node serves alone until set_members(). Raises BadArgument, BadType.
        """

    def serve(self, server: Server) -> None:
        """
        The server's streams of peers are answered from this shard, until close().
        """

    def set_members(self, members: list[tuple[bytes, int, int, bool]]) -> None:
        """
        The whole view, in any order, this node included if it is a member: (id, incarnation,
        weight, is_draining) of each. Releases the GIL; some 0.5 ms for each member.
        """

    def open_ucx(
        self,
        transports: str,
        devices: str,
        library: str,
        settings: Sequence[tuple[str, str]],
        is_unchecked: bool,
    ) -> str:
        """
        Members may read out of this node's memory, and it out of theirs, where both have
        opened this; docs/ucx.md. Before set_members(). Returns which library it is. Raises
        TierRefused where UCX is missing, BadArgument for an arena that is not sealed and for
        transports that check no remote key, unless is_unchecked. Releases the GIL.
        """

    @property
    def ucx_address(self) -> bytes:
        """
        What a member needs to read out of this node's memory; empty: it cannot.
        """

    def add_stream(
        self, id: object, incarnation: object, descriptor: int, ucx: bytes = ...
    ) -> None:
        """
        A connection to that member, which serves it as a peer's, and what it said of its
        memory. The socket is the cluster's from here on, also on failure. One more than is
        wanted is closed.
        """

    def note_failed(self, id: object, incarnation: object) -> None:
        """That member could not be reached: it is asked nothing for a while."""

    def wait_wanted(self, timeout_s: object) -> list[tuple[bytes, int]]:
        """
        Members that more connections are wanted to, and how many; [] at the end of the time,
        and at once when it is closed. Each wish is told once. Releases the GIL.
        """

    def locate(self, space_id: object, keys: object, timeout_s: object) -> list[list[bytes]]:
        """
        Ids of the members that say that they have it, for each key; what was not answered in
        time is empty. Hints: blocks may have left since. Releases the GIL.
        """

    def stats(self) -> dict[str, Any]: ...
    def peers(self) -> list[dict[str, Any]]:
        """What is known of every other member, and was got from it."""

    def drain(self, timeout_s: object) -> bool:
        """
        What is warm here and at no other member is fetched by others, hottest first; then
        leave(). stats() says how far it is. False: not all of it in time. Releases the GIL.
        """

    def leave(self, timeout_s: object) -> bool:
        """
        All members forget what this node has told, and it tells nothing any more. False:
        some were not reached in time. Releases the GIL.
        """

    def close(self, timeout_s: object) -> bool:
        """
        The node serves alone again. False: calls that were under way had not ended in time;
        what they use stays until they have. Releases the GIL.
        """

    @property
    def is_closed(self) -> bool: ...

class ChangeFeed:
    """
    What came to a node, what left it and what changed its tier, from here on.

    Rows of 56 bytes: uint8[16] id of the namespace, uint8[16] key, uint8[16] the key before it
    in its chain (zero: none is known), uint32 number of the namespace, uint8 tiers before and
    after (1 = DRAM, 2 = SSD, 0 = nowhere), two bytes of zero. Little-endian. Listens until it
    is gone. For one thread at a time.
    """

    @staticmethod
    def open(node: Node, changes_max: int) -> ChangeFeed:
        """
        changes_max: noted between two takes, 64..4194304; 96 bytes each. Raises
        BadArgument, NoResource if several listen already.
        """

    def take(self) -> tuple[bool, bytes]:
        """
        (whole, rows): what changed since the last take, in its order. Not whole: some is lost,
        as before the first take, and only a walk tells what is here. Releases the GIL.
        """

    def walk(self) -> ChangeWalk:
        """A walk over what is here, from its beginning."""

class ChangeWalk:
    """
    What a node has, in pieces. A block that is here throughout is in one of them, once.
    """

    def step(self) -> tuple[bool, bytes]:
        """
        (more, rows) of the next piece, as ChangeFeed.take(); `before` is 0. Releases the GIL;
        holds the node up for under 1 ms.
        """

class Remote:
    """How a node elsewhere is reached. Thread-safe."""

    @staticmethod
    def create(timeout_s: object, shm: bool = False) -> Remote: ...
    def attach(
        self,
        streams: Sequence[int],
        shm: tuple[int, Sequence[int], dict[str, Any]] | None,
        numbers: dict[bytes, int],
    ) -> None:
        """
        Take over connected sockets, and (socket, descriptors, info) of a shared memory offer;
        numbers: namespace id -> the node's number. All descriptors are the channel's from here
        on, also on failure. Ends what was attached before.
        """

    def add_stream(self, descriptor: int) -> None:
        """One more, in place of one that was lost."""

    def add_wait_connection(self, descriptor: int) -> None:
        """For one more wait() at a time."""

    @property
    def wait_connections(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    @property
    def live_streams(self) -> int: ...
    def wait_broken(self, timeout_s: object) -> bool:
        """Sleep until a connection is lost (True) or the time is over."""

    def add_space(self, id: bytes, block_bytes: int, number: int) -> OpenedSpace: ...
    def close(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def is_forked(self) -> bool: ...
    @property
    def is_broken(self) -> bool: ...

class Staged:
    """
    Writable memory for blocks that are to be put; one buffer over all of them.
    """

    @property
    def count(self) -> int: ...
    @property
    def stride(self) -> int: ...

def stage(space: Space, count: int) -> tuple[int, Any]: ...
def put_staged(
    space: Space,
    keys: object | None,
    staged: Staged,
    parent: object | None,
    timeout_s: object | None,
) -> bytes: ...
def copy_blocks(out: object | None, addresses: object | None, block_bytes: int) -> None:
    """
    For benches: copy blocks from `addresses` (packed 64-bit numbers, taken on trust) into
    `out`, one after the other, by the routine that a get uses. Releases the GIL.
    """

class RawDisk:
    """
    A new file, read and written past the page cache: the floor of the SSD bench.

    One call per block, `threads` in flight, from and to one batch of aligned memory.
    One caller at a time; releases the GIL.
    """

    def __init__(
        self, path: str, blocks: int, block_bytes: int, batch: int, threads: int
    ) -> None: ...
    def write(self, blocks: Sequence[int]) -> None:
        """Write these blocks of the file, then one fdatasync."""

    def read(self, blocks: Sequence[int]) -> None:
        """Read these blocks of the file."""

def ssd_capacity_for(blocks: int, block_bytes: int) -> int:
    """
    Bytes of an SSD tier that holds that many blocks, its index included; a few more may
    fit. Raises BadArgument.
    """
