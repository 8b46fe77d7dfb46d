"""What the record of a cache says of it, before anything else is believed."""

from __future__ import annotations

import pytest

from hfkv.testing.cases import CacheCase
from hfkv.testing.matrix import every_family
from hfkv.testing.models import NEW_TOKENS, PROMPT_LENGTH, logits_error
from hfkv.testing.oracle import LOSSLESS, Judge


def test_tolerance_can_fail(hfkv_case: CacheCase) -> None:
    """A bound above the cost of losing a token would pass a cache that loses one."""
    tolerance = hfkv_case.spec.contract_tolerance
    if tolerance is None:
        pytest.skip(f"{hfkv_case.spec.name} declares contract_tolerance=None: it is compared only with itself")
    assert 0 < tolerance < 1, f"contract_tolerance={tolerance} proves nothing: 1 is what losing one cached token costs"


@every_family
def test_loss_is_what_is_declared(hfkv_case: CacheCase, family: str) -> None:
    """A lossy cache compresses something on the contracts' few tokens; a lossless one loses nothing."""
    judge = Judge(hfkv_case, family, "sdpa")
    ids = judge.tiny.prompt(length=PROMPT_LENGTH + NEW_TOKENS)
    actual = judge.tiny.feed(judge.filled(ids[:, :PROMPT_LENGTH]), ids, chunk=1)
    worst = float(logits_error(actual, judge.tiny.logits(ids)[:, PROMPT_LENGTH:]).max())
    if hfkv_case.spec.lossless:
        assert worst <= LOSSLESS, f"{hfkv_case} declares lossless=True, and its logits are off by {worst:.3g}"
    else:
        assert worst > LOSSLESS, (
            f"{hfkv_case} holds {ids.shape[1]} tokens without any loss ({worst:.3g}), so nothing is compressed: give "
            "the CacheSpec contract_options with short blocks and a short residual, or declare lossless=True"
        )


@every_family
def test_prompt_is_exact(hfkv_case: CacheCase, family: str) -> None:
    """The tokens of the current forward are in full precision for that forward."""
    judge = Judge(hfkv_case, family, "sdpa")
    ids = judge.tiny.prompt(rows=2)
    worst = float(logits_error(judge.tiny.feed(judge.cache(), ids), judge.logits(ids)).max())
    assert worst <= LOSSLESS, f"{hfkv_case}: update() returns the prompt as it is stored, not as it came ({worst:.3g})"
