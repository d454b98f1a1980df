"""How commands reach a daemon, and what they say where they cannot."""

from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.errors import BadArgument, KvpoolError, Refused, Unreachable
from kvpool.observe import report
from kvpool.operate import client, feed
from kvpool.operate.client import Explained, Operator, Reach, Space
from kvpool.operate.feed import Feed, Lost, Sample
from tests import reports
from tests.operated import ControlServer, controlled, hottest
from tests.pools import opaque
from tests.served import served


def connected(server: ControlServer) -> Operator:
    return Operator.connect(Reach(server.address), 5.0)


def test_a_report_is_read(tmp_path: Path) -> None:
    with controlled(tmp_path) as server, connected(server) as operator:
        assert operator.report() == reports.example()
        assert operator.version == "9.9.9"
        assert operator.where == server.address


def test_a_tenant_that_is_named_is_asked_about(tmp_path: Path) -> None:
    with (
        controlled(tmp_path) as server,
        Operator.connect(Reach(server.address, tenant="acme"), 5.0) as operator,
    ):
        operator.report()
        operator.hottest(1)
    assert [asked["tenant"] for asked in server.requests] == ["acme", "acme"]


def test_hottest_prefixes_are_read(tmp_path: Path) -> None:
    with controlled(tmp_path) as server, connected(server) as operator:
        (first, second) = operator.hottest(2)
    assert (first.key, first.depth, first.namespace) == ("01" * 16, 10, "chat")
    assert second.heat == 25.0
    assert server.asked("hottest")[0]["count"] == 2


SPACE = Space("default", opaque(name="chat"))


def numbered(count: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in range(count))


def numbers_of(keys: bytes) -> list[int]:
    return [int(number) for number in memoryview(keys).cast("Q")[::2]]


def test_many_keys_are_explained_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(asked: dict[str, Any]) -> dict[str, Any]:
        numbers = numbers_of(asked["keys"])
        more = [{"tiers": 3, "heat": float(numbers[1])}]
        return {"tiers": bytes([1] * len(numbers)), "first": 1, "explained": more, "coldest": 0.5}

    monkeypatch.setattr(client, "KEYS_AT_ONCE", 1000)
    with controlled(tmp_path, explain=explain) as server, connected(server) as operator:
        told = operator.explain(SPACE, numbered(2500))
        assert operator.explain(SPACE, b"") == Explained([], None)
    assert [entry["tiers"] for entry in told.entries] == (
        [1, 3] + [1] * 998 + [1, 3] + [1] * 998 + [1, 3] + [1] * 498
    )
    assert told.entries[1001]["heat"] == 1001.0
    assert told.coldest == 0.5
    assert [len(asked["keys"]) // 16 for asked in server.requests] == [1000, 1000, 500]
    assert server.requests[0]["namespace"] == "chat"
    assert server.requests[0]["tenant"] == "default"


@pytest.mark.parametrize(("present", "requests"), [(0, 1), (1000, 2), (1500, 2), (2500, 3)])
def test_a_prefix_is_followed_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: int, requests: int
) -> None:
    def lookup(asked: dict[str, Any]) -> dict[str, Any]:
        return {"tiers": bytes(int(number < present) for number in numbers_of(asked["keys"]))}

    monkeypatch.setattr(client, "_LOOKED_UP_AT_ONCE", 1000)
    with controlled(tmp_path, lookup=lookup) as server, connected(server) as operator:
        assert operator.leading(SPACE, numbered(2500)) == present
    assert len(server.requests) == requests


@pytest.mark.parametrize(
    ("op", "answer"),
    [
        ("report", {}),
        ("report", {"report": b"not json"}),
        ("report", {"report": b'{"version": 1}'}),
        ("hottest", {"hottest": [{"depth": "deep"}]}),
        ("hottest", {"hottest": 5}),
        ("manifests", {"manifests": 5}),
        ("manifests", {"manifests": [{"tenant": "x"}]}),
        ("pins", {"pins": [{}]}),
    ],
)
def test_an_answer_of_another_form_is_told_with_the_version(
    tmp_path: Path, op: str, answer: dict[str, Any]
) -> None:
    arguments = (3,) if op == "hottest" else ()
    with (
        controlled(tmp_path, **{op: lambda _: answer}) as server,
        connected(server) as operator,
        pytest.raises(KvpoolError, match=r"9\.9\.9"),
    ):
        getattr(operator, {"manifests": "spaces"}.get(op, op))(*arguments)


def test_an_older_daemon_is_told_apart(tmp_path: Path) -> None:
    with (
        controlled(tmp_path) as server,
        connected(server) as operator,
        pytest.raises(KvpoolError, match="knows no 'reload': restart it with a newer kvpool"),
    ):
        operator.ask("reload")


def test_nobody_there_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVPOOL_ADDRESS", raising=False)
    with pytest.raises(Unreachable) as raised:
        Operator.connect(Reach(), 5.0)
    told = str(raised.value)
    assert f"unix:{tmp_path}/kvpool/node.sock: No such file or directory" in told
    assert "unix:/run/kvpool/node.sock" in told
    assert "start one with `kvpool serve`" in told
    monkeypatch.setenv("KVPOOL_ADDRESS", f"unix:{tmp_path}/other.sock")
    with pytest.raises(Unreachable, match=r"is `kvpool serve` running there\? .*other\.sock"):
        Operator.connect(Reach(), 5.0)


def test_an_address_that_cannot_be_meant_is_the_caller_s_mistake() -> None:
    with pytest.raises(BadArgument, match="unix:/path/to"):
        Operator.connect(Reach("udp://here"), 5.0)


def test_a_real_daemon_answers(tmp_path: Path) -> None:
    with served(tmp_path, tcp=True) as daemon:
        for address in (daemon.unix_address, daemon.tcp_address):
            with Operator.connect(Reach(address), 5.0) as operator:
                assert operator.ask("ping")["ok"] is True
                assert operator.version == kvpool.__version__
        with client.open_pool(Reach(daemon.unix_address)) as pool:
            space = pool.namespace(opaque())
            assert space.put([bytes(16)], bytes(4096)).stored == 1


# --- who asks ------------------------------------------------------------------------------------


def test_a_token_is_proved_by_file_or_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("a token of some length\n")
    with served(tmp_path, token_file=str(token)) as daemon:
        with pytest.raises(Refused, match="token"):
            Operator.connect(Reach(daemon.tcp_address), 5.0)
        with Operator.connect(Reach(daemon.tcp_address, str(token)), 5.0) as operator:
            assert operator.ask("ping")["ok"] is True
        monkeypatch.setenv("KVPOOL_TOKEN", "a token of some length")
        with Operator.connect(Reach(daemon.tcp_address), 5.0) as operator:
            assert operator.ask("ping")["ok"] is True
        monkeypatch.delenv("KVPOOL_TOKEN")
        with client.open_pool(Reach(daemon.tcp_address, str(token))) as pool:
            assert pool.namespace(opaque()).put([bytes(16)], bytes(4096)).stored == 1


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff", b"x" * 4097])
def test_a_token_file_that_holds_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(BadArgument, match="token_file"):
        Operator.connect(Reach(f"unix:{tmp_path}/node.sock", str(path)), 5.0)


def test_an_admin_acts_as_the_tenant_that_it_names(tmp_path: Path) -> None:
    config = tmp_path / "kvpool.toml"
    config.write_text("[tenants.acme]\nuids = [4001]\n[tenants.umbrella]\nuids = [4002]\n")
    with served(tmp_path, config=str(config), tcp=False) as daemon:
        there = daemon.unix_address
        with client.open_pool(Reach(there, tenant="acme")) as pool:
            assert pool.namespace(opaque()).put([bytes(16)], bytes(4096)).stored == 1
        with client.open_pool(Reach(there, tenant="umbrella")) as pool:
            assert pool.namespace(opaque()).lookup([bytes(16)]).blocks == 0
        with pytest.raises(
            Refused, match=r"there is no tenant .nobody.; there are: acme, umbrella"
        ):
            Operator.connect(Reach(there, tenant="nobody"), 5.0)


# --- the feed ------------------------------------------------------------------------------------


def test_a_feed_gives_samples_and_what_was_before(tmp_path: Path) -> None:
    moments = iter([reports.NOW_S, reports.NOW_S + 2.0])

    def at(_: dict[str, Any]) -> dict[str, Any]:
        import msgspec

        told = msgspec.structs.replace(reports.example(), now_s=next(moments))
        return {"report": report.as_json(told)}

    with (
        controlled(tmp_path, report=at) as server,
        Feed(Reach(server.address), with_hottest=True) as samples,
    ):
        first, second = samples.next(), samples.next()
    assert isinstance(first, Sample)
    assert isinstance(second, Sample)
    assert (first.seconds, second.seconds) == (0.0, 2.0)
    assert len(first.hottest) == len(hottest(99))


def test_a_feed_outlives_a_daemon(tmp_path: Path) -> None:
    with controlled(tmp_path) as server, Feed(Reach(server.address)) as samples:
        assert isinstance(samples.next(), Sample)
        server.stop()
        lost = samples.next()
        assert isinstance(lost, Lost)
        assert "no daemon answers" in lost.reason
        server.start()
        assert isinstance(samples.next(), Sample)


def test_a_restart_between_two_samples_is_not_seen(tmp_path: Path) -> None:
    with controlled(tmp_path) as server, Feed(Reach(server.address)) as samples:
        samples.next()
        server.stop()
        server.start()
        assert isinstance(samples.next(), Sample)


def test_there_are_no_rates_across_a_restart() -> None:
    import msgspec

    before = reports.example()
    again = msgspec.structs.replace(before, pid=5, now_s=before.now_s + 3)
    assert Sample(again, "here", [], before).seconds == 0.0


def test_a_flow_is_what_came_in_between() -> None:
    before, after = reports.tenant(scale=1), reports.tenant(scale=3)
    found = feed.flow([after], [before], 2.0)
    assert found.lookups == pytest.approx((900 - 300) / 2)
    assert found.hit_ratio == pytest.approx(0.6)
    assert found.evictions == pytest.approx(345)
    assert found.loaded_bytes == pytest.approx(582 * 6 * 65_536 / 2)
    assert feed.flow([after], [], 2.0) == feed.Flow()
    assert feed.flow([before], [before], 0.0) == feed.Flow()
    assert feed.flow([before], [before], 1.0).hit_ratio is None
