"""What assistants with drafting heads share: where the heads come from, and how their drafts branch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfkv import decoding
from hfkv.cache import check_length, option
from hfkv.heads import DraftHeads, load_heads
from hfkv.speculation import Block, Call, Draft, LogitsDrafter, RolloutOptions, Tree

from .hidden import HiddenStates


@dataclass(frozen=True, kw_only=True)
class HeadsOptions(RolloutOptions):
    """Options of assistants with drafting heads."""

    heads: Any = option(None, "the trained heads: a folder that hfkv.heads.save_heads wrote, or the module")
    branches: Sequence[int] | None = option(
        None,
        "draft a tree: how many tokens follow each one, by depth, as (3, 2, 1); for one row and a cache that keeps all "
        "tokens as they are; None drafts a chain",
    )

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.heads is None:
            raise ValueError("heads is missing: the folder of trained heads, or the module")
        if self.branches is None:
            return
        for place, count in enumerate(self.branches):
            check_length(f"branches[{place}]", count, minimum=1)
        if not self.branches or self.num_assistant_tokens not in (None, len(self.branches)):
            raise ValueError(
                f"branches={self.branches!r} says how deep drafts are, one count for each depth: leave "
                f"num_assistant_tokens={self.num_assistant_tokens} out"
            )
        if self.draft_sampling == "rejection":
            raise ValueError("draft_sampling='rejection' is for chains. Use draft_sampling='coupled' with branches")


class HeadsDrafter(LogitsDrafter):
    """Drafts with heads that read the target's last hidden state."""

    Options = HeadsOptions
    options: HeadsOptions

    def __init__(self, call: Call, options: HeadsOptions, resources: Any) -> None:
        super().__init__(call, options, resources)
        if options.branches is not None:
            decoding.check_trees(call.model, call.cache, type(resources).kind)
        self.hidden = HiddenStates(call)
        self.output = resources.draft_output(call.model)

    @property
    def most(self) -> int:
        """A tree is as deep as it has branches."""
        return super().most if self.options.branches is None else len(self.options.branches)

    def begin(self, block: Block) -> None:
        """Learn where the target's hidden states belong."""
        self.hidden.align(block)
        super().begin(block)

    def propose(self, block: Block) -> Draft:
        """A chain, or a tree."""
        if self.options.branches is None:
            return super().propose(block)
        if len(block.known) > 1:
            raise NotImplementedError(
                f"branches={self.options.branches!r} is for one row, and this batch has {len(block.known)}: leave "
                "`branches` out, and every row drafts a chain"
            )
        self.begin(block)
        tree = Tree()
        level = [-1]
        for column, count in zip(
            range(block.cached + 1, block.cached + block.width), self.options.branches, strict=False
        ):
            level = self._grow(block, column, tree, level, count)
        return Draft([tree.depth], tree=tree)

    def _grow(self, block: Block, column: int, tree: Tree, level: list[int], count: int) -> list[int]:
        logits = self.level(block, column, tree, level)
        grown = []
        for place, node in enumerate(level):
            path = block.ids.new_tensor([[tree.tokens[each] for each in tree.path(node)]])
            scores = self.call.process(torch.cat([block.ids[:, : block.cached + 1], path], dim=1), logits[place, None])
            grown += tree.add(self.call.candidates(scores, column, count), node)
        return grown

    @abstractmethod
    def level(self, block: Block, column: int, tree: Tree, level: list[int]) -> torch.Tensor:
        """What follows each node of the deepest level, at a column: ``[nodes, target's vocabulary]`` in float32."""

    def keep(self, places: list[int]) -> None:
        """The hidden states of the path that stands are those of the next tokens' past."""
        self.hidden.keep(places)

    def close(self) -> None:
        """Stop watching."""
        self.hidden.close()


def find_heads(model: Any, heads: Any, kind: str) -> Any:
    """The heads of a kind, loaded where a folder is given, once they fit the model."""
    if model.config.is_encoder_decoder:
        raise NotImplementedError(f"{type(model).__name__} has an encoder; this assistant is for a decoder alone")
    if isinstance(heads, (str, Path)):
        return load_heads(heads, model, kind)
    if not isinstance(heads, DraftHeads) or heads.kind != kind:
        raise TypeError(
            f"heads must be {kind!r} heads (hfkv.heads) or the folder of such; got "
            f"{heads.kind + ' heads' if isinstance(heads, DraftHeads) else type(heads).__name__}"
        )
    heads.check(model)
    weight = next(heads.parameters())
    if (weight.dtype, weight.device) != (model.dtype, model.device):
        raise ValueError(
            f"heads are {weight.dtype} on {weight.device}, the model {model.dtype} on {model.device}. "
            "Fix: heads.to(device=model.device, dtype=model.dtype)"
        )
    return heads
