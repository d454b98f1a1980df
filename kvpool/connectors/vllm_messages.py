"""What the scheduler's half and the workers' halves of the connector tell each other, per step.

Engine hashes travel, not keys: a key belongs to one namespace, and every rank has its own. vLLM
takes these classes for its own kinds of message because connectors/vllm.py registers them as such;
nothing here needs vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Part:
    """Blocks of one KV cache group: engine block ids and the hashes of what is in them."""

    group: int
    pages: list[int]
    hashes: list[bytes]
    parent: bytes | None = None  # hash of the block before the first one


@dataclass
class Load:
    """To be delivered before the request goes on."""

    request: str
    adapter: str  # digest of its LoRA adapter, or empty
    parts: list[Part]
    generation: int = 0  # of the lookup that found it


@dataclass
class Save:
    """To be stored when the step has computed it."""

    number: int  # of the save, for who waits to hear of it; 0: nobody does
    adapter: str
    parts: list[Part]


@dataclass
class Step:
    """All work of one engine step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    is_idle: bool = False  # nothing is computed in it
    generation: int = 0  # resets so far: which namespaces its blocks are in


@dataclass
class Handshake:
    """The namespaces of one rank, by KV cache group, as Manifest.pack() has them."""

    manifests: list[bytes]


@dataclass
class Report:
    """What a worker did since its last report."""

    load_bytes: int = 0
    load_s: float = 0.0
    stored: dict[int, int] = field(default_factory=dict)  # save number -> ranks that stored it all

    def aggregate(self, other: Report) -> Report:
        """Of two workers, one."""
        # Ranks load at the same time: the slowest one decides how long a load takes.
        return Report(
            max(self.load_bytes, other.load_bytes),
            max(self.load_s, other.load_s),
            _sum(self.stored, other.stored),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.load_bytes and not self.stored


def _sum(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


def blocks_of(parts: list[Part]) -> int:
    """Blocks in all groups."""
    return sum(len(part.pages) for part in parts)
