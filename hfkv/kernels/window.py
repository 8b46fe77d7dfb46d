"""Attention of a windowed layer: sinks, seen from nearer by, and the window, joined in one softmax."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.view import KVView
from ..cache.window import WindowView
from . import attend as attend_packed

# queries that are attended to at once: what they see of a long prompt is little more than a window, and their scores
# stay in the processor's cache
CHUNK = 64
_HIDDEN = torch.finfo(torch.float32).min


def attend(
    module: Any,
    query: torch.Tensor,
    view: WindowView,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """What transformers asks of an attention function: ``[batch, queries, heads, value_head_dim]``.

    Parameters
    ----------
    mask
        ``[batch, 1 or heads, queries, columns]``, boolean or additive, or ``[batch, columns]``; its columns are the
        newest tokens. None: causal, no padding.
    softcap, s_aux, position_bias
        What some models do to their scores: a bound, a logit per head that takes attention away, and a bias.

    Raises
    ------
    NotImplementedError
        A mask that is no tensor (flex attention), or dropout.
    ValueError
        A mask that does not cover the window.
    """
    if dropout:
        raise NotImplementedError(f"attention dropout ({dropout}) with a windowed cache. Fix: model.eval()")
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise NotImplementedError(
            f"a windowed cache cannot read a mask of type {type(mask).__name__}. "
            'Fix: model.set_attn_implementation("sdpa")'
        )
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None].bool()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    own = softcap, s_aux, position_bias
    if isinstance(view.body, KVView) and all(each is None for each in own) and not query.requires_grad:
        return _attend_packed(query * scale, view, view.body, mask).transpose(1, 2).contiguous()
    keys, values = (view.body.dense("keys"), view.body.dense("values")) if isinstance(view.body, KVView) else view.body
    count, past = query.shape[2], view.seen - query.shape[2]
    parts = []
    for begin in range(0, count, CHUNK):
        rows = range(past + begin, past + min(begin + CHUNK, count))
        tokens = range(max(view.first, rows.start - view.window.length + 1), rows.stop)
        inner = slice(tokens.start - view.first, tokens.stop - view.first)
        chunk = query[:, :, begin : begin + len(rows)] * scale
        scores = [_hide(_scores(chunk, keys[:, :, inner], softcap), view, rows, tokens, mask, position_bias)]
        weighed = [values[:, :, inner]]
        if view.window.sink_length:
            moved = _scores(view.moved(chunk, rows), view.sink_keys, softcap)
            scores.append(_hide(moved, view, rows, None, mask, position_bias))
            weighed.append(view.sink_values)
        if s_aux is not None:
            # a column of its own, which weighs nothing
            scores.append(s_aux.float().reshape(1, -1, 1, 1).expand(*scores[0].shape[:3], 1))
        weights = torch.cat(scores, dim=-1).softmax(dim=-1).to(query.dtype)
        shares = weights.split([part.shape[-1] for part in scores], dim=-1)
        output = _weigh(shares[0], weighed[0])
        parts.append(output if len(weighed) == 1 else output + _weigh(shares[1], weighed[1]))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _attend_packed(query: torch.Tensor, view: WindowView, body: KVView, mask: torch.Tensor | None) -> torch.Tensor:
    """The fused kernel reads the body; the sinks join by the log-sum-exp of their scores."""
    rows = range(view.seen - query.shape[2], view.seen)
    tokens = range(view.first, view.seen)
    visible, columns = view.visible(rows, tokens, query.device), _columns(mask, view, rows, tokens)
    output, lse = attend_packed(query, body, _joined(visible, columns), scale=1.0)
    if view.window.sink_length == 0:
        return output
    scores = _hide(_scores(view.moved(query, rows), view.sink_keys, None), view, rows, None, mask, None)
    sink_lse = scores.logsumexp(dim=-1)
    # a row that sees nothing at all is padding: any finite output will do
    total = torch.logaddexp(lse, sink_lse).clamp_min(_HIDDEN)
    sinks = _weigh(scores.softmax(dim=-1).to(query.dtype), view.sink_values)
    share = (sink_lse - total).exp().unsqueeze(-1)
    return (output.float() * (lse - total).exp().unsqueeze(-1) + sinks.float() * share).to(query.dtype)


def _scores(query: torch.Tensor, keys: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """``[batch, heads, queries, tokens]`` float32; the query heads of a KV head are rows of one product."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    rows = query.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)
    scores = (rows @ keys.transpose(-1, -2)).float().unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def _weigh(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    heads, kv_heads = weights.shape[1], values.shape[1]
    rows = weights.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)
    return (rows @ values).unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)


def _hide(
    scores: torch.Tensor,
    view: WindowView,
    rows: range,
    tokens: range | None,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Scores of the body's tokens, or of the sinks (None), with what the queries do not see left out."""
    device = scores.device
    bias = _columns(bias, view, rows, tokens)
    if bias is not None:
        scores = scores + bias.float()
    visible = view.visible_sinks(rows, device) if tokens is None else view.visible(rows, tokens, device)
    joined = _joined(visible, _columns(mask, view, rows, tokens))
    if joined is None:
        return scores
    # they are ours, and no gradient needs them as they were
    return scores.masked_fill_(~joined, _HIDDEN) if joined.dtype == torch.bool else scores.add_(joined)


def _joined(visible: torch.Tensor | None, columns: torch.Tensor | None) -> torch.Tensor | None:
    """What the window shows, and what the model's mask does."""
    if visible is None or columns is None:
        return columns if visible is None else visible
    if columns.dtype == torch.bool:
        return visible & columns
    return columns.masked_fill(~visible, torch.finfo(columns.dtype).min)


def _columns(states: torch.Tensor | None, view: WindowView, rows: range, tokens: range | None) -> torch.Tensor | None:
    """The rows of these queries and the columns of these tokens, or of the sinks, out of a mask or a bias."""
    if states is None:
        return None
    columns = states.shape[-1]
    if states.shape[2] > 1:
        # the rows are the newest tokens, as the columns are
        end = states.shape[2] - (view.seen - rows.stop)
        states = states[:, :, end - len(rows) : end]
    if tokens is None:
        if columns < view.seen:
            return None
        index = view.sink_tokens(states.device).clamp(max=view.seen - 1)[:, None, None]
        batch = max(len(index), len(states))
        return states.expand(batch, -1, -1, -1).gather(-1, index.expand(batch, *states.shape[1:3], -1))
    start, needed = columns - (view.seen - tokens.start), rows.start - view.window.length + 1
    if start < 0 and columns < view.seen - max(needed, 0):
        raise ValueError(
            f"the attention mask covers {columns} tokens, and the window needs the newest "
            f"{view.seen - max(needed, 0)}: pass the mask of all tokens, cached ones included"
        )
    part = states[..., max(start, 0) : columns - (view.seen - tokens.stop)]
    # blocks are dropped whole: the first one's older tokens are behind every window
    hidden = False if part.dtype == torch.bool else torch.finfo(part.dtype).min
    return torch.nn.functional.pad(part, (max(-start, 0), 0), value=hidden) if start < 0 else part
