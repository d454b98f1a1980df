"""Prompts, and what it means that two engines said the same.

Greedy tokens of two runs are the same but for one thing: where two tokens are as likely as each
other to within rounding, the order in which numbers were added up decides, and that depends on how
many tokens were computed at once. So the first difference must be such a tie of the run that is
compared with; what follows it is another text and is not compared.
"""

from collections.abc import Sequence

import numpy as np

from tests.engines.rig import Model, Output
from tests.pools import ROOT

VOCABULARY = range(10, 2000)
# By how much logarithms of probability may differ by rounding. A tie as close as that is seldom:
# the best two of the models in these tests are 0.1 and more apart, as a rule.
TIE = {"float32": 1e-3, "bfloat16": 0.1}


def random_prompts(rng: np.random.Generator, count: int, tokens: int) -> list[list[int]]:
    """No two of them begin alike."""
    found = rng.integers(VOCABULARY.start, VOCABULARY.stop, (count, tokens))
    found[:, 0] = rng.choice(VOCABULARY, count, replace=False)
    return [[int(token) for token in each] for each in found]


def page_prompts(count: int, characters: int) -> list[str]:
    """Real text: the beginnings of this repository's own pages."""
    pages = sorted((ROOT / "docs").glob("*.md"), key=lambda path: -path.stat().st_size)
    return [path.read_text()[:characters] for path in pages[:count]]


def assert_same(model: Model, wanted: Sequence[Output], given: Sequence[Output]) -> None:
    """wanted: of the run without a pool."""
    for number, (right, other) in enumerate(zip(wanted, given, strict=True)):
        assert other.finish == right.finish == "length", f"prompt {number}: {other}"
        place = first_difference(right.tokens, other.tokens)
        if place is not None:
            gap = right.gaps[place]
            assert gap < TIE[model.dtype], (
                f"prompt {number}: token {place} is {other.tokens[place]}, not"
                f" {right.tokens[place]}, which was likelier by {gap:.3g}"
            )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    pairs = enumerate(zip(left, right, strict=True))
    return next((place for place, (one, other) in pairs if one != other), None)


def loadable_tokens(model: Model, outputs: Sequence[Output]) -> int:
    """Of prompts that share nothing: all whole blocks. The last token is computed again where all
    were loaded; where layers have a window, what it sees may be gone, so a block less is loaded.
    """
    size, spared = model.block_tokens, 1 if model.has_windows else 0
    return sum((each.prompt_tokens - spared) // size * size for each in outputs)
