"""Configurations as text: equal ones are equal, different ones differ, strange ones are refused."""

import dataclasses
import enum
import random
from typing import Any

import pytest

from kvpool import BadArgument
from kvpool.connectors.canonical import VALUE_BYTES_MAX, digest_of, plain, text_of
from tests.pools import shown


class Colour(enum.Enum):
    RED = 1


class Name(enum.StrEnum):
    SOME = "some"


@dataclasses.dataclass
class Fields:
    a: int
    b: Any = None


class ToDict:
    def to_dict(self) -> dict[str, Any]:
        return {"a": 1, "b": Fields(2)}


class Dtype:
    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        ("x", "x"),
        (Colour.RED, "RED"),
        (Name.SOME, "some"),
        ((1, [2]), [1, [2]]),
        ({3, 1, 2}, [1, 2, 3]),
        ({1: {"_name_or_path": "x", "k": 2}}, {"1": {"k": 2}}),
        (Fields(1, Colour.RED), {"a": 1, "b": "RED"}),
        (ToDict(), {"a": 1, "b": {"a": 2, "b": None}}),
        (Dtype(), "bfloat16"),
        (int, "builtins.int"),
    ],
    ids=shown,
)
def test_values_have_one_plain_form(value: Any, expected: Any) -> None:
    assert plain(value, "config") == expected


@pytest.mark.parametrize("value", [object(), lambda: 1, b"bytes", 1j], ids=lambda v: str(type(v)))
def test_what_has_no_fields_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(BadArgument, match=r"config\.deep\.x holds a"):
        digest_of({"deep": [{"x": value}]}, "config")


def test_a_configuration_that_holds_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["again"] = value
    with pytest.raises(BadArgument, match="nested more than"):
        digest_of(value, "config")


def test_the_order_of_keys_and_sets_does_not_matter() -> None:
    keys = [f"key {number}" for number in range(20)]
    one = {key: {key, "x"} for key in keys}
    other = {key: {"x", key} for key in reversed(keys)}
    assert digest_of(one, "config") == digest_of(other, "config")
    assert digest_of([1, 2], "config") != digest_of([2, 1], "config")


def test_no_value_can_be_taken_for_the_next_part() -> None:
    texts = {
        text_of(parts)
        for parts in (
            [("a", "1"), ("b", "2")],
            [("a", "1; b=2")],
            [("a", "1%3B b=2")],
            [("a", "1%253B b=2")],
        )
    }
    assert len(texts) == 4
    assert text_of([("a", "1"), ("b", "x=y")]) == "a=1; b=x=y"


def test_a_long_value_is_told_by_its_digest() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    value = random.Random(seed).randbytes(VALUE_BYTES_MAX).hex()
    assert text_of([("a", value[:VALUE_BYTES_MAX])]) == f"a={value[:VALUE_BYTES_MAX]}"
    short = text_of([("a", value)])
    assert len(short) < 120
    assert short.startswith(f"a={value[:60]}...")
    other = value[:-1] + ("0" if value[-1] != "0" else "1")
    assert text_of([("a", other)]) != short
