"""Namespaces: one per manifest, never mixed, and a clash of names says in which fields."""

import threading
from typing import Any

import pytest

import kvpool
from kvpool import BadArgument, BadType, Manifest, ManifestMismatch
from kvpool.keys import prefix_keys
from tests.pools import got, key, keys, opaque, opened, payloads, shown

SOME = keys(range(3))


def test_one_manifest_is_one_namespace() -> None:
    with opened() as pool:
        one, other = pool.namespace(opaque()), pool.namespace(opaque())
        one.put(SOME, payloads(SOME))
        assert got(other, SOME) == 3
        assert one.id == other.id == opaque().namespace_id
        assert pool.stats()["namespaces"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"name": "prod"},
        {"revision": "r2"},
        {"weights": "w2"},
        {"dtype": "float16"},
        {"block_tokens": 2},
        {"layers": 2},
        {"kv_heads": 2},
        {"head_dim": 2},
        {"tp": (0, 2)},
        {"pp": (0, 2)},
        {"adapter": "lora"},
        {"salt": "tenant"},
        {"engine": "attention=A"},
        {"epoch": 1},
        {"hash": "xxh3"},
        {"block_bytes": 4097},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_kv_that_differs_in_any_field_never_meets(fields: dict[str, Any]) -> None:
    with opened() as pool:
        mine, theirs = pool.namespace(opaque()), pool.namespace(opaque(**{"model": "m", **fields}))
        mine.put(SOME, payloads(SOME))
        assert got(theirs, SOME) == 0
        size = theirs.manifest.block_bytes
        assert size is not None
        theirs.put(SOME[:1], b"\xee" * size)
        assert got(mine, SOME) == 3
        assert theirs.remove(SOME) == 1
        assert got(mine, SOME) == 3


def test_the_same_tokens_have_other_keys_in_every_namespace() -> None:
    with opened() as pool:
        spaces = [pool.namespace(opaque(salt=salt)) for salt in ("a", "b")]
        assert spaces[0].keys([1, 2]).tobytes() != spaces[1].keys([1, 2]).tobytes()
        assert spaces[0].fold([b"h"]).tobytes() != spaces[1].fold([b"h"]).tobytes()


def test_a_clash_of_names_tells_every_differing_field() -> None:
    with opened() as pool:
        pool.namespace(opaque(name="prod"))
        other = opaque(model="n", name="prod", salt="s", tp=(1, 2))
        with pytest.raises(ManifestMismatch) as caught:
            pool.namespace(other)
        assert caught.value.name == "prod"
        assert caught.value.differing == {
            "model": ("m", "n"),
            "salt": ("", "s"),
            "tp": ((0, 1), (1, 2)),
        }
        text = str(caught.value)
        for part in ("'prod'", "model: stored 'm', given 'n'", "salt: stored '', given 's'", "tp:"):
            assert part in text
        assert "revision" not in text
        # Nothing was made for it, and the name still means what it meant.
        assert pool.stats()["namespaces"] == 1
        assert pool.namespace(opaque(name="prod")).id == opaque(name="prod").namespace_id


def test_manifests_without_a_name_cannot_clash() -> None:
    with opened() as pool:
        assert pool.namespace(opaque()).id != pool.namespace(opaque(salt="s")).id


def test_names_belong_to_one_pool() -> None:
    with opened() as one, opened() as other:
        one.namespace(opaque(name="prod"))
        other.namespace(opaque(name="prod", salt="s"))


def test_a_namespace_that_could_not_be_made_does_not_take_the_name() -> None:
    with opened("2MiB", dram_max="2MiB") as pool:
        with pytest.raises(BadArgument, match="does not fit"):
            pool.namespace(opaque(name="prod", block_bytes=4 << 20))
        pool.namespace(opaque(name="prod"))


@pytest.mark.parametrize("manifest", [None, "m", {"model": "m"}, b"", 5, Manifest], ids=shown)
def test_only_a_manifest_names_a_namespace(manifest: Any) -> None:
    with opened() as pool, pytest.raises(BadType, match="manifest is"):
        pool.namespace(manifest)


def test_block_sizes_have_a_limit_of_different_ones() -> None:
    with opened() as pool:
        for pages in range(1, 257):
            pool.namespace(opaque(block_bytes=pages * 4096))
        with pytest.raises(BadArgument, match="256 different block sizes"):
            pool.namespace(opaque(block_bytes=257 * 4096))
        pool.namespace(opaque("n", block_bytes=4095))  # shares the slots of 4096


def test_drop_empties_one_namespace_at_once_and_leaves_the_others() -> None:
    with opened() as pool:
        mine, theirs = pool.namespace(opaque()), pool.namespace(opaque(salt="s"))
        for space in (mine, theirs):
            space.put(SOME, payloads(SOME))
        assert mine.drop() == 3
        assert got(mine, SOME) == 0
        assert got(theirs, SOME) == 3
        assert mine.drop() == 0
        assert mine.put(SOME, payloads(SOME)).stored == 3
        assert got(mine, SOME) == 3


def test_memory_of_a_dropped_namespace_comes_back() -> None:
    with opened("4MiB", dram_max="4MiB") as pool:
        space = pool.namespace(opaque(block_bytes=1 << 20))
        for _ in range(5):
            assert space.put(SOME, payloads(SOME, 1 << 20)).stored == 3
            assert space.drop() == 3
        assert pool._node.settle(10)
        assert pool.stats()["bytes_taken"] == 0
        assert pool.stats()["blocks_dropped_not_swept"] == 0


def test_remove_takes_exactly_what_is_there() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(SOME, payloads(SOME))
        assert space.remove([SOME[1], key(99), SOME[1]]) == 1
        assert [space.lookup([each]).blocks for each in SOME] == [1, 0, 1]
        assert got(space, SOME) == 1
        assert space.remove([]) == 0
        assert space.remove(b"".join(SOME)) == 2
        assert pool.stats()["bytes_taken"] == 0


def test_lookup_counts_leading_blocks_and_has_no_side_effect() -> None:
    clock = kvpool.ManualClock()
    with opened(clock=clock) as pool:
        space = pool.namespace(opaque())
        space.put(SOME[:2], payloads(SOME[:2]))
        clock.set(100)
        warm = [space.temperature(each) for each in SOME]
        before = pool.stats()
        hit = space.lookup([*SOME, SOME[0]])
        assert hit.blocks == 2
        assert list(hit.tiers) == [1, 1, 0, 0]  # nothing past the first miss
        assert bool(hit)
        assert not space.lookup([SOME[2], SOME[0]])
        assert space.lookup([]).blocks == 0
        assert [space.temperature(each) for each in SOME] == warm
        assert pool.stats() == before


def test_temperature_rises_with_use_and_absent_blocks_have_none() -> None:
    clock = kvpool.ManualClock()
    with opened(clock=clock, tau_s=10.0) as pool:
        space = pool.namespace(opaque())
        clock.set(100)
        space.put(SOME[:2], payloads(SOME[:2]))
        clock.set(101)
        got(space, SOME[:1])
        warm, cold, absent = (space.temperature(each) for each in SOME)
        assert warm is not None
        assert cold is not None
        assert warm > cold
        assert absent is None


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (b"short", BadArgument),
        (SOME, BadType),
        (b"".join(SOME), BadArgument),
        ("x" * 16, BadType),
        (None, BadType),
        (7, BadType),
    ],
    ids=shown,
)
def test_temperature_takes_one_key(given: Any, kind: type[Exception]) -> None:
    with opened() as pool, pytest.raises(kind, match="key"):
        pool.namespace(opaque()).temperature(given)


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
def test_keys_are_hashed_as_the_manifest_says(algorithm: str) -> None:
    with opened() as pool:
        space = pool.namespace(opaque(block_tokens=2, hash=algorithm))
        expected = prefix_keys(space.id, [1, 2, 3, 4], 2, extra=b"e", algorithm=algorithm)
        assert space.keys([1, 2, 3, 4], extra=b"e").tobytes() == expected.tobytes()


def test_keys_of_a_namespace_follow_its_manifest() -> None:
    with opened() as pool:
        space = pool.namespace(opaque(block_tokens=4, hash="xxh3"))
        tokens = list(range(11))
        whole = space.keys(tokens)
        assert len(whole) == 2
        continued = space.keys(tokens[4:], after=whole[0])
        for after in (whole[0], whole[:1], whole[0].tobytes(), bytearray(whole[0].tobytes())):
            assert space.keys(tokens[4:], after=after).tobytes() == continued.tobytes()
        assert continued.tobytes() == whole[1:].tobytes()
        assert space.keys(tokens, extra=b"image")[0].tobytes() != whole[0].tobytes()


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (16, BadType),
        ("x" * 16, BadType),
        ([0] * 16, BadType),
        (b"", BadArgument),
        (bytes(15), BadArgument),
        (b"".join(SOME), BadArgument),
    ],
    ids=shown,
)
def test_after_is_one_key(after: Any, kind: type[Exception]) -> None:
    with opened() as pool, pytest.raises(kind, match="after is"):
        pool.namespace(opaque()).keys([1, 2], after=after)


def test_many_threads_open_one_namespace() -> None:
    with opened() as pool:
        spaces: list[kvpool.Namespace] = []
        barrier = threading.Barrier(4)

        def open_it() -> None:
            barrier.wait()
            space = pool.namespace(opaque(name="shared"))
            space.put(SOME, payloads(SOME))
            spaces.append(space)

        threads = [threading.Thread(target=open_it) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({space.id for space in spaces}) == 1
        assert pool.stats()["puts"] == 3
        assert got(spaces[3], SOME) == 3
