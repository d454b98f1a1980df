"""Tensors without the buffer protocol: torch's interface, met by a stand-in and by torch itself.

The stand-in offers exactly what the pool asks a torch tensor for, so that this path runs on
machines without torch; where torch is importable, the same is asked of it.
"""

import importlib.util
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import BadArgument, BadType
from tests.pools import BLOCK_BYTES, key, keys, opaque, opened, payload, payloads

N = 3
KEYS = keys(range(N))
SIZE = N * BLOCK_BYTES

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: its own tensors were not tried, only a stand-in for them",
)


class Tensor:
    """What kvpool uses of torch.Tensor, over numpy memory. Not a buffer, as torch's are not."""

    def __init__(self, array: np.ndarray[Any, Any], device: str = "cpu") -> None:
        self.array = array
        self.device = SimpleNamespace(type=device)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def element_size(self) -> int:
        return self.array.itemsize

    def numel(self) -> int:
        return self.array.size

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def tolist(self) -> Any:
        return self.array.tolist()


def tensor(content: bytes, dtype: Any = np.uint16) -> Tensor:
    return Tensor(np.frombuffer(content, dtype).copy())


@pytest.fixture
def space() -> Iterator[kvpool.Namespace]:
    with opened() as pool:
        yield pool.namespace(opaque())


def test_tensors_go_in_and_out(space: kvpool.Namespace) -> None:
    assert space.put(KEYS, tensor(payloads(KEYS))).stored == N
    out = tensor(bytes(SIZE), np.float32)
    assert space.get_into(KEYS, out) == N
    assert out.array.tobytes() == payloads(KEYS)
    each = [tensor(bytes(BLOCK_BYTES)) for _ in KEYS]
    assert space.get_into(KEYS, each) == N
    assert [one.array.tobytes() for one in each] == [payload(one) for one in KEYS]
    with space.reserve(key(9)) as slot:
        assert slot.buffer is not None
        slot.buffer[:] = payload(key(9))


def test_tensors_can_be_registered_and_hold_offsets(space: kvpool.Namespace) -> None:
    memory = tensor(payloads(KEYS))
    region = space.pool.register(memory)
    assert (region.nbytes, region.writable) == (SIZE, True)
    offsets = Tensor(np.array([0, BLOCK_BYTES, 2 * BLOCK_BYTES]))
    assert space.put(KEYS, region, offsets=offsets).stored == N
    memory.array[:] = 0
    assert space.get_into(KEYS, region, offsets=offsets) == N
    assert memory.array.tobytes() == payloads(KEYS)


def test_a_region_keeps_its_tensor(space: kvpool.Namespace) -> None:
    space.put(KEYS, payloads(KEYS))
    region = space.pool.register(tensor(bytes(SIZE)))
    assert space.get_into(KEYS, region, offsets=[0, 0, 0]) == N


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (Tensor(np.zeros(SIZE, np.uint8), device="cuda"), "tensor on cuda"),
        (Tensor(np.zeros((SIZE, 2), np.uint8)[:, 0]), "contiguous"),
        (Tensor(np.zeros(SIZE - 2, np.uint8)), "12286 bytes"),
    ],
)
def test_a_tensor_that_cannot_be_used_is_named(
    space: kvpool.Namespace, made: Tensor, complaint: str
) -> None:
    for call in (space.put, space.get_into):
        with pytest.raises(BadArgument, match=complaint):
            call(KEYS, made)


class Broken(Tensor):
    """A tensor one of whose answers is missing, wrong or raises."""

    def __init__(self, name: str, answer: Any) -> None:
        super().__init__(np.zeros(SIZE, np.uint8))
        self.broken_name, self.broken_answer = name, answer

    def __getattribute__(self, name: str) -> Any:
        if name in ("broken_name", "broken_answer"):
            return super().__getattribute__(name)
        if name != self.__dict__.get("broken_name"):
            return super().__getattribute__(name)
        answer = self.broken_answer
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("name", ["device", "is_contiguous", "data_ptr", "numel", "element_size"])
@pytest.mark.parametrize(
    "answer", [None, "text", -1, lambda: "text", lambda: 1 / 0, RuntimeError("lost"), 1 << 80]
)
def test_a_tensor_that_answers_badly_is_a_bad_type(
    space: kvpool.Namespace, name: str, answer: Any
) -> None:
    broken = Broken(name, answer)
    for call in (
        lambda: space.put(KEYS, broken),
        lambda: space.get_into(KEYS, broken),
        lambda: space.pool.register(broken),
    ):
        with pytest.raises(BadType, match="Broken"):
            call()


def test_tensors_can_be_layers() -> None:
    manifest = kvpool.Manifest(
        model="m", layers=2, kv_heads=2, head_dim=4, block_tokens=4, dtype="bfloat16"
    )
    pages = np.random.default_rng(1).integers(0, 2**16, (2, 6, 2, 4, 2, 4), np.uint16)
    with opened() as pool:
        space = pool.namespace(manifest)
        chain = space.keys(range(8))
        layers = [Tensor(layer) for layer in pages]
        assert space.save(layers, Tensor(np.array([5, 1])), chain).stored == 2
        back = [Tensor(np.zeros_like(layer)) for layer in pages]
        assert space.load(back, [0, 3], chain) == 2
        for layer, before in zip(back, pages, strict=True):
            assert (layer.array[[0, 3]] == before[[5, 1]]).all()
        on_device = [Tensor(layer, device="cuda") for layer in pages]
        with pytest.raises(BadArgument, match="only CPU"):
            space.layers(on_device)


@needs_torch
def test_torch_tensors_of_every_kind() -> None:
    import torch

    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(KEYS, payloads(KEYS))
        names = ["bfloat16", "float16", "uint8", "float8_e4m3fn"]
        for dtype in [getattr(torch, name) for name in names if hasattr(torch, name)]:
            out = torch.zeros(SIZE, dtype=torch.uint8).view(dtype)
            assert space.get_into(KEYS, out) == N
            assert bytes(out.view(torch.uint8).tolist()) == payloads(KEYS)
            other = pool.namespace(opaque(salt=str(dtype)))
            assert other.put(KEYS, out).stored == N
            assert other.get_into(KEYS, [torch.zeros_like(out[: out.numel() // N])] * N) == N
        region = pool.register(out)
        assert space.get_into(KEYS, region, offsets=torch.tensor([0, 8, 16])) == N
        with pytest.raises(BadArgument, match="contiguous"):
            space.get_into(KEYS, torch.zeros(SIZE, 2, dtype=torch.uint8)[:, 0])
        if torch.cuda.is_available():
            with pytest.raises(BadArgument, match="cuda"):
                space.get_into(KEYS, torch.zeros(SIZE, dtype=torch.uint8, device="cuda"))


@needs_torch
def test_torch_pages_of_bfloat16() -> None:
    import torch

    manifest = kvpool.Manifest(model="m", layers=2, kv_heads=2, head_dim=8)
    with opened() as pool:
        space = pool.namespace(manifest)
        chain = space.keys(torch.arange(32).tolist())
        pages = [torch.randn(4, 2, 16, 2, 8).to(torch.bfloat16) for _ in range(2)]
        assert space.save(pages, torch.tensor([3, 0]), chain).stored == 2
        back = [torch.zeros_like(page) for page in pages]
        assert space.load(back, torch.tensor([1, 2], dtype=torch.int32), chain) == 2
        for page, other in zip(pages, back, strict=True):
            assert torch.equal(page[[3, 0]], other[[1, 2]])


def test_a_tensor_may_be_used_by_many_threads(space: kvpool.Namespace) -> None:
    space.put(KEYS, payloads(KEYS))
    outs = [tensor(bytes(SIZE)) for _ in range(4)]

    def get(out: Tensor) -> None:
        for _ in range(50):
            assert space.get_into(KEYS, out) == N

    threads = [threading.Thread(target=get, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out.array.tobytes() == payloads(KEYS) for out in outs)
