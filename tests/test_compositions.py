"""Techniques on top of one another, under the contracts that the conformance kit holds single ones to."""

from __future__ import annotations

import dataclasses

import pytest

import hfkv
from hfkv import registry
from hfkv.testing.cases import CacheCase
from hfkv.testing.contracts import test_generate as generate
from hfkv.testing.contracts import test_operations as operations
from hfkv.testing.contracts import test_reuse as reuse
from hfkv.testing.models import PROMPT_LENGTH

PACKING = {"nbits": 8, "group_size": 8, "residual_length": 4, "sink_length": 2}
WINDOWED = {"cache": "sink", "window_length": 11, "sink_length": 2}
COMPOSITIONS = {
    "packed window": ("kivi", {**PACKING, "window_length": 16}),
    # the edge is passed while tokens are generated: 24 tokens come first
    "packed window, later": ("kivi", {**PACKING, "window_length": 28}),
    "window, later": ("sink", {"window_length": 27, "sink_length": 3}),
    "one packed layer, windows elsewhere": ("kivi", {**PACKING, "layers": {"1-2": WINDOWED}}),
    "windows, one layer that keeps all": ("sink", {"window_length": 11, "sink_length": 2, "layers": {"-1": "dynamic"}}),
    "shared and packed": ("crosslayer", {"store": "kivi", "store_config": PACKING}),
    "groups of one and two": ("crosslayer", {"groups": [[0], [1, 2]]}),
}
CONTRACTS = {
    "greedy": (generate.test_greedy, {}),
    "beams": (generate.test_beam_search, {}),
    "left padding": (generate.test_left_padded_batch, {}),
    "chunks": (generate.test_chunked_prefill, {}),
    "assisted": (generate.test_assisted_decoding, {}),
    "lookup": (generate.test_prompt_lookup, {}),
    "second turn": (reuse.test_multi_turn, {"shorter": 0}),
    "second turn, padded": (reuse.test_multi_turn, {"shorter": 3}),
    "prefix": (reuse.test_prefix_copied_and_reused, {}),
    "token by token": (reuse.test_token_by_token, {}),
    "deepcopy": (reuse.test_deepcopy, {"tokens": PROMPT_LENGTH + 9}),
    "pickle": (reuse.test_pickle, {"tokens": PROMPT_LENGTH + 9}),
    "reorder": (operations.test_reorder, {}),
}


def case_of(name, options):
    """A case of the kit, judged as what packs is: a composition loses what its lossiest part does."""
    spec = registry.manager().specs(hfkv.CacheSpec)[name]
    text = str(options)
    if name != "kivi" and "nbits" in text:
        packs = registry.manager().specs(hfkv.CacheSpec)["kivi"]
        spec = dataclasses.replace(spec, lossless=False, contract_tolerance=packs.contract_tolerance)
    return CacheCase(spec, "compositions", options, name)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_composition_keeps_the_contracts(composition, contract):
    function, arguments = CONTRACTS[contract]
    function(case_of(*COMPOSITIONS[composition]), family="llama", attention="sdpa", **arguments)


@pytest.mark.parametrize("contract", ["greedy", "beams", "left padding", "assisted", "second turn, padded"])
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_packed_local_layers_keep_the_contracts(family, contract):
    function, arguments = CONTRACTS[contract]
    function(case_of("kivi", {**PACKING, "quantize_sliding": True}), family=family, attention="sdpa", **arguments)
