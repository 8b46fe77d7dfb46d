"""What a tuning is asked for, without torch: the command line reads it before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from hfkv.cli.settings import Setting, parse_cache

# rows, tokens of their prefill, and tokens decoded
Size = tuple[int, int, int]
LEARN: Size = (4, 512, 32)
SEARCH: Size = (8, 1024, 128)
CHECK: Size = (8, 1024, 128)


@dataclass(frozen=True)
class Goal:
    """What must hold; what is made small is the other one.

    Attributes
    ----------
    text
        As it was written.
    kind
        ``"kl"``: divergence from the plain cache. ``"bits"``: stored bits per element.
    limit, like
        The limit, or the cache whose divergence is the limit.
    """

    text: str
    kind: str
    limit: float | None = None
    like: Setting | None = None

    @property
    def target(self) -> str:
        """What is made small."""
        return {"kl": "bits", "bits": "kl"}[self.kind]


def parse_goal(text: str) -> Goal:
    """``kl=0.01``, ``kl=CACHE`` or ``bits=3.5``.

    Raises
    ------
    ValueError
        Not of this form, a limit that is not above zero, or a cache that no plugin provides.
    """
    kind, _, value = text.partition("=")
    if kind not in ("kl", "bits") or not value:
        raise ValueError(f"{text!r} is not of the form kl=0.01, kl=CACHE or bits=3.5")
    try:
        limit = float(value)
    except ValueError:
        if kind == "bits":
            raise ValueError(f"{text!r}: {value!r} is not a number") from None
        like = parse_cache(value)
        like.check()
        if not like.is_ours:
            raise ValueError(
                f"{text!r}: no plugin provides {like.name!r}. Fix: a cache of hfkv list, such as kivi:nbits=4"
            ) from None
        return Goal(text, kind, like=like)
    if not limit > 0:
        raise ValueError(f"{text!r} must be above zero")
    return Goal(text, kind, limit)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What counts, and on how much text it is measured.

    Attributes
    ----------
    confidence
        How sure it must be that a divergence is within the budget, judged by the text of the search; with 0.5 the mean
        itself decides.
    context
        The tokens whose bytes count.
    counted
        The dtype that full precision is counted in: a model that is measured in float32 may be meant for 16 bits.
    learn, search, check
        Sizes of the three texts.
    """

    confidence: float = 0.95
    context: int = 8192
    counted: str = "float16"
    learn: Size = LEARN
    search: Size = SEARCH
    check: Size = CHECK

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence={self.confidence} must be at least 0.5 and below 1")
