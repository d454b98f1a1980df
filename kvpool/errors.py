"""What kvpool raises. A miss is a value and never an error.

KvpoolError
|- BadArgument (ValueError)     the caller's mistake: the message has the value and the limit
|  |- BadType (TypeError)       a value of the wrong type
|  `- ManifestMismatch          a namespace of that name exists and differs: says in which fields
|- PoolClosed                   the pool was closed
|  `- ForkedProcess             the pool belongs to the parent of this process
|- NoResource (OSError)         the machine refused memory, room on a disk, or a descriptor
|- NotAllowed (PermissionError)  a node does this for administrators only
|- TierRefused (OSError)        an SSD directory is in use, foreign, damaged or of another version
`- Unreachable (OSError)        no node answers at that address, or not in time
   `- Refused                   a node answered, and said no: its message says why

And what it warns of:

TierBuffered (RuntimeWarning)   an SSD tier works, but through the page cache
"""


class KvpoolError(Exception):
    """Root of everything kvpool raises."""


class BadArgument(KvpoolError, ValueError):
    """A value that cannot be meant; the message has the value and the limit."""


class BadType(BadArgument, TypeError):
    """A value of the wrong type."""


class ManifestMismatch(BadArgument):
    """A namespace of that name exists with another manifest.

    `differing` maps each field that differs to (stored value, given value).
    """

    def __init__(self, name: str, differing: dict[str, tuple[object, object]]) -> None:
        told = {field: told_apart(field, *pair) for field, pair in differing.items()}
        fields = "; ".join(
            f"{field}: stored {stored!r}, given {given!r}"
            for field, (stored, given) in told.items()
        )
        super().__init__(f"namespace {name!r} exists with another manifest ({fields})")
        self.name = name
        self.differing = differing


class PoolClosed(KvpoolError):
    """The pool was closed; open another one."""


class ForkedProcess(PoolClosed):
    """The pool was opened by the parent process; a forked child cannot use it."""


class NoResource(KvpoolError, OSError):
    """The machine refused memory, room on a disk, a descriptor or a mapping."""


class NotAllowed(KvpoolError, PermissionError):
    """The node does this for administrators only: root there, or who has its admin token."""


class TierRefused(KvpoolError, OSError):
    """An SSD directory cannot be used as it is: the message says why and what to do."""


class Unreachable(KvpoolError, OSError):
    """No node answered at that address in time. A call may be made again later."""


class Refused(Unreachable):
    """A node answered and said no: a wrong token, another version of the protocol, no place left.

    `code` names the reason for programs: token, version, full, shm, ... (docs/protocol.md).
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class TierBuffered(RuntimeWarning):
    """The filesystem of an SSD tier refuses O_DIRECT: it is read and written by the page cache.

    Nothing else changes; but that cache takes memory beside `dram`. The message says why.
    """


def shown(value: object) -> str:
    """A caller's value as messages have it: short text and numbers, of anything else the type.

    The repr of a foreign object may raise, take for ever or fill a log.
    """
    if type(value) is int and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if type(value) in (int, float, bool, type(None)):
        return repr(value)
    if type(value) in (str, bytes) and len(value) <= 64:  # type: ignore[arg-type]
        return repr(value)
    return f"a value of type {type(value).__name__}"


def told_apart(field: str, one: object, other: object) -> tuple[object, object]:
    """Both values of a manifest's field as messages have them.

    `engine` is long, and most of it is the same in both: what is left are the parts that differ.
    """
    if field != "engine" or not (isinstance(one, str) and isinstance(other, str)):
        return one, other
    ones, others = one.split("; "), other.split("; ")
    left = "; ".join(part for part in ones if part not in others)
    right = "; ".join(part for part in others if part not in ones)
    return (left, right) if left or right else (one, other)
