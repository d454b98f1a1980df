"""What `kvpool serve` is told: precedence, provenance, and mistakes that are named as written."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import serve_config, serve_plan
from kvpool.config import SSD_FREE_FLOOR, SSD_IO_THREADS, SSD_TIMEOUT_S
from kvpool.errors import BadArgument
from kvpool.serve_plan import Plan
from tests.pools import ROOT

NAMES = [option.name for option in serve_config.options()]


def load(text: str | None = None, folder: Path | None = None, **told: Any) -> Any:
    """Settings from a file's text, variables by their whole name, and flags by their own."""
    path = None
    if text is not None:
        assert folder is not None
        path = str(folder / "kvpool.toml")
        Path(path).write_text(text)
    environment = {name: value for name, value in told.items() if name.isupper()}
    flags = {name: value for name, value in told.items() if not name.isupper()}
    return serve_config.load(path, environment, flags)


def planned(text: str | None = None, folder: Path | None = None, **told: Any) -> Plan:
    return serve_plan.plan(load(text, folder, **told), {"XDG_RUNTIME_DIR": "/nowhere"})


def refusal(text: str | None = None, folder: Path | None = None, **told: Any) -> str:
    with pytest.raises(BadArgument) as error:
        planned(text, folder, **told)
    return str(error.value)


# --- where a value comes from --------------------------------------------------------------------


def test_flags_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    text = '[pool]\ndram = "1MiB"\npolicy = "lru"\nprefault = "off"\n'
    told = {"KVPOOL_SERVE_DRAM": "2MiB", "KVPOOL_SERVE_POLICY": "lfu", "dram": "3MiB"}
    settings = load(text, tmp_path, **told)
    pool = settings.config.pool
    assert (pool.dram, pool.policy, pool.prefault) == ("3MiB", "lfu", "off")
    assert settings.origins["pool", "dram"] == "--dram"
    assert settings.origins["pool", "policy"] == "$KVPOOL_SERVE_POLICY"
    assert settings.origins["pool", "prefault"] == str(tmp_path / "kvpool.toml")
    assert settings.origins["pool", "huge_pages"] == "default"


def test_a_variable_can_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("[server]\nlanes = 2\n")
    settings = serve_config.load(None, {"KVPOOL_SERVE_CONFIG": str(path)})
    assert settings.config.server.lanes == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_a_flag_and_a_variable_and_stands_in_the_file(
    name: str, tmp_path: Path
) -> None:
    (option,) = [each for each in serve_config.options() if each.name == name]
    yes_or_no = "false" if option.default else "true"
    text = {int: "3", float: "0.125", bool: yes_or_no}.get(option.kind, "")
    if not text:
        kinds = str(option.kind)
        text = next((t for k, t in (("float", "3.5"), ("bool", "true")) if k in kinds), "7")
    is_text = "str" in str(option.kind)
    by_flag = load(**{name: text})
    by_variable = load(**{option.variable: text})
    value = json.dumps(text) if is_text else text
    by_file = load(f"[{option.table}]\n{option.key} = {value}\n", tmp_path)
    found = [getattr(getattr(s.config, option.table), option.key) for s in (by_flag, by_variable)]
    assert found[0] == found[1] == getattr(getattr(by_file.config, option.table), option.key)
    assert found[0] != option.default


def test_names_are_told_apart() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_the_defaults_are_those_of_open() -> None:
    parameters = inspect.signature(kvpool.open).parameters
    for option in serve_config.options():
        if option.table in ("pool", "ssd") and option.name != "dram":
            assert option.default == parameters[option.name].default, option.name
    config = load().config
    assert planned().node["ssd"] == ""
    assert (config.ssd.free_floor, config.ssd.io_threads, config.ssd.timeout) == (None,) * 3
    with_tier = planned(ssd="tier", ssd_capacity="1GiB").node
    assert with_tier["ssd_io_threads"] == SSD_IO_THREADS
    assert with_tier["ssd_timeout_s"] == SSD_TIMEOUT_S
    assert with_tier["ssd_free_floor"] == kvpool.parse_size(SSD_FREE_FLOOR)


def test_every_option_of_open_but_the_clock_is_there() -> None:
    there = set(NAMES)
    assert set(inspect.signature(kvpool.open).parameters) - {"clock"} <= there


def test_what_is_shown_as_toml_gives_the_same_again(tmp_path: Path) -> None:
    settings = load(None, None, dram="3MiB", tau_s="60", listen='a"b', KVPOOL_SERVE_LANES="2")
    shown = serve_config.as_toml(settings)
    assert load(shown, tmp_path).config == settings.config
    (line,) = [line for line in shown.splitlines() if line.endswith("--dram")]
    assert line.split() == ["dram", "=", '"3MiB"', "#", "--dram"]


def test_json_has_every_value_and_its_origin() -> None:
    shown = json.loads(serve_config.as_json(load(dram="3MiB")))
    assert shown["pool"]["dram"] == {"value": "3MiB", "from": "--dram"}
    assert shown["log"]["level"] == {"value": "info", "from": "default"}
    count = sum(len(table) for table in shown.values())
    assert count == len(NAMES)


# --- what cannot be meant ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[pool]\ndrm = 1", "[pool] has no option 'drm'; did you mean 'dram'?"),
        ("[poool]\ndram = 1", "there is no table [poool]; did you mean 'pool'?"),
        ("[pool]\nsocket = 'x'", "[pool] has no option 'socket'; it belongs into [server]"),
        ("dram = '1GiB'", "there is no table [dram]; it belongs into [pool] dram"),
        ("pool = 5", "pool is a table; write [pool] above its options"),
        ("[server]\nlanes = 'two'", "[server] lanes is 'two': Expected `int`"),
        ("[server]\nlanes = '2'", "[server] lanes is '2': Expected `int`, got `str`"),
        ("[pool]\nhuge_pages = 1", "[pool] huge_pages is 1: Expected `bool`"),
        ("[pool]\ndram = 1.5", "[pool] dram is 1.5: Expected `int | str`"),
        ("[pool]\ndram = '8G'", "[pool] dram: '8G' has the unknown unit 'G'; write GiB"),
        ("[pool]\ndram = '1KiB'", "[pool] dram is 1024 bytes; it must be 2097152"),
        ("[pool]\npolicy = 'lur'", "[pool] policy is 'lur'; it can be temperature, lru"),
        ("[pool]\ntau_s = -1", "[pool] tau_s is -1.0; it must be"),
        ("[pool]\narena = 'sealed'\ndram_max = '8GiB'", "[pool] dram_max is 8589934592 bytes"),
        ("[ssd]\ncapacity = '1GiB'", "[ssd] capacity is '1GiB', but there is no SSD tier"),
        ("[ssd]\ndurability = 'yes'", "[ssd] durability is 'yes'; it can be async"),
        ("[server]\nlanes = 0", "[server] lanes is 0; it must be 1..16"),
        ("[server]\npin_share = nan", "[server] pin_share is nan; it must be"),
        ("[server]\ndrain_timeout = 5", "[server] drain_timeout is 5.0; it must be 0..4.5"),
        ("[server]\nsocket_mode = '888'", "[server] socket_mode is '888'; write it as for chmod"),
        ("[server]\nsocket_mode = 0o600", "[server] socket_mode is 384: Expected `str`"),
        ("[server]\nsocket = ''", "[server] socket names no socket"),
        ("[server]\nlisten = '7070'", "[server] listen is '7070'; write host:port"),
        ("[server]\nlisten = '::1:7070'", "put an IPv6 host in brackets"),
        ("[server]\nlisten = 'localhost:99999'", "[server] listen has the port 99999"),
        ("[server]\nlisten = 'no.such.host.invalid:1'", "no such host"),
        ("[log]\nformat = 'xml'", "[log] format is 'xml'; it can be text, json"),
        ("[pool\n", "is not TOML: "),
        ("[pool]\ndram = 1\ndram = 2", "is not TOML: "),
        ("a = " + "[" * 2000, "is not TOML: "),
    ],
)
def test_a_mistake_in_the_file_is_named_with_file_and_table(
    text: str, complaint: str, tmp_path: Path
) -> None:
    told = refusal(text, tmp_path)
    assert told.startswith(str(tmp_path / "kvpool.toml"))
    assert complaint in told


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ({"KVPOOL_SERVE_DRM": "1"}, "$KVPOOL_SERVE_DRM is no option; did you mean"),
        ({"KVPOOL_SERVE_LANES": "x"}, "$KVPOOL_SERVE_LANES is 'x': Expected `int`"),
        ({"KVPOOL_SERVE_DRAM": "8G"}, "$KVPOOL_SERVE_DRAM: '8G' has the unknown unit"),
        ({"KVPOOL_SERVE_HUGE_PAGES": "maybe"}, "$KVPOOL_SERVE_HUGE_PAGES is 'maybe'"),
        ({"dram": "8G"}, "--dram: '8G' has the unknown unit"),
        ({"lanes": "17"}, "--lanes is 17; it must be 1..16"),
        ({"ssd_admit": "all"}, "--ssd-admit is 'all', but there is no SSD tier"),
        ({"ssd": "t", "durability": "durable", "ssd_admit": "second_use"}, "--ssd-admit is"),
        ({"token_file": "t"}, "--token-file is 't', but nothing is listened for on TCP"),
        ({"token_file": "absent", "listen": "localhost:1"}, "cannot be read: No such file"),
        ({"socket": "s" * 200}, "a unix socket has 107 at most"),
    ],
)
def test_a_mistake_elsewhere_is_named_as_it_was_written(
    told: dict[str, str], complaint: str
) -> None:
    assert complaint in refusal(**told)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"t" * 4097, b"\xff\xfe"])
def test_a_file_that_holds_no_token(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    assert "--token-file is" in refusal(token_file=str(path), listen="localhost:1")


def test_a_token_is_read_without_its_line_s_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    found = planned(token_file=str(path), listen="localhost:1")
    assert found.tenants["default"].token == "s3cret"
    assert "s3cret" not in repr(found)


@pytest.mark.parametrize("listen", ["0.0.0.0:7070", "[::]:7070", "192.0.2.1:7070"])
def test_who_listens_beyond_this_host_is_told_why_not(listen: str) -> None:
    told = refusal(listen=listen)
    assert "other machines could connect" in told
    assert "listen on 127.0.0.1 or [::1]" in told


@pytest.mark.parametrize("listen", ["127.0.0.1:7070", "localhost:0", "127.9.8.7:1"])
def test_loopback_is_listened_on(listen: str) -> None:
    assert len(planned(listen=listen).tcp) >= 1


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, complaint in [
        (tmp_path / "absent.toml", "No such file"),
        (tmp_path, "Is a directory"),
    ]:
        with pytest.raises(BadArgument, match=complaint):
            serve_config.load(str(path), {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadArgument, match="not UTF-8"):
        serve_config.load(str(tmp_path / "binary.toml"), {})
    (tmp_path / "huge.toml").write_bytes(b"#" * (serve_config.FILE_BYTES_MAX + 1))
    with pytest.raises(BadArgument, match="this is no configuration"):
        serve_config.load(str(tmp_path / "huge.toml"), {})


# --- what is opened ------------------------------------------------------------------------------


def test_the_plan_has_what_the_core_takes() -> None:
    plan = planned(dram="8MiB", pin_share="0.5", staging="2MiB", lanes="3", max_connections="99")
    assert plan.server == {
        "max_sources": 99,
        "lanes": 3,
        "staging_bytes": 2 << 20,
        "pin_bytes": 4 << 20,
    }
    assert plan.node["dram"] == 8 << 20
    assert plan.node["dram_max"] == 32 << 20
    assert plan.node["sealed"] is False
    assert plan.socket_mode == 0o600


def test_two_plans_have_different_salts() -> None:
    first, second = planned(), planned()
    salts = {each.node["salt"] for each in (first, second, first.tenants["default"])}
    salts.add(second.tenants["default"].node["salt"])
    assert len(salts) == 4
    assert unsalted(first) == unsalted(second)


def unsalted(plan: Plan) -> Plan:
    tenants = {
        name: dataclasses.replace(each, node={**each.node, "salt": 0})
        for name, each in plan.tenants.items()
    }
    return dataclasses.replace(plan, node={**plan.node, "salt": 0}, tenants=tenants)


# --- the command ---------------------------------------------------------------------------------


def kvpool_serve(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if "KVPOOL_SERVE" not in name}
    return subprocess.run(
        [sys.executable, "-m", "kvpool", "serve", *words],
        env={**plain, "NO_COLOR": "1", "COLUMNS": "120", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_shows_the_configuration_and_opens_nothing(tmp_path: Path) -> None:
    socket = str(tmp_path / "node.sock")
    words = ("--print-config", "--json", "--socket", socket, "--no-huge-pages")
    done = kvpool_serve(*words, KVPOOL_SERVE_DRAM="5MiB")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["pool"]["dram"] == {"value": "5MiB", "from": "$KVPOOL_SERVE_DRAM"}
    assert shown["pool"]["huge_pages"] == {"value": False, "from": "--huge-pages"}
    assert shown["server"]["socket"] == {"value": socket, "from": "--socket"}
    assert os.listdir(tmp_path) == []


def test_the_command_s_mistakes_end_with_2() -> None:
    for words, complaint in [
        (("--dram", "8G"), "kvpool: error: --dram: '8G' has the unknown unit"),
        (("--config", "absent.toml"), "kvpool: error: absent.toml: cannot be read"),
        (("--json",), "--json goes with --print-config"),
        (("--bogus",), "No such option"),
    ]:
        done = kvpool_serve(*words)
        assert done.returncode == 2, done.stderr
        assert complaint in done.stderr
        assert done.stdout == ""


def test_help_names_every_option() -> None:
    text = kvpool_serve("--help").stdout
    for option in serve_config.options():
        assert option.flag in text
