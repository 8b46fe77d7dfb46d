"""Which layers can share at the least cost, measured on a text: no training, and the model stays as it is.

After Yang et al., "KVSharer: Efficient Inference via Layer-Wise Dissimilar KV Cache Sharing", 2024: what counts is how
far the output moves, and layers whose keys and values look alike are not the best ones to share. Two measurements. At
the attention output, which is cheap, every pair. At the logits, which decide, the best of them, one merge after the
other, each with all that has been merged before.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from hfkv.cli.prompts import long_text
from hfkv.integration import cache_argument

from .groups import Groups, donors
from .layer import kinds_of
from .reference import LendingCache

TOKENS = 128
# merges that are measured at the logits before one is made
CANDIDATES = 4
_REMEMBERED = "_hfkv_similar_groups"
# the layer that reads, and the one that is read
Pair = tuple[int, int]


@torch.no_grad()
def similar_groups(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    share: int = 2,
    candidates: int = CANDIDATES,
    progress: bool = True,
) -> Groups:
    """Groups of layers that share keys and values at the least cost, as many as there are of ``share`` neighbours.

    Groups may be of different sizes and of layers far apart; what is stored is what groups of ``share`` neighbours
    would store. The model remembers the result, which ``map="similar"`` uses.

    Parameters
    ----------
    model
        A decoder; it is not changed.
    tokenizer
        Makes tokens of Python's own help pages, where ``input_ids`` is not given.
    input_ids
        ``[rows, tokens]`` of text that is like what the model will read.
    share
        Layers per group, on average.
    candidates
        Merges that are measured at the logits before one is made; more take longer and find better groups.
    progress
        Whether to show a bar.

    Returns
    -------
    list of list of int
        For ``cache_config={"groups": ...}``, `hfkv.set_default` or `hfkv_crosslayer.share`.

    Raises
    ------
    ValueError
        Neither a tokenizer nor tokens.
    """
    if input_ids is None:
        if tokenizer is None:
            raise ValueError("similar_groups needs a text: pass the tokenizer, or input_ids of a text like yours")
        input_ids = tokenizer(long_text()[: 16 * TOKENS], return_tensors="pt").input_ids[:, :TOKENS]
    kinds = kinds_of(model.config)
    count = sum(-(-list(kinds.values()).count(kind) // share) for kind in set(kinds.values()))
    with _evaluating(model):
        search = _Search(model, input_ids.to(model.device), kinds)
        total = len(kinds) + (len(kinds) - count) * candidates
        with tqdm(total=total, desc="similar layers", disable=not progress) as bar:
            groups = search.run(count, candidates, bar)
    setattr(model, _REMEMBERED, {**getattr(model, _REMEMBERED, {}), share: groups})
    return groups


def remembered_groups(model: PreTrainedModel | None, share: int) -> Groups:
    """What `similar_groups` found for the model; measured now where its tokenizer is on this machine."""
    if model is None:
        raise ValueError(
            "map='similar' measures a model, and this cache is built from a config: pass the model or groups"
        )
    known: dict[int, Groups] = getattr(model, _REMEMBERED, {})
    if share in known:
        return known[share]
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    # no folder, no tokenizer in it, or one that needs a package: whichever, there is no text to measure
    except Exception as error:
        raise ValueError(
            f"map='similar' measures the model on a text, and finds no tokenizer for {model.name_or_path!r}. Fix: "
            f"hfkv_crosslayer.similar_groups(model, tokenizer, share={share}) once, before"
        ) from error
    return similar_groups(model, tokenizer, share=share)


class _Search:
    """One search: the text, what the model predicts on it, and which layers may read which."""

    def __init__(self, model: PreTrainedModel, input_ids: torch.Tensor, kinds: Mapping[int, Hashable]) -> None:
        self.model = model
        self.input_ids = input_ids
        self.kinds = kinds
        self.expected = self._log_probabilities([])

    def run(self, count: int, candidates: int, bar: Any) -> Groups:
        """Merge groups until there are ``count``."""
        moved = self._attention_costs()
        # each layer's best donor at the attention output, then what that costs at the logits
        costs: dict[Pair, float] = {}
        for reader in self.kinds:
            pairs = [pair for pair in moved if pair[0] == reader]
            if pairs:
                best = min(pairs, key=lambda pair: moved[pair])
                costs[best] = self.cost([[best[1], reader]])
            bar.update()
        groups: Groups = [[index] for index in self.kinds]
        current = 0.0
        while len(groups) > count:
            groups, current = self._merge(groups, current, costs, moved, candidates, bar)
        return groups

    def _merge(
        self,
        groups: Groups,
        current: float,
        costs: dict[Pair, float],
        moved: Mapping[Pair, float],
        candidates: int,
        bar: Any,
    ) -> tuple[Groups, float]:
        """The cheapest of the merges that cost least when they were measured last."""
        heads = {group[0] for group in groups}
        possible: dict[Pair, float] = {}
        for reader in heads:
            pairs = [(reader, donor) for donor in heads if (reader, donor) in moved]
            if pairs:
                best = min(pairs, key=lambda pair: moved[pair])
                known = [cost for (layer, _), cost in costs.items() if layer == reader]
                possible[best] = costs.get(best, min(known))
        measured: dict[Pair, tuple[float, Groups]] = {}
        for pair in sorted(possible, key=lambda pair: possible[pair])[:candidates]:
            merged = _merged(groups, pair)
            measured[pair] = self.cost(merged), merged
            costs[pair] = measured[pair][0] - current
            bar.update()
        cost, chosen = min(measured.values(), key=lambda entry: entry[0])
        return chosen, cost

    def cost(self, groups: Groups) -> float:
        """Kullback-Leibler divergence of the next-token distributions, in nats per token."""
        actual = self._log_probabilities(groups)
        return float((self.expected.exp() * (self.expected - actual)).sum(dim=-1).mean())

    def _log_probabilities(self, groups: Groups) -> torch.Tensor:
        cache = LendingCache(self.model, donors(groups))
        output = self.model(self.input_ids, **{cache_argument(self.model): cache})
        return output.logits.float().log_softmax(dim=-1)

    def _attention_costs(self) -> dict[Pair, float]:
        """How far a layer's attention output moves, relative to itself, when it reads another layer."""
        recorder = _Recorder(config=self.model.config.get_text_config(decoder=True))
        argument = cache_argument(self.model)
        moved: dict[Pair, float] = {}

        def compare(attention: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            reader = attention.layer_idx
            for donor in self.kinds:
                if donor >= reader or self.kinds[donor] != self.kinds[reader]:
                    continue
                lent = _Lent(recorder.seen[donor])
                try:
                    other = attention.forward(*args, **{**kwargs, argument: lent})
                # other numbers of heads, or of channels
                except RuntimeError:
                    continue
                moved[reader, donor] = float((other[0] - output[0]).norm() / output[0].norm())

        handles = [
            module.register_forward_hook(compare, with_kwargs=True)
            for module in self.model.modules()
            if argument in _parameters(module) and getattr(module, "layer_idx", None) in self.kinds
        ]
        try:
            self.model(self.input_ids, **{argument: recorder})
        finally:
            for handle in handles:
                handle.remove()
        return moved


class _Recorder(DynamicCache):
    """Transformers' cache, which remembers what each layer was given back."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store and return, as ever."""
        self.seen[layer_idx] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.seen[layer_idx]


class _Lent:
    """A cache of one layer, with another layer's keys and values in it."""

    def __init__(self, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._states = states

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Those keys and values, whatever is given."""
        return self._states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing came before this forward."""
        return 0


def _merged(groups: Groups, pair: Pair) -> Groups:
    reader, donor = pair
    moving = next(group for group in groups if group[0] == reader)
    return sorted(sorted(group + moving) if group[0] == donor else group for group in groups if group is not moving)


def _parameters(module: Any) -> Any:
    return inspect.signature(module.forward).parameters


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout; the model's mode is put back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
