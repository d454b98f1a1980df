"""Files of the status page: ours beside this module, the chart library from its own package.

Promises:  1. only names that are listed here are served, so no path leads elsewhere;
           2. without the library the page still gets a script, which defines nothing: it then shows
              tables and says what to install.
Memory: the files as they are sent, under 300 KB with the library (gzip).
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent / "page"
CHARTS = "chart.js"
_CHARTS_IN_PACKAGE = ("chartkick", "django/static/chartkick/Chart.bundle.js")
_NO_CHARTS = b"// No chart library here: pip install 'kvpool[page]'.\n"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class File:
    """Ready to be sent."""

    content_type: str
    plain: bytes
    packed: bytes  # gzip
    tag: str  # an ETag


def names() -> frozenset[str]:
    """What there is below /static/."""
    own = {each.name for each in PAGE.iterdir() if each.suffix in _TYPES}
    return frozenset({*own, CHARTS} - {"index.html"})


@functools.cache
def file(name: str) -> File:
    """Reads it once. name: of names(), or index.html. Raises OSError."""
    data = _charts() if name == CHARTS else (PAGE / name).read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    return File(_TYPES[Path(name).suffix], data, gzip.compress(data, mtime=0), tag)


def has_charts() -> bool:
    """Whether the chart library is installed."""
    return _charts_path() is not None


def _charts() -> bytes:
    path = _charts_path()
    return _NO_CHARTS if path is None else path.read_bytes()


def _charts_path() -> Path | None:
    """The package is looked for, not imported: its code has no use here."""
    package, inside = _CHARTS_IN_PACKAGE
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / inside
        if path.is_file():
            return path
    return None
