"""Which blocks an operator means: a namespace by name or id, a prefix by tokens or keys.

Promises:  tokens stay in this process: they are hashed here, never sent, logged or shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.errors import BadArgument
from kvpool.keys import KEY_BYTES, prefix_keys
from kvpool.manifest import Manifest
from kvpool.operate.client import Space

TOKEN_FILE_BYTES_MAX = 64 << 20
_ID_DIGITS_MIN = 6  # of an id that is not written out


def tokens_of(path: str) -> list[int]:
    """Token ids in a file, - for stdin: a JSON list, or numbers with space or commas between them.

    Raises BadArgument, which never has the file's content.
    """
    name = "stdin" if path == "-" else path
    try:
        if path == "-":
            content = sys.stdin.buffer.read(TOKEN_FILE_BYTES_MAX + 1)
        else:
            with open(path, "rb") as file:
                content = file.read(TOKEN_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadArgument(f"{name}: cannot be read: {error.strerror}") from None
    if len(content) > TOKEN_FILE_BYTES_MAX:
        raise BadArgument(f"{name}: more than {TOKEN_FILE_BYTES_MAX} bytes of token ids")
    return _parsed(content, name)


def _parsed(content: bytes, name: str) -> list[int]:
    wrong = BadArgument(
        f"{name}: write token ids as a JSON list, or as numbers with space or commas between them"
    )
    try:
        text = content.decode("ascii").strip()
        if text.startswith("["):
            tokens = json.loads(text)
        else:
            tokens = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise wrong from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise wrong
    return tokens


@dataclass(frozen=True, slots=True)
class Given:
    """A prefix as it was named: tokens, or keys of one namespace."""

    tokens: list[int] | None
    packed: bytes

    def keys(self, manifest: Manifest) -> bytes:
        """Packed, one per block."""
        return self.packed if self.tokens is None else token_keys(manifest, self.tokens)


def given(tokens: str | None, hexes: Sequence[str] | None) -> Given:
    """What --tokens or --key name. Raises BadArgument unless it is one of them."""
    if (tokens is None) == (not hexes):
        raise BadArgument("say which prefix: --tokens FILE, or --key HEX once or more")
    if tokens is None:
        return Given(None, b"".join(_key_of(text) for text in hexes or ()))
    return Given(tokens_of(tokens), b"")


def token_keys(manifest: Manifest, tokens: Sequence[int]) -> bytes:
    """Packed keys of the whole blocks of `tokens`."""
    made = prefix_keys(
        manifest.namespace_id, tokens, manifest.block_tokens, algorithm=manifest.hash
    )
    return made.tobytes()


def _key_of(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise BadArgument(f"--key {text!r:.80}: a key is {2 * KEY_BYTES} hexadecimal digits")
    return key


def space_of(name: str, spaces: Sequence[Space]) -> Space:
    """The namespace of that name, or of that id or its first digits. Raises BadArgument."""
    found = [each for each in spaces if each.manifest.name == name]
    if not found and len(name) >= _ID_DIGITS_MIN:
        found = [
            each for each in spaces if each.manifest.namespace_id.hex().startswith(name.lower())
        ]
    if len(found) == 1:
        return found[0]
    if found:
        which = ", ".join(f"{each.manifest.namespace_id.hex()} of {each.tenant}" for each in found)
        raise BadArgument(f"{name!r} could be any of {which}: name a --tenant, or give more digits")
    known = ", ".join(sorted({each.label for each in spaces})) or "none since the daemon began"
    raise BadArgument(f"there is no namespace {name!r}; there are: {known}")
