"""stat, explain, drop, resize, pin: what they ask, what they show, how they end."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

import kvpool
from kvpool import _core
from kvpool.keys import prefix_keys
from kvpool.manifest import Manifest
from kvpool.observe import report
from kvpool.operate import change_cli, prefixes, show, tables
from kvpool.operate.client import Space
from kvpool.operate.feed import Sample
from kvpool.tenants.tenant import Tenant
from tests import reports
from tests.operated import ControlServer, command, controlled, json_of, observing, tenant_of
from tests.pools import ROOT, opaque, opened
from tests.served import served

CHAT = Manifest(model="llama-3-8b", name="chat", layers=2, kv_heads=1, head_dim=8, block_tokens=4)
CHAT_FP8 = Manifest(
    model="llama-3-8b",
    name="chat-fp8",
    layers=2,
    kv_heads=1,
    head_dim=8,
    block_tokens=4,
    dtype="float8_e4m3",
)
# Three blocks and a half. Ids so long that no request has one by chance, in a time or a key.
TOKENS = list(range(4_101_203_040, 4_101_203_054))


# --- stat ----------------------------------------------------------------------------------------


def test_stat_shows_every_table(tmp_path: Path) -> None:
    with controlled(tmp_path) as server:
        text = command("stat", "--address", server.address).stdout
    for word in (
        *("tiers", "hit rates", "traffic", "tenants", "clients", "leases by age", "policy"),
        *("1.8 GiB", "60%", "prefill", "uid:1001", "bad_token 6", "chain_broken 33", "late 5"),
        *("02020202..", "21 pinned", "1 min 28 s", "max_clients 512"),
    ):
        assert word in text, text


def test_stat_json_is_the_report(tmp_path: Path) -> None:
    with controlled(tmp_path) as server:
        text = command("stat", "--json", "--address", server.address).stdout
    assert report.from_json(text.encode()) == reports.example()


@pytest.mark.parametrize("has_ssd", [True, False])
def test_tables_of_several_tenants_have_their_names(has_ssd: bool) -> None:
    told = reports.example(tenants=("acme", "umbrella"), has_ssd=has_ssd)
    out = show.Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in tables.tables(Sample(told, "here")):
        out.print(part)
    text = out.export_text()
    assert text.count("acme") > 5
    assert text.count("umbrella") > 5
    assert (" SSD  " in text.split("hit rates")[0]) == has_ssd


def test_names_are_text_whatever_they_hold() -> None:
    """Neither markup, which could be faulty as well, nor a sequence that a terminal obeys."""
    names = "[/bold]", "[red]calm[/red]", "a\x1b]0;title\x07b\nc", "\u202eright"
    for name in names:
        told = reports.example(tenants=(name,))
        tenant = told.tenants[0]
        client = msgspec.structs.replace(tenant.clients[0], name=name, peer=name)
        tenant = msgspec.structs.replace(tenant, clients=[client])
        told = msgspec.structs.replace(told, tenants=[tenant])
        out = show.Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        for part in tables.tables(Sample(told, "here")):
            out.print(part)
        text = out.export_text()
        assert text.count(show.clean(name)) > 5, text
        assert not set("\x1b\x07\u202e") & set(text)
    assert show.clean("a\x1b[0m\n") == "a\\x1b[0m\\n"


def test_rates_are_of_the_time_between() -> None:
    before = reports.example()
    after = reports.example(tenants=("default",))
    tenant = reports.tenant("default", 2)
    after = msgspec.structs.replace(after, tenants=[tenant], now_s=before.now_s + 10)
    out = show.Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    out.print(tables.rates(Sample(after, "here", [], before)))
    text = out.export_text()
    assert "in the last 10 s" in text
    assert "30/s" in text  # 300 lookups
    assert "60%" in text


def test_a_read_only_tier_says_why() -> None:
    told = reports.example()
    tenant = told.tenants[0]
    assert tenant.ssd is not None
    ssd = msgspec.structs.replace(tenant.ssd, read_only_reason="no room on the disk")
    told = msgspec.structs.replace(told, tenants=[msgspec.structs.replace(tenant, ssd=ssd)])
    out = show.Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in tables.tables(Sample(told, "here")):
        out.print(part)
    assert "no room on the disk" in out.export_text()


def test_watch_goes_on_without_the_daemon(tmp_path: Path) -> None:
    with controlled(tmp_path) as server:
        watching = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvpool", "stat", "--watch", "0.2", "--json"),
                *("--address", server.address),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert watching.stdout is not None
            assert watching.stderr is not None
            assert json.loads(watching.stdout.readline())["pid"] == 4242
            server.stop()
            while b"no daemon answers" not in (line := watching.stderr.readline()):
                assert line, "it has ended"
            server.start()
            assert json.loads(watching.stdout.readline())["pid"] == 4242
        finally:
            watching.kill()
            watching.communicate()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "250 ms"), (59, "59 s"), (125, "2 min 5 s"), (7200, "2 h"), (90_061, "1 d 1 h")],
)
def test_durations(value: float, text: str) -> None:
    assert show.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999_999, "999,999"), (1_250_000, "1.2 M"), (3e9, "3.0 G")]
)
def test_counts(value: float, text: str) -> None:
    assert show.count(value) == text


def test_bars_and_sparklines() -> None:
    assert show.bar(1, 2, 4) == "██░░"
    assert show.bar(9, 2, 4) == "████"
    assert show.bar(1, 0, 4) == "░░░░"
    assert show.sparkline([0.0, 0.5, 1.0, None], 6) == "  ▁▅█ "
    assert show.sparkline([0.1] * 9, 3) == "▁▁▁"


# --- which prefix --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", "1 2 3", "1,2,3", "1\n2\n3\n", "  [1,2,3]\n", "1, 2,\n 3"]
)
def test_token_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    assert prefixes.tokens_of(str(path)) == [1, 2, 3]


@pytest.mark.parametrize("text", ["[1, 2", '["a"]', "{}", "one two", "[1.5]", "[true]", "é"])
def test_a_token_file_that_is_none_is_refused_without_its_content(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(kvpool.BadArgument, match="write token ids") as raised:
        prefixes.tokens_of(str(path))
    assert text not in str(raised.value).replace(str(path), "")


def test_a_namespace_by_name_id_or_first_digits() -> None:
    chat, fp8 = Space("default", CHAT), Space("default", CHAT_FP8)
    both = [chat, fp8]
    assert prefixes.space_of("chat", both) is chat
    assert prefixes.space_of(CHAT_FP8.namespace_id.hex(), both) is fp8
    assert prefixes.space_of(CHAT_FP8.namespace_id.hex()[:8], both) is fp8
    with pytest.raises(kvpool.BadArgument, match="there are: chat, chat-fp8"):
        prefixes.space_of("cat", both)
    with pytest.raises(kvpool.BadArgument, match="none since the daemon began"):
        prefixes.space_of("cat", [])
    with pytest.raises(kvpool.BadArgument, match="of acme: name a --tenant"):
        prefixes.space_of("chat", [chat, Space("acme", CHAT)])


# --- explain -------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


@pytest.fixture
def tenant() -> Iterator[Tenant]:
    """With the namespaces chat and chat-fp8, and nothing in them."""
    with opened("8MiB") as pool:
        made = tenant_of("default", pool._node, [CHAT, CHAT_FP8])
        yield made
        made.pins.clear()


@pytest.fixture
def server(tmp_path: Path, tenant: Tenant) -> Iterator[ControlServer]:
    with controlled(tmp_path, **observing(tenant)) as running:
        yield running


def keys_in(manifest: Manifest, tokens: Sequence[int] = TOKENS) -> list[bytes]:
    return [bytes(key) for key in prefix_keys(manifest.namespace_id, tokens, 4)]


def space_of(tenant: Tenant, at: int) -> _core.Space:
    """For calls on blocks; the namespace that was opened as such a one."""
    return _core.Space(tenant.opened(list(tenant.manifests().values())[at]))


def stored(tenant: Tenant, at: int, keys: list[bytes]) -> None:
    """Puts blocks of zeros into one of its namespaces."""
    space = space_of(tenant, at)
    codes = space.put_codes(keys, bytes(space.block_bytes * len(keys)), None, None, None, 5.0)
    assert not any(codes)


def test_explain_hashes_here_and_names_the_cause(
    server: ControlServer, tenant: Tenant, tokens: Path
) -> None:
    keys = keys_in(CHAT)
    stored(tenant, 0, keys)
    space_of(tenant, 0).remove(keys[1:2])
    words = ("explain", "--namespace", "chat", "--tokens", tokens, "--address", server.address)
    text, told = command(*words).stdout, json_of(*words)
    assert "Block 2 of 3 was removed " in text
    assert "1 behind the missing one are here" in text
    assert (told["cause"], told["first_missing"], told["leading"]) == ("removed", 1, 1)
    assert [each["key"] for each in told["explained"]] == [key.hex() for key in keys]
    assert told["tenant"] == "default"
    assert 0 < told["coldest"] <= 1
    assert server.asked("explain")[0]["keys"] == b"".join(keys)
    said = repr(server.requests)
    assert not any(str(token) in said for token in TOKENS)


def test_explain_of_what_is_there(server: ControlServer, tenant: Tenant, tokens: Path) -> None:
    stored(tenant, 0, keys_in(CHAT))
    words = ("explain", "--namespace", "chat", "--tokens", tokens, "--address", server.address)
    told = json_of(*words)
    assert (told["cause"], told["in_dram"]) == ("present", 3)
    assert not server.asked("lookup")


def test_explain_finds_the_tokens_in_another_namespace(
    server: ControlServer, tenant: Tenant, tokens: Path
) -> None:
    stored(tenant, 1, keys_in(CHAT_FP8))
    words = ("explain", "--namespace", "chat", "--tokens", tokens, "--address", server.address)
    told = json_of(*words)
    assert told["cause"] == "other_namespace"
    assert "dtype is 'bfloat16' here and 'float8_e4m3' there" in told["sentence"]
    assert told["elsewhere"][0]["present"] == 3
    assert set(told["elsewhere"][0]["differing"]) == {"dtype", "name", "block_bytes"}


def test_explain_by_keys_looks_nowhere_else(server: ControlServer, tenant: Tenant) -> None:
    stored(tenant, 0, [b"\x0a" * 16])
    words = ("--key", "0a" * 16, "--key", "0b" * 16, "--address", server.address)
    told = json_of("explain", "--namespace", "chat", *words)
    assert (told["cause"], told["in_dram"]) == ("never_stored", 1)
    assert not server.asked("lookup")


def test_explain_tells_of_another_tenant(tmp_path: Path, tenant: Tenant, tokens: Path) -> None:
    with opened("8MiB") as pool:
        acme = tenant_of("acme", pool._node, [CHAT])
        stored(acme, 0, keys_in(CHAT))
        with controlled(tmp_path, **observing(tenant, acme)) as server:
            there = ("--tokens", tokens, "--address", server.address)
            done = command("explain", "--namespace", "chat", *there, status=2)
            assert "of acme: name a --tenant" in done.stderr
            id = CHAT_FP8.namespace_id.hex()
            told = json_of("explain", "--namespace", id, *there)
            assert told["cause"] == "other_tenant"
            assert "tenant 'acme' has 3 blocks" in told["sentence"]
        with controlled(tmp_path, **observing(tenant, acme, is_admin=False)) as server:
            words = ("--namespace", "chat", "--tokens", tokens, "--address", server.address)
            told = json_of("explain", *words)
    assert told["cause"] == "never_stored"
    assert "acme" not in json.dumps(told)


def test_less_than_a_block_is_told(server: ControlServer, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("1 2 3")
    words = ("--namespace", "chat", "--tokens", path, "--address", server.address)
    assert "shorter than one block" in command("explain", *words).stdout


def test_a_long_prefix_is_shown_around_what_is_missing(
    server: ControlServer, tenant: Tenant, tmp_path: Path
) -> None:
    path, tokens = tmp_path / "tokens", range(4 * 500)
    path.write_text(" ".join(map(str, tokens)))
    stored(tenant, 0, keys_in(CHAT, tokens)[:300])
    words = ("--namespace", "chat", "--tokens", path, "--address", server.address)
    text = command("explain", *words).stdout
    rows = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    assert rows[:4] == ["1", "2", "3", "4"]
    assert "301" in rows
    assert rows[-1] == "500"
    assert len(rows) <= 24


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--namespace", "chat"), "--tokens FILE, or --key HEX"),
        (("--namespace", "chat", "--key", "0a" * 16, "--tokens", "x"), "--tokens FILE, or --key"),
        (("--namespace", "chat", "--key", "xyz"), "32 hexadecimal digits"),
        (("--namespace", "cat", "--key", "0a" * 16), "there are: chat, chat-fp8"),
        (("--namespace", "chat", "--tokens", "absent"), "absent: cannot be read"),
    ],
)
def test_explain_asked_wrongly(
    server: ControlServer, words: tuple[str, ...], complaint: str
) -> None:
    done = command("explain", *words, "--address", server.address, status=2)
    assert complaint in done.stderr


# --- changes -------------------------------------------------------------------------------------


def test_drop_asks_first(server: ControlServer, tenant: Tenant) -> None:
    stored(tenant, 0, keys_in(CHAT))
    words = ("drop", "chat", "--address", server.address)
    assert "say --yes" in command(*words, status=2).stderr
    assert not server.requests
    assert command(*words, "--yes").stdout == "dropped 3 blocks of chat\n"
    assert json_of(*words, "-y") == {"namespace": "chat", "blocks": 0}
    assert "no namespace 'cat'" in (
        command("drop", "cat", "-y", "--address", server.address, status=2).stderr
    )


def test_resize_of_a_real_daemon(tmp_path: Path) -> None:
    with served(tmp_path, dram="64MiB") as daemon:
        there = ("--address", daemon.unix_address)
        with daemon.connect() as pool:
            space = pool.namespace(opaque(block_bytes=1 << 20))
            keys = [number.to_bytes(16, "big") for number in range(1, 61)]
            assert space.put(keys, bytes(60 << 20)).stored == 60
            told = json_of("resize", "--dram", "16MiB", *there)
            assert told["is_done"] is True
            assert told["committed_bytes"] <= 16 << 20
            assert pool.stats()["bytes_limit"] == 16 << 20
            assert "done: " in command("resize", "--dram", "128MiB", *there).stdout
            assert pool.stats()["bytes_limit"] == 128 << 20
            command("resize", "--max-blocks", "7", *there)
            assert pool.stats()["blocks"] <= 7
        done = command("resize", "--dram", "64GiB", *there, status=2)
        assert "this pool was opened for" in done.stderr
        assert "no SSD tier" in command("resize", "--ssd-capacity", "1GiB", *there, status=2).stderr


def test_a_shrink_that_takes_long_is_followed(tmp_path: Path) -> None:
    left = iter([100 << 20, 60 << 20, 20 << 20])
    with controlled(tmp_path, resize=lambda _: {"bytes": next(left)}) as server:
        words = ("resize", "--dram", "20MiB", "--address", server.address)
        assert json_of(*words) == {"committed_bytes": 20 << 20, "is_done": True}
    assert [asked["dram"] for asked in server.asked("resize")] == [20 << 20] * 3
    assert all(asked["timeout"] <= change_cli.RESIZE_SLICE_S for asked in server.asked("resize"))


def test_a_shrink_that_does_not_end_says_so(tmp_path: Path) -> None:
    with controlled(tmp_path, resize=lambda _: {"bytes": 90 << 20}) as server:
        words = ("resize", "--dram", "20MiB", "--wait", "0", "--address", server.address)
        begin = time.monotonic()
        done = command(*words, status=1)
        assert time.monotonic() - begin < 10
    assert "90 MiB are still committed" in done.stderr


def test_a_drop_ends_the_pins_of_its_namespace(
    server: ControlServer, tenant: Tenant, tokens: Path
) -> None:
    stored(tenant, 0, keys_in(CHAT))
    stored(tenant, 1, keys_in(CHAT_FP8))
    there = ("--address", server.address)
    for space in ("chat", "chat-fp8"):
        command("pin", space, "--namespace", space, "--tokens", tokens, *there)
    command("drop", "chat", "--yes", *there)
    assert [each["name"] for each in json_of("pins", *there)] == ["chat-fp8"]
    assert tenant.node.stats()["slots_held_for_views"] == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "say what to change"),
        (("--dram", "8G"), "write GiB (1024s)"),
        (("--max-blocks", "-1"), "max-blocks"),
        (("--max-blocks", "9" * 30), "max-blocks"),
    ],
)
def test_resize_asked_wrongly(words: tuple[str, ...], complaint: str) -> None:
    assert complaint in command("resize", *words, status=2).stderr


def test_pin_unpin_and_pins(server: ControlServer, tenant: Tenant, tokens: Path) -> None:
    stored(tenant, 0, keys_in(CHAT))
    there = ("--address", server.address)
    assert command("pins", *there).stdout == "nothing is pinned\n"
    words = ("pin", "system", "--namespace", "chat", "--tokens", tokens)
    assert command(*words, *there).stdout == "system: 3 of 3 blocks are pinned\n"
    assert json_of(*words, *there) == {"name": "system", "asked": 3, "blocks": 3}
    (only,) = json_of("pins", *there)
    size = 3 * space_of(tenant, 0).block_bytes
    assert only == {
        "tenant": "default",
        "name": "system",
        "namespace": "chat",
        "asked": 3,
        "blocks": 3,
        "bytes": size,
    }
    assert "system" in command("pins", *there).stdout
    assert command("unpin", "system", *there).stdout == "system: 3 blocks are no longer pinned\n"
    assert json_of("pins", *there) == []
    assert "nothing is pinned as 'system'" in command("unpin", "system", *there, status=2).stderr


def test_a_pin_of_what_is_not_there_fails(
    server: ControlServer, tenant: Tenant, tokens: Path
) -> None:
    stored(tenant, 0, keys_in(CHAT)[:1])
    words = ("pin", "x", "--namespace", "chat", "--tokens", tokens)
    done = command(*words, "--address", server.address, status=1)
    assert "1 of 3 blocks are pinned" in done.stdout
    assert "2 blocks are not present" in done.stderr


def test_reload_says_what_waits_for_a_restart(tmp_path: Path) -> None:
    answers = iter([["server.listen"], [], ["server.listen"]])
    with controlled(tmp_path, reload=lambda _: {"needs_restart": next(answers)}) as server:
        words = ("reload", "--address", server.address)
        assert command(*words).stdout == "read again\nneeds a restart: server.listen\n"
        assert command(*words).stdout == "read again\n"
        expected = {"changed": [], "needs_restart": ["server.listen"], "refused": []}
        assert json_of(*words) == expected


@pytest.mark.parametrize(
    "words",
    [
        ("stat",),
        ("drop", "x", "--yes"),
        ("resize", "--dram", "8MiB"),
        ("pins",),
        ("put", "k", __file__),
        ("explain", "--namespace", "x", "--key", "00" * 16),
    ],
)
def test_without_a_daemon_every_command_says_where_it_looked(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    done = command(*words, "--address", f"unix:{tmp_path}/node.sock", status=1)
    assert f"unix:{tmp_path}/node.sock: No such file or directory" in done.stderr
    assert "is `kvpool serve` running there?" in done.stderr
    assert done.stdout == ""


def test_help_is_light() -> None:
    """Nothing that only work needs is loaded for it."""
    heavy = {"textual", "kvpool.operate.client", "kvpool.observe.explain"}
    code = f"import sys; import kvpool.cli; print(sorted({heavy!r} & {{*sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"
    text = command("--help").stdout
    for word in ("stat", "explain", "drop", "resize", "pin", "put", "get"):
        assert word in text
