"""One browser for all pages: it takes a second or two to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.browser import Browser, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here (Debian: chromium)")
    browser = Browser(program)
    try:
        yield browser
    finally:
        browser.close()
