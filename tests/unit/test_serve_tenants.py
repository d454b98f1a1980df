"""Tenants, administrators and HTTP in a configuration; all faults of a file; what a reload does."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvpool import BadArgument, config, serve_config
from kvpool.serve_options import Settings
from kvpool.serve_plan import changed, needs_restart, plan
from kvpool.serve_toml import lines_of
from tests.tenants import configuration, planned

MIB = 1 << 20


def written(folder: Path, text: str) -> Path:
    path = folder / "kvpool.toml"
    path.write_text(text)
    for name in ("a", "b", "token"):
        (folder / name).write_text(f"token {name}")
    return path


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(BadArgument) as error:
        planned(path, **flags)
    return str(error.value)


# --- durations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (5, 5.0),
        (0.25, 0.25),
        ("5", 5.0),
        ("5s", 5.0),
        ("200ms", 0.2),
        ("1.5 min", 90.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("10us", 1e-5),
        ("-1", -1.0),
    ],
)
def test_a_duration_as_people_write_it(text: str | float, seconds: float) -> None:
    assert config.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 parsecs", "5m", "1e3", "inf", "5s5s", True, None])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(BadArgument, match=r"duration|unknown unit"):
        config.parse_duration(text)


def test_durations_and_rates_in_a_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
[pool]
tau_s = "2min"
[ssd]
path = "{tmp_path / "tier"}"
capacity = "1GiB"
timeout = "200ms"
[server]
drain_timeout = "500ms"
[tenants.a]
token_file = "{tmp_path / "a"}"
put_rate = "1.5MiB"
get_rate = "2 MiB/s"
""",
    )
    found = planned(path)
    assert found.node["tau_s"] == 120.0
    assert found.node["ssd_timeout_s"] == 0.2
    assert found.drain_s == 0.5
    limits = found.tenants["a"].limits
    assert (limits.put_bytes_per_s, limits.get_bytes_per_s) == (3 * MIB // 2, 2 * MIB)
    assert "[pool] tau_s: '5 parsecs' has the unknown unit" in refusal(
        written(tmp_path, "[pool]\ntau_s = '5 parsecs'")
    )


# --- tenants -------------------------------------------------------------------------------------


def test_without_tenants_there_is_one_with_all_there_is(tmp_path: Path) -> None:
    found = planned(written(tmp_path, "[pool]\nmax_blocks = 7"), max_clients="9")
    (only,) = found.tenants.values()
    assert (only.name, only.uids, only.token) == ("default", None, None)
    assert only.node == {**found.node, "salt": only.node["salt"]}
    assert only.server == found.server
    assert only.limits.max_clients == 9
    assert not found.has_tokens


def test_each_tenant_has_its_table_s_limits_and_a_share(tmp_path: Path) -> None:
    tables = {
        "a": 'uids = [1001, 1002]\ndram_min = "16MiB"\nmax_clients = 3\npin_share = 0.5',
        "b": 'dram_max = "8MiB"',
    }
    found = planned(configuration(tmp_path, tables))
    a, b = found.tenants.values()
    assert a.uids == {1001, 1002}
    assert b.uids == frozenset()
    assert (a.token, b.token) == ("token of a", "token of b")
    assert (a.node["dram"], b.node["dram"]) == (56 * MIB, 8 * MIB)  # of 64 MiB
    assert (a.limits.dram_min, a.limits.dram_max) == (16 * MIB, 256 * MIB)
    assert (b.limits.dram_min, b.limits.dram_max) == (2 * MIB, 8 * MIB)
    assert (a.limits.max_clients, b.limits.max_clients) == (3, 512)
    assert a.server["pin_bytes"] == 28 * MIB
    assert b.server["pin_bytes"] == 2 * MIB
    assert a.node["salt"] != b.node["salt"]
    assert found.has_tokens


def test_a_sealed_arena_has_the_size_of_its_share(tmp_path: Path) -> None:
    path = configuration(tmp_path, {"a": "", "b": ""})
    found = planned(path, arena="sealed")
    for each in found.tenants.values():
        assert each.node["dram"] == each.node["dram_max"] == 32 * MIB


def test_the_ssd_is_divided_by_what_the_tables_say(tmp_path: Path) -> None:
    tables = {"default": "", "a": 'ssd_capacity = "1GiB"', "b": ""}
    told = {"ssd": str(tmp_path / "tier"), "ssd_capacity": "5GiB"}
    found = planned(configuration(tmp_path, tables), **told)
    capacities = {name: each.node["ssd_capacity"] >> 30 for name, each in found.tenants.items()}
    assert capacities == {"default": 2, "a": 1, "b": 2}
    folders = {name: each.node["ssd"] for name, each in found.tenants.items()}
    assert folders == {
        "default": str(tmp_path / "tier"),
        "a": str(tmp_path / "tier" / "tenants" / "a"),
        "b": str(tmp_path / "tier" / "tenants" / "b"),
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tenants.a]\nuid = [1]", "[tenants.a] has no option 'uid'; did you mean 'uids'?"),
        ("[tenants.a]\nlanes = 1", "[tenants.a] has no option 'lanes'; it belongs into [server]"),
        ("[server]\nput_rate = 1", "[server] has no option 'put_rate'; it belongs into [tenants"),
        ("[tenants]\nuids = [1]", "[tenants] has no option 'uids'; a tenant has a table of its"),
        ("[tenant.a]\n", "there is no table [tenant]; did you mean 'tenants'?"),
        ("tenants = 5", "tenants is a table; write [tenants] above its options"),
        ('[tenants."../a"]\n', "'../a' is no name of a tenant; use"),
        ('[tenants.""]\n', "'' is no name of a tenant; use"),
        ("[tenants.a]\nuids = ['x']", "[tenants.a] uids is ['x']: Expected `int`"),
        ("[tenants.a]\nuids = [-1]", "[tenants.a] uids is -1; it must be"),
        ("[tenants.a]\ndram_min = '1MiB'", "[tenants.a] dram_min is 1048576 bytes; it must be"),
        ("[tenants.a]\ndram_min = '65MiB'", "dram is 67108864 bytes, but the dram_min of all"),
        ("[tenants.a]\ndram_min = '8MiB'\ndram_max = '4MiB'", "[tenants.a] dram_min is 8388608"),
        ("[tenants.a]\nput_rate = 'fast'", "[tenants.a] put_rate: 'fast' is not a size"),
        ("[tenants.a]\nmax_clients = 0", "[tenants.a] max_clients is 0; it must be 1.."),
        ("[tenants.a]\npin_share = 2.0", "[tenants.a] pin_share is 2.0; it must be"),
        ("[tenants.a]\nssd_capacity = '1GiB'", "but there is no SSD tier; set path"),
        ("[tenants.a]\ntoken_file = 'absent'", "[tenants.a] token_file is 'absent': cannot be"),
        ("[tenants.a]\nuids=[1]\n[tenants.b]\nuids=[1]", "[tenants.b] uids has 1, which is the"),
        ("[tenants.a]\n", "but nobody could connect; over TCP a tenant is known by its token"),
    ],
)
def test_a_mistake_about_tenants_is_named_where_it_stands(
    text: str, complaint: str, tmp_path: Path
) -> None:
    assert complaint in refusal(written(tmp_path, text))


def test_more_tenants_than_there_may_be(tmp_path: Path) -> None:
    text = "".join(f"[tenants.t{number}]\n" for number in range(65))
    assert "[tenants.t64] is one more than 64 tenants" in refusal(written(tmp_path, text))


def test_nobody_shares_a_token(tmp_path: Path) -> None:
    same = f'token_file = "{tmp_path / "token"}"\n'
    path = written(tmp_path, f"[tenants.a]\n{same}[tenants.b]\n{same}")
    assert "[tenants.b] token_file holds the token of the tenant 'a'" in refusal(path)
    path = written(tmp_path, f"[admin]\n{same}[tenants.b]\n{same}")
    assert "[admin] token_file holds the token of the tenant 'b'" in refusal(path)


def test_the_server_s_token_is_the_default_tenant_s(tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    path = written(tmp_path, "[tenants.default]\n")
    assert planned(path, token_file=token).tenants["default"].token == "token token"
    path = written(tmp_path, "[tenants.a]\n")
    assert "is the token of the tenant 'default', which has no" in refusal(path, token_file=token)
    path = written(tmp_path, f'[tenants.default]\ntoken_file = "{tmp_path / "a"}"\n')
    assert "are the same thing" in refusal(path, token_file=token)


# --- beyond this machine -------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["server", "tenants.a", "admin"])
def test_beyond_this_machine_somebody_s_token_is_enough(tmp_path: Path, who: str) -> None:
    path = written(tmp_path, f'[{who}]\ntoken_file = "{tmp_path / "token"}"\n')
    assert len(planned(path, listen="0.0.0.0:0").tcp) == 1
    told = refusal(written(tmp_path, ""), listen="0.0.0.0:0")
    assert "which is 0.0.0.0: other machines could connect" in told
    assert "set token_file" in told


def test_http_beyond_this_machine_needs_a_token_or_a_word(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    assert planned(path).http is None
    here = planned(path, http="127.0.0.1:0").http
    assert here is not None
    assert (here.host, here.port, here.is_loopback) == ("127.0.0.1", 0, True)
    assert (here.token, here.is_open) == (None, False)
    told = refusal(path, http="0.0.0.0:0")
    assert told.startswith("--http is '0.0.0.0:0', which is 0.0.0.0: other machines could read")
    assert planned(path, http="0.0.0.0:0", http_open="true") is not None
    guarded = planned(path, http="0.0.0.0:0", http_token_file=str(tmp_path / "token")).http
    assert guarded is not None
    assert (guarded.token, guarded.is_loopback) == ("token token", False)


@pytest.mark.parametrize("token", ["schl\u00fcssel", "x" * 513, "two\tparts"])
def test_a_token_that_http_cannot_carry_is_refused(tmp_path: Path, token: str) -> None:
    path = written(tmp_path, "")
    (tmp_path / "token").write_text(token)
    told = refusal(path, http="127.0.0.1:0", http_token_file=str(tmp_path / "token"))
    assert "holds what no header of HTTP can carry" in told


# --- shown ---------------------------------------------------------------------------------------


def test_tenants_are_shown_with_their_origins_and_read_again(tmp_path: Path) -> None:
    path = configuration(tmp_path, {"a": 'uids = [1]\nput_rate = "1MiB"', "b": ""})
    settings = serve_config.load(str(path), {})
    shown = json.loads(serve_config.as_json(settings))
    assert shown["tenants.a"]["put_rate"] == {"value": "1MiB", "from": str(path)}
    assert shown["tenants.b"]["put_rate"] == {"value": None, "from": "default"}
    again = tmp_path / "again.toml"
    again.write_text(serve_config.as_toml(settings))
    assert serve_config.load(str(again), {}).config == settings.config


def test_an_empty_table_is_a_tenant(tmp_path: Path) -> None:
    path = written(tmp_path, "[tenants.a]\n[tenants.b]\n")
    assert list(serve_config.load(str(path), {}).config.tenants) == ["a", "b"]


# --- all faults ----------------------------------------------------------------------------------


def test_every_fault_of_a_file_is_found_with_its_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """# a comment
[pool]
dram = "8G"
policy = 'lur'
drm = 1

[sever]
lanes = 2
[server]
lanes = 17
listen = "7070"
drain_timeout = "5 parsecs"
[log]
level = 5
[tenants.a]
uid = [1]
max_clients = 0
""",
    )
    found = serve_config.faults(str(path), {})
    assert [(fault.line, fault.where) for fault in found] == [
        (3, "[pool] dram"),
        (4, "[pool] policy"),
        (5, "[pool] drm"),
        (7, "[sever]"),
        (10, "[server] lanes"),
        (11, "[server] listen"),
        (12, "[server] drain_timeout"),
        (14, "[log] level"),
        (16, "[tenants.a] uid"),
        (17, "[tenants.a] max_clients"),
    ]
    by_place = {fault.where: fault for fault in found}
    assert by_place["[pool] dram"].suggestion.startswith("write GiB")
    assert by_place["[pool] drm"].suggestion == "did you mean 'dram'?"
    assert by_place["[sever]"].suggestion == "did you mean 'server'?"
    assert "it can be temperature" in by_place["[pool] policy"].suggestion
    assert str(path) not in "".join(fault.message for fault in found)


def test_a_file_in_order_has_no_faults(tmp_path: Path) -> None:
    path = configuration(tmp_path, {"a": "uids = [1]"})
    assert serve_config.faults(str(path), {}) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [("[pool]\ndram = = 1\n", 2), ("a = " + "[" * 2000, None), (None, None)],
)
def test_a_file_that_cannot_be_read_has_one_fault(
    tmp_path: Path, text: str | None, line: int | None
) -> None:
    path = tmp_path / "kvpool.toml"
    if text is not None:
        path.write_text(text)
    (fault,) = serve_config.faults(str(path), {})
    assert fault.line == line
    assert fault.message


def test_a_fault_between_two_options_ends_the_search(tmp_path: Path) -> None:
    """What no single option's absence mends is told once."""
    path = written(tmp_path, "[tenants.a]\ndram_min = '40MiB'\n[tenants.b]\ndram_min = '40MiB'\n")
    path.write_text(path.read_text() + "[pool]\ndram = '64MiB'\n")
    found = serve_config.faults(str(path), {})
    assert found[0].where == "[pool] dram"
    assert "dram_min of all tenants together" in found[0].message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a]\nb = 1\n", {("a", ""): 1, ("a", "b"): 2}),
        (" [ a ]  # c\n b=1\n", {("a", ""): 1, ("a", "b"): 2}),
        ('[t."x-1"]\nb = 1', {("t.x-1", ""): 1, ("t.x-1", "b"): 2}),
        ("a.b = 1\nc = 2", {("a", "b"): 1, ("", "c"): 2}),
        ("[a]\nu = [\n  1,\n  2,\n]\nv = 1", {("a", ""): 1, ("a", "u"): 2, ("a", "v"): 6}),
        (
            "[a]\nb = 1\n[a.c]\nb = 2",
            {("a", ""): 1, ("a", "b"): 2, ("a.c", ""): 3, ("a.c", "b"): 4},
        ),
        ("# b = 1\n[a]\n#b = 1\n", {("a", ""): 2}),
        ('[a]\nb = """\nc = 1\n"""\n', {}),  # no line rather than a wrong one
        ("[a]\nb = 1\nb = 2\n", {("a", ""): 1}),
        ("[a] = 1\n[b]\nx = 1", {("b", ""): 2, ("b", "x"): 3}),
    ],
)
def test_where_an_option_stands(text: str, expected: dict[tuple[str, str], int]) -> None:
    assert lines_of(text) == expected


# --- another configuration -----------------------------------------------------------------------


def test_what_a_reload_cannot_change_is_named(tmp_path: Path) -> None:
    def loaded(text: str, tenants: dict[str, str], **flags: str) -> Settings:
        return serve_config.load(str(configuration(tmp_path, tenants, text)), {}, flags)

    old = loaded("", {"a": "", "b": ""}, dram="64MiB")
    new = loaded(
        '[pool]\nmax_blocks = 5\ntau_s = "5s"\n[log]\nlevel = "debug"\n[server]\nlanes = 2\n',
        {"a": "uids = [1]\npin_share = 0.5", "c": ""},
        dram="32MiB",
    )
    assert needs_restart(old.config, new.config) == [
        "[pool] tau_s",
        "[server] lanes",
        "[tenants.a] pin_share",
        "[tenants.b]",
        "[tenants.c]",
    ]
    assert changed(old.config, new.config) == [
        "[pool] dram",
        "[pool] max_blocks",
        "[log] level",
        "[tenants.a] uids",
    ]
    assert needs_restart(old.config, old.config) == changed(old.config, old.config) == []


def test_a_plan_says_no_token(tmp_path: Path) -> None:
    path = configuration(tmp_path, {"a": ""})
    found = plan(serve_config.load(str(path), {}), {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert dataclasses.asdict(found)["admin"]["token"] == "token of administrators"
    assert "token of" not in repr(found)
