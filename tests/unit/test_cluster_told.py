"""What is told of a cluster: by commands, by HTTP and as metrics; to whom, and within bounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import _core
from kvpool.cluster.joined import Joined
from kvpool.cluster.member import DRAINING, Member
from kvpool.cluster.peer_link import Own
from kvpool.cluster.roster import Roster
from kvpool.observe import cluster as model
from kvpool.observe import metrics, report
from kvpool.observe.cluster_metrics import PEERS_MAX
from kvpool.observe.http_access import Access
from kvpool.serve_log import open_log
from kvpool.serve_nodes import cluster_of
from tests import reports
from tests.daemons import WAIT_S, NoOthers
from tests.members import Watched, node
from tests.operated import command, controlled, json_of, observing, tenant_of
from tests.pools import opaque, wait_until
from tests.unit.test_metrics import at, scraped, total
from tests.web.moving import Moving, running

ADMIN, MINE = "admin-" + "a" * 32, "mine-" + "b" * 32


def link(tenant: str = "default", scale: int = 1, **changes: Any) -> model.Link:
    made = model.Link(
        tenant=tenant,
        breaker="closed",
        streams=4,
        latency_us=250.0,
        bytes_in=1000 * scale,
        bytes_out=2000 * scale,
        fetched_blocks=30 * scale,
        failed=4 * scale,
        in_flight_bytes=50,
    )
    return msgspec.structs.replace(made, **changes)


def member(number: int, *links: model.Link, **changes: Any) -> model.Node:
    made = model.Node(
        id=node(number).hex(),
        address=f"10.0.0.{number % 250}:7070",
        state="up",
        incarnation=time.time_ns() - 90 * 10**9,
        weight=1,
        host=f"host-{number}",
        is_own=False,
        trouble="",
        links=list(links),
    )
    return msgspec.structs.replace(made, **changes)


def cluster(*nodes: model.Node, tenants: tuple[str, ...] = ("default",)) -> model.Cluster:
    return model.Cluster(
        name="prod",
        kind="etcd",
        own=node(1).hex(),
        version=7,
        fingerprint="00000000deadbeef",
        is_frozen=False,
        is_entered=True,
        is_replaced=False,
        left_out=0,
        nodes=[member(1, is_own=True), *nodes],
        directories=[
            model.directory_of(
                each,
                {
                    "slots_owned": 21_845,
                    "directory_keys": 1001,
                    "directory_bytes": 64_064,
                    "directory_evicted": 3,
                    "is_told": True,
                    "told_queued": 5,
                    "told_published": 77,
                    "told_withdrawn": 11,
                    "told_announced": 40,
                    "told_lost": 1,
                    "told_overflows": 1,
                },
            )
            for each in tenants
        ],
    )


def whole(told: model.Cluster, *tenants: str) -> report.Report:
    example = reports.example(tenants=tenants or ("default",))
    return msgspec.structs.replace(example, cluster=told)


# --- the model -----------------------------------------------------------------------------------


def test_a_tenants_part_has_nothing_of_another_and_no_address() -> None:
    told = cluster(
        member(2, link("a"), link("b"), trouble="10.0.0.2:7070: refused"), tenants=("a", "b")
    )
    part = model.part_of(told, "a")
    assert [each.tenant for each in part.nodes[1].links] == ["a"]
    assert [each.tenant for each in part.directories] == ["a"]
    text = msgspec.json.encode(part).decode()
    assert "10.0.0" not in text
    assert "host-" not in text
    assert model.part_of(told, None) is told


def test_an_answer_has_the_members_that_fit_and_says_how_many_do_not() -> None:
    told = cluster(*(member(n, link()) for n in range(2, 1000)))
    data = model.as_json_within(told, 20_000)
    found = model.from_json(data)
    assert len(data) <= 20_000
    assert len(found.nodes) + found.left_out == 999


def test_a_report_of_a_large_cluster_fits_as_well() -> None:
    told = whole(cluster(*(member(n, link()) for n in range(2, 1000))))
    data = report.as_json_within(told, 50_000)
    assert len(data) <= 50_000
    found = report.from_json(data)
    assert found.cluster is not None
    assert len(found.cluster.nodes) + found.cluster.left_out == 999


@given(st.lists(st.lists(st.integers(0, 20), max_size=6, unique=True), max_size=50))
def test_holders_are_read_back(rows: list[list[int]]) -> None:
    named = [[node(each) for each in row] for row in rows]
    nodes, packed = model.packed_holders(named)
    assert model.unpacked_holders(nodes, packed) == [row[: model.HOLDERS_MAX] for row in named]
    assert len(packed) == 8 * len(rows)


@given(st.lists(st.binary(max_size=16), max_size=3), st.binary(max_size=40))
def test_hostile_holders_are_a_value_error_or_names_that_there_are(
    nodes: list[bytes], packed: bytes
) -> None:
    try:
        found = model.unpacked_holders(nodes, packed)
    except ValueError:
        return
    assert all(each in nodes for row in found for each in row)


# --- from a daemon's part of it ------------------------------------------------------------------


class Pair:
    """This node's part of a cluster, and another member, which is leaving. Cores of both."""

    def __init__(self) -> None:
        own = Own("prod", node(1), 100, "token")
        self.other = Watched(Own("prod", node(2), 200, "token"))
        self.core = Watched(own)
        place = NoOthers(own)
        members = (
            Member(node(1).hex(), 100, ("10.0.0.1:7070",), weight=2, host="one"),
            Member(node(2).hex(), 200, ("10.0.0.2:7070",), state=DRAINING),
        )
        roster = Roster(3, node(1).hex(), members, 0xABC, is_entered=True)
        place.board.put(roster)
        self.joined = Joined(own, {"default": self.core}, place, open_log("text", "critical"))
        self.joined.apply(roster)
        self.other.set_members(self.core.members)
        self.other.reach(self.core)

    def close(self) -> None:
        self.joined.close(WAIT_S)
        self.core.end()
        self.other.end()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_what_is_told_is_what_the_parts_know(pair: Pair) -> None:
    pair.core.reach(pair.other)
    pair.core.note_failed(node(2), 200)
    told = cluster_of(pair.joined, {("default", node(2)): 77})
    assert (told.name, told.own, told.version) == ("prod", node(1).hex(), 3)
    assert told.fingerprint == "0000000000000abc"
    assert [each.state for each in told.nodes] == ["up", "draining"]
    assert [each.is_own for each in told.nodes] == [True, False]
    (found,) = told.nodes[1].links
    assert (found.streams, found.breaker, found.failed) == (1, "closed", 1)  # one still serves
    assert found.bytes_out == 77
    assert told.directories[0].slots == 1 << 16  # who is leaving keeps none


# --- commands ------------------------------------------------------------------------------------


def test_nodes_shows_who_is_there_and_what_is_wrong(tmp_path: Path) -> None:
    troubled = member(
        2,
        link(scale=5),
        link("b", breaker="open"),
        trouble="10.0.0.2:7070: Connection refused",
        state="draining",
    )
    told = msgspec.structs.replace(cluster(troubled, member(3)), is_frozen=True, left_out=4)
    with controlled(tmp_path, nodes=lambda _: {"nodes": msgspec.json.encode(told)}) as daemon:
        shown = command("nodes", "--address", daemon.address).stdout
        plain = json_of("nodes", "--json", "--address", daemon.address)
    assert "cluster prod, 7 members from etcd, view 7 (00000000deadbeef)" in shown
    row = next(line for line in shown.splitlines() if line.startswith("00000000   10.0.0.2"))
    for cell in ("draining", "1 min 3", "open", "8", "0.2 ms", "5.9 KiB", "11.7 KiB", "24"):
        assert cell in row, cell
    assert "up, this one" in shown
    assert "was not reached: 10.0.0.2:7070: Connection refused" in shown
    assert "etcd does not answer" in shown
    assert "4 members are left out" in shown
    assert plain["nodes"][1]["links"][0]["bytes_in"] == 5000


def test_a_node_alone_says_so(tmp_path: Path) -> None:
    with controlled(tmp_path, nodes=lambda _: {"nodes": None}) as daemon:
        done = command("nodes", "--address", daemon.address, status=1)
    assert "this daemon is in no cluster" in done.stderr


def test_what_hosts_call_themselves_is_text_and_no_more(tmp_path: Path) -> None:
    told = cluster(member(2, host="[red]x\x1b[2J", trouble="\x1b]0;title\x07"))
    with controlled(tmp_path, nodes=lambda _: {"nodes": msgspec.json.encode(told)}) as daemon:
        shown = command("nodes", "--address", daemon.address).stdout
    assert "\x1b" not in shown
    assert "title" in shown


@pytest.mark.parametrize("answer", [{}, {"nodes": b"{}"}, {"nodes": b"nonsense"}, {"nodes": 7}])
def test_an_answer_that_is_none_is_told_so(tmp_path: Path, answer: dict[str, Any]) -> None:
    with controlled(tmp_path, nodes=lambda _: answer) as daemon:
        done = command("nodes", "--address", daemon.address, status=1)
    assert "none that this version reads" in done.stderr


@pytest.fixture
def asked(tmp_path: Path, pair: Pair) -> Iterator[Any]:
    """A daemon in a cluster, of which another member has three blocks of a namespace."""
    manifest = opaque("m", name="chat", block_bytes=64, block_tokens=4)
    with_node = _core.Node.open(**reports_node())
    tenant = tenant_of("default", with_node, [manifest])
    keys = np.arange(6 * 16, dtype=np.uint8)
    tenant.opened(manifest)
    there = _core.Space(pair.other.node.open_space(tenant.space_id(manifest), 64))
    there.put_codes(keys.tobytes()[:48], bytes(3 * 64), None, None, None, 1.0)
    operations = observing(tenant, joined=pair.joined)
    with controlled(tmp_path, **operations) as daemon:
        yield daemon, keys.tobytes()
    with_node.close(0)


def reports_node() -> dict[str, Any]:
    from tests.daemons import planned

    return {**planned(Path("nowhere")).tenants["default"].node, "prefault": "off"}


def test_locate_says_who_has_what(asked: Any) -> None:
    daemon, keys = asked
    words = [word for at in range(0, len(keys), 16) for word in ("--key", keys[at : at + 16].hex())]
    told = ("locate", "--namespace", "chat", *words, "--address", daemon.address)
    wait_until(lambda: any(each["nodes"] for each in json_of(*told, "--json")["blocks"]))
    plain = json_of(*told, "--json")
    assert [each["nodes"] for each in plain["blocks"]] == [[node(2).hex()]] * 3 + [[]] * 3
    assert [each["key"] for each in plain["blocks"]] == [words[at] for at in range(1, 12, 2)]
    shown = command(*told).stdout
    assert "6 blocks, 0 here, 3 anywhere" in shown
    assert f"{node(2).hex()} has 3" in shown


def test_locate_on_a_node_alone_says_so(tmp_path: Path) -> None:
    manifest = opaque("m", name="chat", block_bytes=64, block_tokens=4)
    with_node = _core.Node.open(**reports_node())
    tenant = tenant_of("default", with_node, [manifest])
    with controlled(tmp_path, **observing(tenant)) as daemon:
        told = ("locate", "--namespace", "chat", "--key", "00" * 16, "--address", daemon.address)
        done = command(*told, status=2)
    with_node.close(0)
    assert "this node is in no cluster" in done.stderr


# --- HTTP ----------------------------------------------------------------------------------------


class InCluster(Moving):
    async def report(self) -> report.Report:
        made = await super().report()
        tenants = tuple(each.name for each in made.tenants)
        links = [link(each) for each in tenants]
        told = cluster(member(2, *links, trouble="10.0.0.2:7070: late"), tenants=tenants)
        return msgspec.structs.replace(made, cluster=told)


def test_the_cluster_by_http() -> None:
    with running(InCluster()) as site:
        told = site.json("/v1/cluster")
        assert (told["name"], len(told["nodes"])) == ("prod", 2)
        assert site.json("/v1/stats")["cluster"] == told
        assert site.ask("/v1/cluster?count=1")[0] == 400


def test_a_tenant_sees_its_part_of_the_cluster() -> None:
    access = Access(is_loopback=True, admin_token=ADMIN, tenant_tokens={"mine": MINE, "theirs": ""})
    with running(InCluster(("mine", "theirs")), access) as site:
        assert site.ask("/v1/cluster")[0] == 401
        part = site.json("/v1/cluster", MINE)
        assert [each["tenant"] for each in part["nodes"][1]["links"]] == ["mine"]
        for path in ("/v1/cluster", "/v1/stats", "/metrics"):
            text = site.ask(path, token=MINE)[2].decode()
            assert "theirs" not in text
            assert "10.0.0" not in text
        assert "10.0.0.2:7070" in site.ask("/v1/cluster", token=ADMIN)[2].decode()


def test_a_node_alone_has_no_such_page() -> None:
    with running(Moving()) as site:
        status, _, body = site.ask("/v1/cluster")
    assert status == 404
    assert b"in no cluster" in body


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_are_the_reports() -> None:
    samples = scraped(whole(cluster(member(2, link(scale=3)), member(3, state="draining"))))
    assert at(samples, "cluster_members", state="up") == 2
    assert at(samples, "cluster_members", state="draining") == 1
    assert at(samples, "cluster_frozen") == 0
    assert at(samples, "cluster_entered") == 1
    assert at(samples, "cluster_view") == 7
    for name, expected in {
        "cluster_directory_slots": 21_845,
        "cluster_directory_keys": 1001,
        "cluster_directory_bytes": 64_064,
        "cluster_publish_queue_keys": 5,
        "cluster_published": 1,
        "cluster_directory_evicted_keys_total": 3,
        "cluster_published_keys_total": 77,
        "cluster_withdrawn_keys_total": 11,
        "cluster_announced_keys_total": 40,
        "cluster_publish_lost_total": 2,
    }.items():
        assert at(samples, name, tenant="default") == expected, name
    who = {"tenant": "default", "peer": node(2).hex()}
    assert at(samples, "peer_bytes_total", **who, direction="in") == 3000
    assert at(samples, "peer_bytes_total", **who, direction="out") == 6000
    assert at(samples, "peer_failures_total", **who) == 12
    assert at(samples, "peer_fetched_blocks_total", **who) == 90
    assert at(samples, "peer_latency_seconds", **who) == 250e-6
    assert at(samples, "peer_breaker", **who, state="closed") == 1
    assert at(samples, "peer_breaker", **who, state="open") == 0


def test_without_a_cluster_there_is_no_series_of_one() -> None:
    names = {name for name, _ in scraped(reports.example())}
    assert not any("cluster" in name or "_peer_" in name for name in names)


def test_series_of_members_are_bounded_and_nothing_falls() -> None:
    exposition = metrics.Exposition()
    many = [member(n, link(scale=n)) for n in range(2, 2 + PEERS_MAX + 50)]
    samples = scraped(whole(cluster(*many)), exposition)
    series = {labels for name, labels in samples if name == "kvpool_peer_streams"}
    assert len(series) == PEERS_MAX
    before = total(samples, "peer_failures_total", peer="other")
    assert total(samples, "peer_failures_total") == sum(each.links[0].failed for each in many)
    fewer = scraped(whole(cluster(*many[-10:])), exposition)
    assert total(fewer, "peer_failures_total", peer="other") == before


def test_a_tenants_metrics_have_nothing_of_the_members() -> None:
    told = whole(cluster(member(2, link("a"), link("b")), tenants=("a", "b")), "a", "b")
    names = {(name, dict(labels).get("tenant", "")) for name, labels in scraped(told, tenant="a")}
    assert ("kvpool_cluster_members", "") not in names
    assert ("kvpool_peer_streams", "a") in names
    assert not any(tenant == "b" for _, tenant in names)
