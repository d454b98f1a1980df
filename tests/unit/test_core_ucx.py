"""Reads out of another node's memory, as the daemon opens them."""

import contextlib
import ctypes.util
from collections.abc import Iterator

import pytest

from kvpool import _core
from kvpool.errors import BadArgument, KvpoolError, PoolClosed

ID = b"n" * 16
TCP = ("tcp", "lo", "", [("TCP_TX_SEG_SIZE", "256k")])

pytestmark = pytest.mark.skipif(
    ctypes.util.find_library("ucp") is None, reason="UCX is not installed"
)


@contextlib.contextmanager
def cluster(*, sealed: bool = True) -> Iterator[_core.Cluster]:
    node = _core.Node.open(
        dram=4 << 20,
        dram_max=4 << 20,
        max_blocks=0,
        policy="temperature",
        tau_s=0.0,
        prefault="off",
        evict_ahead=0.0,
        huge_pages=False,
        salt=5,
        clock=None,
        sealed=sealed,
    )
    made = _core.Cluster.open(node, ID, 1)
    try:
        yield made
    finally:
        made.close(10.0)
        node.close()


def test_it_says_which_library_and_where_the_memory_is() -> None:
    with cluster() as made:
        assert made.ucx_address == b""
        assert made.stats()["ucx_open"] is False
        library = made.open_ucx(*TCP, is_unchecked=True)
        assert "libucp" in library
        assert 100 < len(made.ucx_address) < 24 << 10
        stats = made.stats()
        assert stats["ucx_open"] is True
        assert stats["ucx_whole"] == stats["ucx_failed"] == stats["ucx_used_bytes"] == 0
    assert made.stats()["ucx_open"] is False
    with pytest.raises(PoolClosed):
        made.open_ucx(*TCP, is_unchecked=True)


def test_what_peers_may_not_reach_is_refused() -> None:
    with cluster() as made, pytest.raises(BadArgument, match="remote keys are checked"):
        made.open_ucx(*TCP, is_unchecked=False)
    with cluster(sealed=False) as made, pytest.raises(BadArgument, match="sealed"):
        made.open_ucx(*TCP, is_unchecked=True)


def test_once_there_are_members_it_is_too_late() -> None:
    with cluster() as made:
        made.set_members([(ID, 1, 1, False)])
        with pytest.raises(KvpoolError, match="too late"):
            made.open_ucx(*TCP, is_unchecked=True)


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_UCX_LIB", "/nowhere/libucp.so.0")
    with cluster() as made, pytest.raises(KvpoolError, match=r"/nowhere/libucp\.so\.0"):
        made.open_ucx(*TCP, is_unchecked=True)
