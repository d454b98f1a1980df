"""Why a prefix missed, in one sentence, from what a node knows about each of its blocks.

A prefix is as long as its first missing block lets it be, so that one block is judged; what is
behind it is only counted. Evidence that a node has (the block left, and why) goes before what can
only be guessed at (the same tokens are in another namespace), and that before "never stored".

Promises:  1. every cause names what it rests on; where the node has forgotten, that is said;
           2. pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvpool.errors import KvpoolError, told_apart
from kvpool.types import Reason

IN_DRAM, ON_SSD = 1, 2  # bits of `tiers`
LATE = ("ssd_late", "timed_out")  # misses of gets that a deadline made
_FIELDS_TOLD = 3


class Cause(enum.StrEnum):
    """For programs; the sentence says the same."""

    PRESENT = "present"
    DEADLINE = "deadline"
    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    NOT_WORTH = "not_worth"
    EVICTED_SSD = "evicted_ssd"
    REMOVED = "removed"
    DROPPED = "dropped"
    LOST = "lost"
    REFUSED = "refused"
    OTHER_NAMESPACE = "other_namespace"
    OTHER_TENANT = "other_tenant"


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """How a block left, or why it never came."""

    why: str
    ago_s: float = 0.0
    heat: float = 0.0
    ssd: bool = False  # it was on SSD when it left
    status: int | None = None  # refused: the Reason


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a node knows about one block: an entry of Node.explain()."""

    tiers: int = 0  # bits; 0 = nowhere
    heat: float = 0.0
    temperature: float = 0.0
    idle_s: float | None = None
    pins: int = 0
    gone: Gone | None = None
    ghost_heat: float | None = None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace that could have been meant, and how its manifest differs."""

    namespace: str
    differing: dict[str, tuple[Any, Any]]  # field -> (ours, theirs)
    present: int  # leading blocks of the same tokens there
    tenant: str = ""  # "": the same one


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to "why did this miss?"."""

    cause: Cause
    sentence: str
    advice: str
    blocks: int  # asked about
    leading: int  # present from the start on: what a get delivers
    in_dram: int  # of those
    on_ssd: int  # of those, there only
    first_missing: int | None
    behind: int  # present, and of no use before the missing one is back
    elsewhere: list[Elsewhere] = field(default_factory=list)


def known(entries: Sequence[Mapping[str, Any]]) -> list[Known]:
    """Raises KvpoolError for entries of a form that is not known here."""
    try:
        return msgspec.convert(list(entries), list[Known])
    except msgspec.ValidationError as error:
        raise KvpoolError(f"the node explains blocks in a form not known here: {error}") from None


def verdict(
    blocks: Sequence[Known],
    *,
    elsewhere: Sequence[Elsewhere] = (),
    failed: Mapping[str, int] | None = None,
    coldest: float | None = None,
) -> Verdict:
    """Of one prefix, its blocks in chain order.

    failed: misses of gets in this namespace by reason, for a prefix that is there and missed.
    coldest: heat of the coldest block that stays.
    """
    missing = next((at for at, block in enumerate(blocks) if not block.tiers), None)
    leading = len(blocks) if missing is None else missing
    in_dram = sum(1 for block in blocks[:leading] if block.tiers & IN_DRAM)
    cause, sentence, advice = (
        _all_there(blocks, in_dram, failed or {})
        if missing is None
        else _judged(blocks, missing, elsewhere, coldest)
    )
    return Verdict(
        cause=cause,
        sentence=sentence,
        advice=advice,
        blocks=len(blocks),
        leading=leading,
        in_dram=in_dram,
        on_ssd=leading - in_dram,
        first_missing=missing,
        behind=sum(1 for block in blocks[leading:] if block.tiers),
        elsewhere=list(elsewhere),
    )


# --- nothing is missing --------------------------------------------------------------------------


def _all_there(
    blocks: Sequence[Known], in_dram: int, failed: Mapping[str, int]
) -> tuple[Cause, str, str]:
    if not blocks:
        return (
            Cause.PRESENT,
            "The prefix is shorter than one block, so there is nothing to find.",
            "Only whole blocks are kept; see block_tokens of the manifest.",
        )
    where = f"{in_dram:,} in DRAM, {len(blocks) - in_dram:,} on SSD"
    late = sum(failed.get(reason, 0) for reason in LATE)
    if late and in_dram < len(blocks):
        return (
            Cause.DEADLINE,
            f"All {len(blocks):,} blocks are here ({where}), but gets of this namespace gave up on"
            f" {late:,} blocks that did not come from the SSD by their deadline.",
            "A longer ssd timeout, a faster disk, or more DRAM would deliver them.",
        )
    return (
        Cause.PRESENT,
        f"All {len(blocks):,} blocks are here now ({where}): a get would deliver them.",
        "If it missed before, it was stored since.",
    )


# --- the first missing block ---------------------------------------------------------------------


def _judged(
    blocks: Sequence[Known],
    missing: int,
    elsewhere: Sequence[Elsewhere],
    coldest: float | None,
) -> tuple[Cause, str, str]:
    block, which = blocks[missing], _which(blocks, missing)
    if block.gone is not None:
        return _left(block.gone, which, coldest)
    if block.ghost_heat is not None:
        heat = _warmth(block.ghost_heat, coldest)
        return (
            Cause.EVICTED,
            f"{which} was here and was evicted to make room, so long ago that the time is"
            f" forgotten{heat}.",
            _MORE_ROOM,
        )
    ours = _best([each for each in elsewhere if not each.tenant], missing)
    if ours is not None:
        return _in_another(ours, which)
    theirs = _best([each for each in elsewhere if each.tenant], missing)
    if theirs is not None:
        return (
            Cause.OTHER_TENANT,
            f"{which} was never stored by this tenant; tenant {theirs.tenant!r} has"
            f" {_how_many(theirs)} in its namespace {theirs.namespace!r}.",
            "Tenants share nothing, on purpose: connect as that tenant, or store it as this one.",
        )
    return _never(missing, which, elsewhere)


def _which(blocks: Sequence[Known], missing: int) -> str:
    return f"Block {missing + 1:,} of {len(blocks):,}"


def _warmth(heat: float, coldest: float | None) -> str:
    beside = "" if coldest is None else f", and the coldest block that stays has {coldest:.2f}"
    return f"; its heat was {heat:.2f}{beside}"


_MORE_ROOM = (
    "More DRAM or a larger SSD would have kept it: `kvpool size` says how much more would hit;"
    " `kvpool pin` keeps a prefix whatever comes."
)


def _left(gone: Gone, which: str, coldest: float | None) -> tuple[Cause, str, str]:
    ago = _ago(gone.ago_s)
    heat = _warmth(gone.heat, coldest)
    told = {
        "evicted": (
            Cause.EVICTED,
            f"{which} was evicted from DRAM {ago}, as room was needed and it was nowhere else"
            f"{heat}.",
            _MORE_ROOM,
        ),
        "not_worth": (
            Cause.NOT_WORTH,
            f"{which} left DRAM {ago} and was too cold for the SSD, which is full of warmer"
            f" blocks{heat}.",
            "A larger SSD (`kvpool resize --ssd-capacity`) or more DRAM would have kept it.",
        ),
        "evicted_ssd": (
            Cause.EVICTED_SSD,
            f"{which} was evicted from the SSD {ago}, as room was needed there{heat}.",
            "A larger SSD (`kvpool resize --ssd-capacity`) would have kept it.",
        ),
        "removed": (
            Cause.REMOVED,
            f"{which} was removed {ago}: somebody who uses the pool asked for that.",
            "Look for who calls remove(); it is no decision of the pool's.",
        ),
        "dropped": (
            Cause.DROPPED,
            f"{which} went {ago} with its whole namespace, which somebody dropped.",
            "Look for who calls drop() or `kvpool drop`; it is no decision of the pool's.",
        ),
        "lost": (
            Cause.LOST,
            f"{which} was lost {ago}: its copy on the SSD could not be read whole, so it is a miss"
            " and not a wrong answer.",
            "`kvpool stat` counts SSD faults, `kvpool ssd verify` names them: look at the disk.",
        ),
    }
    if gone.why in told:
        return told[gone.why]
    if gone.why == "refused":
        return _refused(gone, which)
    return (Cause.EVICTED, f"{which} left {ago}, for a reason not known here ({gone.why}).", "")


_OF_REFUSAL = {
    Reason.POOL_PINNED: "everything in the pool was pinned: fewer or shorter views, or more DRAM",
    Reason.INDEX_FULL: "the index has no place for more keys: fewer blocks, or larger ones",
    Reason.CHAIN_BROKEN: "a block before it was not stored: look at that one",
    Reason.TIMED_OUT: "another writer of the same block did not finish in time",
    Reason.DROPPED: "its namespace was dropped meanwhile",
    Reason.NO_MEMORY: "the machine had no memory for it: see `kvpool doctor`",
    Reason.FAILED: "whoever stored it gave up in the midst of it",
    Reason.TOO_LARGE: "a block is larger than the pool: more DRAM (`kvpool resize`)",
    Reason.DISCONNECTED: "the client lost its connection",
}


def _refused(gone: Gone, which: str) -> tuple[Cause, str, str]:
    reason = next((each for each in Reason if each == gone.status), None)
    name = f"status {gone.status}" if reason is None else reason.name.lower()
    advice = "" if reason is None else _OF_REFUSAL.get(reason, "")
    return (
        Cause.REFUSED,
        f"{which} was to be stored {_ago(gone.ago_s)}, and the pool refused it ({name}).",
        f"{advice[:1].upper()}{advice[1:]}." if advice else "",
    )


def _in_another(found: Elsewhere, which: str) -> tuple[Cause, str, str]:
    return (
        Cause.OTHER_NAMESPACE,
        f"{which} was never stored here, but namespace {found.namespace!r} has"
        f" {_how_many(found)}; {_differs(found)}.",
        "Namespaces never share blocks: give both engines the same manifest, if their KV is the"
        " same.",
    )


def _never(missing: int, which: str, elsewhere: Sequence[Elsewhere]) -> tuple[Cause, str, str]:
    near = [each for each in elsewhere if not each.tenant and len(each.differing) <= _FIELDS_TOLD]
    advice = "Was it put at all? `kvpool stat` counts what puts brought and what was refused."
    if near:
        nearest = min(near, key=lambda each: len(each.differing))
        advice = f"A namespace much like this one is {nearest.namespace!r}; {_differs(nearest)}."
    if missing:
        return (
            Cause.NEVER_STORED,
            f"The first {missing:,} blocks are here; {which.lower()} was never stored,"
            " or so long ago that the node has forgotten it: the tokens differ from there on, or"
            " nobody saved that far.",
            advice,
        )
    return (
        Cause.NEVER_STORED,
        f"{which} was never stored under this key, or so long ago that the node has forgotten it.",
        advice,
    )


def _best(candidates: Sequence[Elsewhere], missing: int) -> Elsewhere | None:
    """One that has what is missing here; of several the one most like this namespace."""
    having = [each for each in candidates if each.present > missing]
    return min(having, key=lambda each: len(each.differing)) if having else None


def _how_many(found: Elsewhere) -> str:
    return f"{found.present:,} blocks of the same prefix"


def _differs(found: Elsewhere) -> str:
    """In which fields, with both values of the first few."""
    followers = ("name", "block_bytes")  # they differ because others do
    differing = found.differing.items()
    pairs = [pair for pair in differing if pair[0] not in followers] or list(differing)
    told = ", ".join(
        "{} is {!r} here and {!r} there".format(name, *told_apart(name, *values))
        for name, values in pairs[:_FIELDS_TOLD]
    )
    more = f" and {len(pairs) - _FIELDS_TOLD} more fields differ" if pairs[_FIELDS_TOLD:] else ""
    return f"{told}{more}" if told else "its manifest is the same"


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago" if seconds >= 1 else "less than a second ago"
