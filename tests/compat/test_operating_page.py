"""docs/operating.md names the options of `kvpool serve` that there are, and its file is one."""

import re
from pathlib import Path

from kvpool.serve_config import load, options
from tests.pools import ROOT

PAGE = (ROOT / "docs" / "operating.md").read_text()
ROW = re.compile(r"^\| \[(\w+)\] \| `(\w+)` \| `(--[\w-]+)`[^|]*\| ([^|]*) \|", re.MULTILINE)


def test_the_table_has_every_option_under_its_names() -> None:
    said = [match[:3] for match in ROW.findall(PAGE)]
    assert said == [(each.table, each.key, each.flag) for each in options()]


def test_the_table_has_every_default() -> None:
    said = {match[2]: match[3].strip("`") for match in ROW.findall(PAGE)}
    words = {"True": "yes", "False": "no", str(1 / 128): "1/128"}
    known = {each.flag: each.default for each in options() if each.default is not None}
    shown = {flag: words.get(str(value), str(value)) for flag, value in known.items()}
    assert {flag: said[flag] for flag in shown} == {
        flag: text.removesuffix(".0") for flag, text in shown.items()
    }


def test_the_example_of_a_file_is_understood(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    file = tmp_path / "kvpool.toml"
    file.write_text(example)
    config = load(str(file), {}).config
    assert config.pool.arena == "sealed"
    assert config.server.listen == "127.0.0.1:7070"
    assert config.ssd.capacity == "1TiB"
