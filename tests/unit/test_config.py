"""Sizes: exact, never guessed, and errors that say what to write instead."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.config import SIZE_BYTES_MAX, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (65536, 65536),
        ("65536", 65536),
        ("64KiB", 65536),
        ("64 kib", 65536),
        (" 64KiB ", 65536),
        ("64KB", 64000),
        ("1.5GiB", 3 << 29),
        ("0.5 KiB", 512),
        ("1_000B", 1000),
        ("2TB", 2 * 10**12),
        ("4PiB", 4 << 50),
        (SIZE_BYTES_MAX, SIZE_BYTES_MAX),
    ],
)
def test_size_is_read_exactly(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("64K", "write KiB"),
        ("1g", "write GiB"),
        ("64kbit", "unknown unit 'kbit'"),
        ("", "not a size"),
        ("KiB", "not a size"),
        ("-1KiB", "not a size"),
        ("1e6", "not a size"),
        ("٣KiB", "not a size"),
        ("1KiB\0", "not a size"),
        ("0.3B", "not a whole number"),
        ("8192PiB", "more than"),
        ("9" * 65, "65 characters"),
        (-1, "outside"),
        (SIZE_BYTES_MAX + 1, "outside"),
    ],
)
def test_bad_size_says_what_is_wrong(text: str | int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_size(text)


@pytest.mark.parametrize("value", [True, 1.5, None, b"1"])
def test_only_text_and_int_are_sizes(value: object) -> None:
    with pytest.raises(TypeError, match="number of bytes or text"):
        parse_size(value)  # type: ignore[arg-type]


@given(st.text(max_size=80))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_size(text) <= SIZE_BYTES_MAX


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_size_is_shown_short(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 1 << 62))
def test_a_shown_size_reads_back_to_about_the_same(size_bytes: int) -> None:
    shown = format_size(size_bytes)
    number, unit = shown.split()
    back = parse_size(f"1 {unit}") * float(number)
    assert back == pytest.approx(size_bytes, rel=0.06)
