"""How commands reach a daemon, and what they say where they cannot."""

from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.errors import BadArgument, KvpoolError, Unreachable
from kvpool.observe import report
from kvpool.operate import client, feed
from kvpool.operate.client import Operator, Reach
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


def test_a_tenant_that_is_named_is_the_only_one_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_of_tenant", lambda caller, _: caller)
    both = {"report": report.as_json(reports.example(tenants=("acme", "umbrella")))}
    with (
        controlled(tmp_path, report=lambda _: both) as server,
        Operator.connect(Reach(server.address, tenant="umbrella"), 5.0) as operator,
    ):
        assert [each.name for each in operator.report().tenants] == ["umbrella"]


def test_hottest_prefixes_are_read(tmp_path: Path) -> None:
    with controlled(tmp_path) as server, connected(server) as operator:
        (first, second) = operator.hottest(2)
    assert (first.key, first.depth, first.namespace) == (b"\x01" * 16, 10, "chat")
    assert second.heat == 25.0
    assert server.asked("hottest")[0]["count"] == 2


def test_many_keys_are_explained_in_parts(tmp_path: Path) -> None:
    def explain(asked: dict[str, Any]) -> dict[str, Any]:
        count = len(asked["keys"]) // 16
        return {"explained": [{"tiers": 1}] * count, "elsewhere": [{"namespace": "x"}]}

    with controlled(tmp_path, explain=explain) as server, connected(server) as operator:
        told, elsewhere = operator.explain("chat", bytes(16 * 2500))
    assert len(told) == 2500
    assert elsewhere == [{"namespace": "x"}]
    assert [len(asked["keys"]) // 16 for asked in server.asked("explain")] == [1024, 1024, 452]


@pytest.mark.parametrize(("present", "requests"), [(0, 1), (1024, 2), (1500, 2), (2500, 3)])
def test_a_prefix_is_followed_as_far_as_it_goes(
    tmp_path: Path, present: int, requests: int
) -> None:
    def explain(asked: dict[str, Any]) -> dict[str, Any]:
        numbers = memoryview(asked["keys"]).cast("Q")[::2]
        return {"explained": [{"tiers": int(number < present)} for number in numbers]}

    keys = b"".join(number.to_bytes(16, "little") for number in range(2500))
    with controlled(tmp_path, explain=explain) as server, connected(server) as operator:
        assert operator.leading("chat", keys) == present
    assert len(server.asked("explain")) == requests


@pytest.mark.parametrize(
    ("op", "answer"),
    [
        ("report", {}),
        ("report", {"report": b"not json"}),
        ("report", {"report": b'{"version": 1}'}),
        ("hottest", {"hottest": [{"depth": "deep"}]}),
        ("hottest", {"hottest": 5}),
        ("manifests", {"manifests": 5}),
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
        getattr(operator, op)(*arguments)


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


@pytest.mark.parametrize(
    ("content", "token"), [(b"secret", "secret"), (b"  secret\n", "secret"), (b"a b", "a b")]
)
def test_a_token_file_is_read(tmp_path: Path, content: bytes, token: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    assert client.read_token(str(path), {"KVPOOL_TOKEN": "other"}) == token


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff", b"x" * 4097])
def test_a_token_file_that_holds_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(BadArgument, match="token"):
        client.read_token(str(path), {})


def test_a_token_by_the_environment_or_none(tmp_path: Path) -> None:
    assert client.read_token(None, {"KVPOOL_TOKEN": "t"}) == "t"
    assert client.read_token(None, {"KVPOOL_TOKEN": ""}) is None
    with pytest.raises(BadArgument, match="cannot be read"):
        client.read_token(str(tmp_path / "absent"), {})


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
