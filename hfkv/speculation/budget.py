"""What drafting may lose: an account in plain forwards, which no draft overdraws."""

from __future__ import annotations

# what there is to begin with: the forward that a call may lose whatever it does
_FIRST = 1.0
# what each decoded token adds
_SHARE = 0.015
# what can be held: what was saved long ago pays for few of today's losses
_MOST = 8.0


class Budget:
    """An account in plain forwards.

    Each token adds a fixed share of a forward, each round what it saved: the tokens that it brought, less what it cost.
    A draft is made only where the account could bear its whole cost being lost. So all that drafting can lose is
    1 forward and 1.5 % of the tokens, and 8 forwards more after any stretch of text in which it saved as many,
    as far as the costs are known.
    """

    def __init__(self) -> None:
        self.held = _FIRST

    def bears(self, loss: float) -> bool:
        """Whether a draft may be made that loses so much where none of it is accepted."""
        return loss <= self.held

    def record(self, progress: int, cost: float) -> None:
        """A round: the tokens that it brought, and what it cost in plain forwards."""
        self.held = min(_MOST, self.held + progress * _SHARE + progress - cost)
