"""What an operator tells a connector: read once, refused by name, and the token never shown."""

from typing import Any

import msgspec
import pytest

from kvpool import BadArgument, BadType
from kvpool.connectors.options import _CHECKS as CHECKS
from kvpool.connectors.options import Options, read_options
from tests.pools import shown

SECRET = "correct-horse"
ALL: dict[str, Any] = {
    "address": "unix:/run/kvpool/node.sock",
    "token": SECRET,
    "tenant": "acme",
    "save": "prompt",
    "min_blocks": 4,
    "load_timeout_s": 0.5,
    "connect_timeout_s": 3,
    "spawn": True,
    "spawn_dram": "1GiB",
    "spawn_ssd": "/var/lib/kvpool",
    "spawn_ssd_capacity": "10GiB",
    "save_buffer": "1.5 MiB",
    "salt": "team a",
    "weights": "release-7",
    "recompute_estimate": False,
    "wait_s": 0,
    "on_reset": "keep",
    "self_test": False,
}


def test_nothing_said_is_every_default() -> None:
    assert read_options({}) == Options()
    assert read_options(dict.fromkeys(CHECKS)) == Options()
    options = read_options({})
    assert (options.save_buffer, options.spawn_dram) == (256 << 20, 4 << 30)
    assert (options.load_timeout_s, options.connect_timeout_s, options.wait_s) == (5, 2, 10)


def test_every_option_is_read_and_sizes_are_bytes() -> None:
    options = read_options(ALL)
    expected = {
        **ALL,
        "spawn_dram": 1 << 30,
        "spawn_ssd_capacity": 10 << 30,
        "save_buffer": 3 << 19,
        "token_file": None,
    }
    assert msgspec.structs.asdict(options) == expected
    assert isinstance(options.connect_timeout_s, float)


def test_every_option_has_a_check() -> None:
    assert list(CHECKS) == list(Options.__struct_fields__)
    assert {*ALL, "token_file"} == set(CHECKS)


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"adress": "x"}, "'adress' is no option; did you mean 'address'?"),
        ({"save-buffer": 1}, "'save-buffer' is no option; did you mean 'save_buffer'?"),
        ({"qqq": 1}, "'qqq' is no option; there are address, token"),
        ({7: 1}, "7 is no option"),
        ({"address": "localhost"}, "address is 'localhost'; write unix:"),
        ({"address": "tcp://host"}, "write host:port"),
        ({"save": "everything"}, "save is 'everything'; it can be all, prompt, none"),
        ({"min_blocks": 0}, "min_blocks is 0; it must be 1..1048576"),
        ({"load_timeout_s": 0}, "load_timeout_s is 0; it must be 0.001..3600"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s is nan"),
        ({"connect_timeout_s": 3601}, "connect_timeout_s is 3601"),
        ({"wait_s": -1}, "wait_s is -1; it must be 0..3600"),
        ({"on_reset": "drop"}, "on_reset is 'drop'; it can be private, keep"),
        ({"save_buffer": "1M"}, "save_buffer: '1M' has the unknown unit 'M'; write MiB"),
        ({"save_buffer": 1000}, "save_buffer is 1000 bytes; it must be 1048576.."),
        ({"tenant": "a b"}, "tenant is 'a b'"),
        ({"token": ""}, "token has 0 bytes; a token has 1..4096"),
        ({"token_file": ""}, "token_file is an empty path"),
        ({"token": SECRET, "token_file": "t"}, "token and token_file are both given"),
        ({"salt": "x" * 4097}, "salt has 4097 bytes; at most 4096"),
        ({"weights": "\ud800"}, "weights has a lone surrogate"),
        ({"spawn_dram": "1GiB"}, "spawn_dram is 1073741824, but spawn is false"),
        ({"spawn_ssd": "/ssd", "spawn": False}, "spawn_ssd is '/ssd', but spawn is false"),
        ({"spawn": True, "spawn_ssd_capacity": "1GiB"}, "no folder for it; set spawn_ssd"),
        ({"spawn": True, "spawn_dram": "1MiB"}, "spawn_dram is 1048576 bytes"),
        ({"spawn": True, "address": "tcp://h:1"}, "address is 'tcp://h:1', but spawn is true"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_meant_is_named(extra: dict[Any, Any], complaint: str) -> None:
    with pytest.raises(BadArgument) as caught:
        read_options(extra)
    assert str(caught.value).startswith("kv_connector_extra_config: ")
    assert complaint in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("key", list(CHECKS))
@pytest.mark.parametrize("value", [[1], {"a": 1}, b"x", object()], ids=shown)
def test_a_value_of_a_wrong_type_is_named(key: str, value: Any) -> None:
    with pytest.raises(BadType, match=rf"^kv_connector_extra_config: {key}\b"):
        read_options({"spawn": True, key: value})


@pytest.mark.parametrize("key", ["spawn", "self_test", "recompute_estimate"])
@pytest.mark.parametrize("value", [0, 1, "true", "no"])
def test_yes_and_no_are_booleans(key: str, value: Any) -> None:
    with pytest.raises(BadType, match=f"{key} is .*; it must be bool"):
        read_options({key: value})


@pytest.mark.parametrize("key", ["min_blocks", "load_timeout_s", "save_buffer", "wait_s"])
def test_a_boolean_is_no_number(key: str) -> None:
    with pytest.raises(BadType, match=key):
        read_options({key: True})


@pytest.mark.parametrize("extra", [None, [], "x", 1], ids=shown)
def test_what_is_no_mapping(extra: Any) -> None:
    with pytest.raises(BadType, match="it must be a JSON object"):
        read_options(extra)


def test_another_place_is_named_in_messages() -> None:
    with pytest.raises(BadArgument, match=r"^secondary_tiers\[0\]: save is 'x'"):
        read_options({"save": "x"}, "secondary_tiers[0]")


def test_the_token_is_never_shown() -> None:
    options = read_options(ALL)
    assert options.token == SECRET
    for text in (repr(options), str(options), f"{options}", f"{[options]}"):
        assert SECRET not in text
        assert "token=..." in text
    assert "token=None" in repr(read_options({}))


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        read_options({}).salt = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("role", "saved"),
    [("kv_both", "all"), ("kv_producer", "prompt"), ("kv_consumer", "none"), (None, "all")],
)
def test_what_is_saved_follows_the_role_unless_it_was_said(role: str | None, saved: str) -> None:
    assert read_options({}).saves(role) == saved
    for said in ("all", "prompt", "none"):
        assert read_options({"save": said}).saves(role) == said
