"""What goes into the linear layers of a model while it reads a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from .options import AwqOptions

# tokens that are read in one forward
PIECE = 512
# bytes of moments that are held at a time: more are recorded in a further reading of the text
BUDGET = 2**31


class Moments:
    """Sums over the tokens of an input ``[..., inputs]``.

    Attributes
    ----------
    gram
        ``[inputs, inputs]`` float32: products of features. An error ``d`` of a weight row adds ``d @ gram @ d`` to the
        squared error of the output, whatever the text's length.
    magnitude
        ``[inputs]`` float32: the sum of magnitudes.
    """

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.gram = torch.zeros(inputs, inputs, device=device)
        self.magnitude = torch.zeros(inputs, device=device)

    def add(self, states: torch.Tensor) -> None:
        """Count what is in an input."""
        rows = states.flatten(0, -2).float()
        self.gram.addmm_(rows.T, rows)
        self.magnitude += rows.abs().sum(0)


def batches(linears: Sequence[nn.Linear]) -> Iterator[slice]:
    """Runs of layers whose moments fit into the budget together."""
    start, used = 0, 0
    for index, linear in enumerate(linears):
        size = 4 * linear.in_features**2
        if index > start and used + size > BUDGET:
            yield slice(start, index)
            start, used = index, 0
        used += size
    yield slice(start, len(linears))


@torch.no_grad()
def record(
    model: Any, linears: Sequence[nn.Linear], texts: Sequence[torch.Tensor], step: Callable[[], object]
) -> list[Moments]:
    """The moments of each layer's input over texts ``[1, tokens]``; ``step`` is called after each text."""
    moments = [Moments(linear.in_features, linear.weight.device) for linear in linears]
    training = model.training
    with ExitStack() as stack:
        stack.callback(model.train, training)
        model.eval()
        for linear, found in zip(linears, moments, strict=True):
            handle = linear.register_forward_pre_hook(lambda _, inputs, found=found: found.add(inputs[0]))
            stack.callback(handle.remove)
        for ids in texts:
            # without the head, whose logits would be the largest tensor
            model.base_model(input_ids=ids.to(model.device), use_cache=False)
            step()
    return moments


def texts(model: Any, options: AwqOptions) -> list[torch.Tensor]:
    """The calibration text, in pieces ``[1, tokens]``.

    Raises
    ------
    ValueError
        A text and no tokenizer, or nothing to read.
    """
    if options.calibration_ids is not None:
        return _given(options.calibration_ids)
    tokenizer = _tokenizer(model, options.tokenizer)
    ids = tokenizer(_text(options), add_special_tokens=False).input_ids
    if not ids:
        raise ValueError("the calibration text is empty")
    marked = tokenizer("a").input_ids
    start = [tokenizer.bos_token_id] if marked[0] == tokenizer.bos_token_id else []
    length = PIECE - len(start)
    count = min(max(1, options.calibration_tokens // PIECE), -(-len(ids) // length))
    # evenly from the whole text: its beginning may be of one kind
    first = [int(index * max(0, len(ids) - length) / max(1, count - 1)) for index in range(count)]
    pieces = [start + ids[at : at + min(length, options.calibration_tokens)] for at in first]
    return [torch.tensor([piece]) for piece in pieces]


def _given(ids: Any) -> list[torch.Tensor]:
    form = "a list of lists of token ids, or a tensor [rows, tokens]"
    try:
        rows = [torch.as_tensor(row) for row in ids]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"calibration_ids must be {form}: {error}") from error
    if not rows or any(row.dim() != 1 or not len(row) or row.is_floating_point() for row in rows):
        raise ValueError(f"calibration_ids must be {form}, none of them empty")
    return [row[None].long() for row in rows]


def _text(options: AwqOptions) -> str:
    if options.calibration_file is not None:
        path = Path(options.calibration_file)
        if not path.is_file():
            raise ValueError(f"calibration_file={str(path)!r} is no file")
        return path.read_text(encoding="utf-8")
    if options.calibration_text is not None:
        return options.calibration_text
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _tokenizer(model: Any, given: Any) -> Any:
    if callable(given):
        return given
    name = given or model.config.name_or_path or model.name_or_path
    try:
        if not name:
            raise ValueError("the model has no name and no folder")
        return AutoTokenizer.from_pretrained(name)
    # whatever is wrong there, the fix is the same
    except Exception as error:
        raise ValueError(
            f"'awq' reads a calibration text and finds no tokenizer at {name!r}: {error}. Fix: pass tokenizer=..., "
            "or calibration_ids=[[...]] in place of a text"
        ) from error
