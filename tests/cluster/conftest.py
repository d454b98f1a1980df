"""What the tests of clusters share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.etcd import Etcd, is_installed


@pytest.fixture(scope="session", autouse=True)
def _etcd_is_there() -> None:
    if not is_installed():
        pytest.skip("etcd is not installed")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path / "etcd") as one:
        yield one
