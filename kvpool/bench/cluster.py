"""Nodes of one cluster, each in a network of its own on this machine (kvpool.lab): what a block
costs that another one has, what a death costs, the directory, and what copies of hot prefixes are
worth.

Needs root, iproute2, and for one of the rows etcd. The networks are in memory and share this
machine's cores with the nodes, the floor and the clients: figures tell how far kvpool is from raw
sockets there, not what a network gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvpool.bench import cluster_deaths, cluster_directory, cluster_fetch, cluster_hot
from kvpool.bench.rows import BenchError, Row
from kvpool.bench.scale import Scale
from kvpool.lab.cluster import Lab
from kvpool.lab.linux import LabError


def cluster(scale: Scale) -> Iterator[Row]:
    """All rows, the quick ones first."""
    try:
        with begun(2, dram=cluster_fetch.dram_bytes(scale)) as lab:
            yield from cluster_fetch.remote_gets(scale, lab)
        with begun(2, dram=cluster_deaths.DRAM) as lab:
            yield from cluster_deaths.misses(scale, lab)
        with begun(5, dram=cluster_directory.dram_bytes(scale)) as lab:
            yield from cluster_directory.lookups(scale, lab)
        yield from cluster_directory.published(scale)
        for shape, replicas in cluster_hot.cases(scale):
            with begun(cluster_hot.NODES, **cluster_hot.options(replicas)) as lab:
                yield cluster_hot.hot_prefix(scale, lab, shape, replicas)
    except LabError as error:
        raise BenchError(str(error)) from None


@contextlib.contextmanager
def begun(nodes: int, **options: Any) -> Iterator[Lab]:
    """So many nodes that know one another from a list; no copies are made unasked."""
    with Lab(nodes, has_etcd=False, **{"cluster_max_replicas": 1, **options}) as lab:
        lab.start()
        yield lab
