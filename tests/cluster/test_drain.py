"""What is hot at one daemon gets a second place, and one that is drained takes nothing along."""

import pathlib

from tests.cluster.etcd import Etcd
from tests.cluster.town import are_known, blocks_at, comes, town
from tests.operated import command, json_of

COUNT = 40


def test_what_a_drained_daemon_had_is_at_the_others(tmp_path: pathlib.Path, etcd: Etcd) -> None:
    """Its part of the directory is another's once it is no member: of a list it would stay one."""
    with town(tmp_path, etcd, 3, dram="64MiB") as made:
        leaves, *others = made.daemons
        numbers = range(COUNT)
        with blocks_at(leaves) as ours:
            ours.put_all(numbers)
        with blocks_at(others[0]) as theirs:
            are_known(theirs, numbers)
        told = json_of("drain", "--timeout", "60", "--address", leaves.unix_address)
        assert (told["state"], told["blocks"], told["prefixes_left"]) == ("done", COUNT, 0)
        again = json_of("drain", "--address", leaves.unix_address)
        assert again["state"] == "done"
        leaves.kill()
        for each in others:
            with blocks_at(each) as theirs:
                comes(lambda at=theirs: at.get(numbers) == COUNT, "the others have all of it")


def test_a_daemon_that_is_alone_says_so(tmp_path: pathlib.Path) -> None:
    with town(tmp_path, None, 1) as made:
        with blocks_at(made.daemons[0]) as ours:
            ours.put_all(range(5))
        ended = command("drain", "--address", made.daemons[0].unix_address, status=1)
        assert "partly" in ended.stdout


def test_what_is_hot_is_copied_unasked(tmp_path: pathlib.Path) -> None:
    with town(tmp_path, None, 2, dram="64MiB", cluster_max_replicas=2) as made:
        first, second = made.daemons
        numbers = range(COUNT)
        with blocks_at(first) as ours:
            ours.put_all(numbers)
            for _ in range(12):
                assert ours.get(numbers) == COUNT
            with blocks_at(second) as theirs:
                are_known(theirs, numbers)
                theirs_here = theirs.pool.stats
                comes(lambda: theirs_here()["blocks"] == COUNT, "the copies are there")
