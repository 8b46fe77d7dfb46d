"""Where the tokens of a cache stand: what their keys are turned by, told by the positions of the newest ones.

A cache keeps no positions. Its tokens are neighbours, so that one position tells all, as long as a row's padding comes
before its first token. What breaks that is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Turns = tuple[torch.Tensor, torch.Tensor]

# cosines and sines of a forward, for all of its layers; gone with its position_ids
_found: Any = WeakTensorKeyDictionary()
# on a cache: by how much a token's place in each row is ahead of its position; -1 while nothing but padding was seen
_AHEAD = "hfkv_latent_ahead"


def turns(
    rotary: Any, states: torch.Tensor, positions: torch.Tensor, past: int, is_first: bool, options: dict[str, Any]
) -> Turns:
    """Cosines and sines for the tokens that a cache has given to one layer.

    Parameters
    ----------
    rotary
        The model's own module.
    states
        ``[batch, tokens, ...]``, for the number of tokens, the dtype and the device.
    positions
        ``[batch or 1, new tokens]``, of this forward.
    past
        Tokens in ``states`` before the new ones; what comes behind them is room that no query sees.
    is_first
        Whether the layer is the first one of the forward.
    options
        What else the module takes: the kind of the layer.
    """
    known = _found.setdefault(positions, {})
    if is_first:
        known.clear()
    length, queries = states.shape[1], positions.shape[1]
    key = (rotary, past, length, states.dtype, *options.values())
    if key not in known:
        if length > queries:
            offsets = torch.arange(-past, length - past, device=positions.device)
            # before a row's first token there is padding, wherever it stands
            all_positions = (positions[:, :1] + offsets).clamp(min=0)
            # those of a tree are no neighbours
            all_positions[:, past : past + queries] = positions
            positions = all_positions
        known[key] = rotary(states, positions, **options)
    found: Turns = known[key]
    return found


def check_neighbours(cache: Any, positions: torch.Tensor, before: int) -> None:
    """See that a row's tokens, old and new, stand side by side.

    Parameters
    ----------
    before
        Tokens that the cache has seen before this forward.

    Raises
    ------
    NotImplementedError
        Padding between a row's tokens, or positions that leap.
    """
    noted = getattr(cache, _AHEAD, None)
    last = positions[:, -1]
    # the place of the newest token, less its position; a row at position 0 has seen no more than its first token
    now = torch.where(last == 0, -1, before + positions.shape[1] - 1 - last)
    if before and noted is not None and noted.shape == now.shape:
        known = noted >= 0
        if bool((known & (noted != before - positions[:, 0])).any()):
            raise NotImplementedError(
                "the tokens of a row are not neighbours: padding stands between them, or positions leap, and keys made "
                "of latents are turned by the distance in the cache. Fix: padding on the left of the first prompt alone"
            )
        now = torch.where(known, noted, now)
    elif before:
        # rows were repeated or left out
        now = before - positions[:, 0]
    setattr(cache, _AHEAD, now)
