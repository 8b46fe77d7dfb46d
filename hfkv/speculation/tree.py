"""Drafts that branch: a tree of tokens that one forward verifies, each node seeing its own ancestors only.

Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and
Verification", 2024. What the target chooses at a node depends on the path to it alone; with noise that belongs to a
column (`sampling.Noise`) that is so where tokens are sampled too, and a tree is verified by walking it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Tree:
    """Drafts for one row.

    Attributes
    ----------
    tokens
        The nodes, parents before their children.
    parents
        The index of each node's parent; -1 for those that follow the newest known token.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], parent: int) -> list[int]:
        """Add children of a node; their indices."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        self.parents.extend([parent] * len(tokens))
        return list(range(first, len(self.tokens)))

    def path(self, node: int) -> list[int]:
        """A node and its ancestors, the oldest first."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return max((len(self.path(node)) for node in range(len(self.tokens))), default=0)

    def depths(self) -> list[int]:
        """How far behind the newest known token each place of the forward is: the token itself, then the nodes."""
        return [0, *(len(self.path(node)) for node in range(len(self.tokens)))]

    def sees(self) -> torch.Tensor:
        """Which place sees which, ``[1 + nodes, 1 + nodes]``; the first is the newest known token."""
        size = 1 + len(self.tokens)
        seen = torch.eye(size, dtype=torch.bool)
        seen[:, 0] = True
        for node in range(len(self.tokens)):
            seen[node + 1, [ancestor + 1 for ancestor in self.path(node)]] = True
        return seen

    def walk(self, choose: Callable[[int, list[int]], int]) -> tuple[list[int], int]:
        """Follow the target's choices.

        Parameters
        ----------
        choose
            From a place of the forward and the tokens of the path to it, the token that the target chooses next.

        Returns
        -------
        tuple
            The nodes that stand, and the token that follows them.
        """
        node = -1
        standing: list[int] = []
        while True:
            token = choose(node + 1, [self.tokens[each] for each in standing])
            children = (n for n, parent in enumerate(self.parents) if parent == node and self.tokens[n] == token)
            node = next(children, -1)
            if node < 0:
                return standing, token
            standing.append(node)

    def ends_at(self, standing: list[int]) -> bool:
        """Whether a path is as long as it can be: nothing was drafted behind it."""
        return (standing[-1] if standing else -1) not in self.parents
