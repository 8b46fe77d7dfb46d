"""A kit that passes a broken cache is worth nothing: a real cache is broken, one way at a time, and must be caught."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hfkv
from hfkv.cache import KVLayer, Padding
from hfkv.testing.cases import CacheCase
from hfkv.testing.contracts import test_declaration as declaration
from hfkv.testing.contracts import test_generate as generate
from hfkv.testing.contracts import test_memory as memory
from hfkv.testing.contracts import test_operations as operations
from hfkv.testing.contracts import test_reuse as reuse
from hfkv_kivi.layer import KiviLayer
from hfkv_kivi.plugin import hfkv_caches

(KIVI,) = hfkv_caches()
LLAMA = {"family": "llama", "attention": "sdpa"}


@dataclass(frozen=True)
class Mutant:
    """A broken layer or a wrong declaration, the contract that has to catch it, and what its message has to say."""

    layer: type[KiviLayer]
    contract: Callable[..., None]
    says: str
    declared: dict[str, Any]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        told = [self.layer.__name__, *self.declared, self.contract.__name__, *self.arguments.values()]
        return "-".join(map(str, told))

    def case(self) -> CacheCase:
        settings = {"contract_options": KIVI.contract_options, "contract_tolerance": KIVI.contract_tolerance}
        spec = hfkv.CacheSpec(
            name="mutant",
            summary="broken on purpose",
            load=f"{__name__}:{self.layer.__name__}",
            **settings | self.declared,
        )
        return CacheCase(spec, "mutants", spec.contract_options, spec.name)


MUTANTS: list[Mutant] = []


def caught_by(contract, says, declared=None, **arguments):
    """Have a contract catch the decorated layer."""

    def remember(layer):
        MUTANTS.append(Mutant(layer, contract, says, declared or {}, arguments))
        return layer

    return remember


@caught_by(generate.test_greedy, "not the plain model's", **LLAMA)
@caught_by(generate.test_greedy, "not the plain model's", family="gemma3", attention="eager")
@caught_by(generate.test_greedy, "not the plain model's", family="gemma4", attention="sdpa")
@caught_by(generate.test_greedy, "not the plain model's", family="t5", attention="sdpa")
class LosesOneToken(KiviLayer):
    """The values of one token are gone once it has been seen."""

    def update(self, key_states, value_states, *args, **kwargs):
        result = super().update(key_states, value_states, *args, **kwargs)
        if self.get_seq_length() == 30:
            self._exact.values[:, :, self._exact.length - 1] = 0
        return result


@caught_by(generate.test_greedy, "not the plain model's", family="deepseek_v3", attention="sdpa")
@caught_by(generate.test_greedy, "not the plain model's", family="deepseek_v2", attention="eager")
class LosesOneLatent(KiviLayer):
    """The latent of one token is gone once it has been seen."""

    def update(self, key_states, value_states, *args, **kwargs):
        result = super().update(key_states, value_states, *args, **kwargs)
        if self.get_seq_length() == 30:
            self._exact.keys[:, :, self._exact.length - 1] = 0
        return result


@caught_by(generate.test_sampling, "not the plain model's", **LLAMA)
@caught_by(reuse.test_token_by_token, "not the plain model's", **LLAMA)
class StaleValues(KiviLayer):
    """In place of a token's values, those of the token before it."""

    stale = None

    def update(self, key_states, value_states, *args, **kwargs):
        last = value_states[:, :, -1:]
        if self.stale is not None and value_states.shape[2] == 1:
            value_states = self.stale
        self.stale = last
        return super().update(key_states, value_states, *args, **kwargs)


@caught_by(generate.test_greedy, "not the plain model's", **LLAMA)
class OneKeyForABlock(KiviLayer):
    """The keys of the prompt's first block are those of its first token."""

    def _append(self, key_states, value_states):
        if key_states.shape[2] > 1:
            key_states = key_states.clone()
            key_states[:, :, 2:10] = key_states[:, :, 2:3]
        super()._append(key_states, value_states)


@caught_by(generate.test_greedy, "contract_tolerance", family="gemma4", attention="sdpa")
class FourBits(KiviLayer):
    """Loses more than is declared: four bits in place of eight."""

    def _format(self, nbits, axis, head_dim):
        return super()._format(4, axis, head_dim)


@caught_by(declaration.test_prompt_is_exact, "as it is stored", family="llama")
class PackedPrompt(KiviLayer):
    """The prompt is attended to as it is stored."""

    def update(self, key_states, value_states, *args, **kwargs):
        result = super().update(key_states, value_states, *args, **kwargs)
        return result if key_states.shape[2] == 1 else self.dense()


@caught_by(declaration.test_loss_is_what_is_declared, "nothing is compressed", family="llama")
class NothingIsPacked(KiviLayer):
    """Called lossy, and never compresses anything."""

    def _pack(self):
        return False


@caught_by(generate.test_left_padded_batch, "left-padded batch", **LLAMA)
class HearsItsNeighbours(KiviLayer):
    """A row's values are pulled to those of the batch."""

    def update(self, key_states, value_states, *args, **kwargs):
        values = value_states + 0.1 * (value_states.mean(dim=0, keepdim=True) - value_states)
        return super().update(key_states, values, *args, **kwargs)


@caught_by(generate.test_left_padded_batch, "padding takes part", **LLAMA)
@caught_by(reuse.test_multi_turn, "row 1", **LLAMA, shorter=3)
class IgnoresPadding(KiviLayer):
    """What `generate` says of the padding never reaches the layer."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self.padding = Padding()


@caught_by(generate.test_beam_search, "reorder_cache", **LLAMA)
class StaysInPlace(KiviLayer):
    """Rows stay where they are."""

    def map_rows(self, rows):
        pass


@caught_by(operations.test_reorder, "map_rows", **LLAMA)
class MovesHalf(KiviLayer):
    """Rows of what is packed stay where they are."""

    def map_rows(self, rows):
        packed, self._packed = self._packed, None
        super().map_rows(rows)
        self._packed = packed


@caught_by(operations.test_reorder, "map_rows", **LLAMA)
class ForgetsToMovePadding(KiviLayer):
    """Rows change places, and the order that left padding gave each row does not."""

    def map_rows(self, rows):
        order, self._order = self._order, None
        super().map_rows(rows)
        self._order = order


@caught_by(operations.test_crop, "get_seq_length", **LLAMA, remove=6)
class NeverCrops(KiviLayer):
    """Rejected tokens stay."""

    def crop(self, tokens_to_remove):
        pass


@caught_by(operations.test_crop, "crop()", **LLAMA, remove=17)
class CropsTooMuch(KiviLayer):
    """What is left of a block that a crop cuts is lost."""

    def _cut(self, length):
        super()._cut(length)
        self._exact.values[:, :, self.sink_length : self._exact.length] = 0


@caught_by(operations.test_crop, "declare crop=False", **LLAMA, remove=1)
@caught_by(generate.test_assisted_decoding, "declare crop=False", **LLAMA)
class CannotCrop(KiviLayer):
    """Crop is not implemented."""

    crop = KVLayer.crop


@caught_by(generate.test_beam_search, "declare reorder=False", **LLAMA)
@caught_by(operations.test_select, "declare select=False", **LLAMA)
class CannotMoveRows(KiviLayer):
    """Nothing that concerns rows is implemented."""

    map_rows = KVLayer.map_rows


@caught_by(operations.test_crop, "its error must name 'mutant'", {"crop": False}, **LLAMA, remove=1)
class CannotSayWho(KiviLayer):
    """Refuses to crop, and does not say which cache it is."""

    crop = KVLayer.crop

    def __init__(self, options, context):
        super().__init__(options, context)
        self.technique = "something"


@caught_by(reuse.test_deepcopy, "shared", **LLAMA, tokens=33)
@caught_by(reuse.test_prefix_copied_and_reused, "shares state", **LLAMA)
class SharedCopies(KiviLayer):
    """A deep copy writes into the tensors of the original."""

    def __deepcopy__(self, memo):
        return copy.copy(self)


@caught_by(reuse.test_pickle, "not pickled", **LLAMA, tokens=33)
class ForgetsAtPickling(KiviLayer):
    """The packed blocks are not pickled, only how many there are."""

    def __getstate__(self):
        state = copy.deepcopy(self.__dict__)
        for store in state["_packed"] or ():
            store.map(torch.zeros_like)
        return state


@caught_by(operations.test_reset, "get_seq_length", **LLAMA)
class KeepsATokenAtReset(KiviLayer):
    """After a reset the first token of the last batch is still there."""

    def reset(self):
        kept = tuple(buffer[:2, :, :1].clone() for buffer in self._exact.view())
        device = self.device
        super().reset()
        self.device, self.is_initialized = device, True
        self._append(*kept)


@caught_by(memory.test_stored_bytes_are_all_tensors_that_can_be_reached, "segments", family="llama", tokens=40)
class KeepsACopy(KiviLayer):
    """Full-precision keys and values on the side, as an attribute."""

    def update(self, key_states, value_states, *args, **kwargs):
        self.backup = key_states.clone(), value_states.clone()
        return super().update(key_states, value_states, *args, **kwargs)


@caught_by(memory.test_planned_bytes_are_those_of_the_cache, "planned_bytes", family="llama", tokens=40)
class PlansOneBlockLess(KiviLayer):
    """What is planned leaves out the packed block that 40 tokens have beyond 32."""

    def planned_bytes(self, tokens, shape):
        return super().planned_bytes(tokens - self.block_length, shape)


@caught_by(memory.test_nothing_is_kept_outside_the_cache, "stay alive", family="llama")
class HidesACopy(KiviLayer):
    """Full-precision keys and values on the side, where no report looks."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self.layer_idx = context.layer_idx

    def update(self, key_states, value_states, *args, **kwargs):
        HIDDEN[self.layer_idx] = key_states.clone(), value_states.clone()
        return super().update(key_states, value_states, *args, **kwargs)


HIDDEN: dict[int, Any] = {}


@caught_by(operations.test_offload_reaches_every_tensor, "leaves", family="llama", tokens=40)
class LeavesTensorsBehind(KiviLayer):
    """Offloading moves the packed blocks only."""

    def move(self, device):
        for store in self._packed or ():
            store.map(lambda tensor: tensor.to(device))


# a sound layer, and a record that says of it what is not so
caught_by(operations.test_crop, "DID NOT RAISE", {"crop": False}, **LLAMA, remove=1)(KiviLayer)
caught_by(operations.test_reorder, "DID NOT RAISE", {"reorder": False}, **LLAMA)(KiviLayer)
caught_by(operations.test_select, "DID NOT RAISE", {"select": False}, **LLAMA)(KiviLayer)
caught_by(operations.test_offload_and_prefetch, "DID NOT RAISE", {"offload": False}, **LLAMA)(KiviLayer)
caught_by(declaration.test_loss_is_what_is_declared, "lossless=True", {"lossless": True}, family="llama")(KiviLayer)
caught_by(declaration.test_tolerance_can_fail, "proves nothing", {"contract_tolerance": 2.0})(KiviLayer)


# what is refused as declared, and what is lossless as declared, is no mistake
NO_CROP, NO_ROWS, LOSSLESS = {"crop": False}, {"reorder": False, "select": False}, {"lossless": True}
HONEST = [
    Mutant(CannotCrop, operations.test_crop, "", NO_CROP, LLAMA | {"remove": 1}),
    Mutant(CannotCrop, generate.test_assisted_decoding, "", NO_CROP, LLAMA),
    Mutant(CannotCrop, generate.test_prompt_lookup, "", NO_CROP, LLAMA),
    Mutant(CannotMoveRows, generate.test_beam_search, "", NO_ROWS, LLAMA),
    Mutant(CannotMoveRows, operations.test_reorder, "", NO_ROWS, LLAMA),
    Mutant(CannotMoveRows, operations.test_select, "", NO_ROWS, LLAMA),
    Mutant(CannotMoveRows, operations.test_repeat, "", NO_ROWS, LLAMA),
    Mutant(NothingIsPacked, generate.test_greedy, "", LOSSLESS, LLAMA),
    Mutant(NothingIsPacked, generate.test_beam_search, "", LOSSLESS, LLAMA),
    Mutant(NothingIsPacked, operations.test_crop, "", LOSSLESS, LLAMA | {"remove": 17}),
]


@pytest.fixture
def run(register):
    """Run a mutant's contract, its cache known to `generate` by name."""

    def give(mutant):
        case = mutant.case()

        class Plugin:
            @hfkv.hookimpl
            def hfkv_caches(self):
                yield case.spec

        register(Plugin(), case.plugin)
        mutant.contract(case, **mutant.arguments)

    return give


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_kit_catches(mutant, run):
    with pytest.raises((AssertionError, pytest.fail.Exception)) as caught:
        run(mutant)
    assert mutant.says in str(caught.value)


SOUND = [Mutant(KiviLayer, mutant.contract, "", {}, mutant.arguments) for mutant in MUTANTS]


@pytest.mark.parametrize("sound", {str(sound): sound for sound in SOUND + HONEST}.values(), ids=str)
def test_kit_passes_what_was_not_broken(sound, run):
    run(sound)


def test_cache_that_forgets_by_design_is_compared_only_with_itself(run):
    forgets = {"contract_tolerance": None}
    with pytest.raises(pytest.skip.Exception, match="compared only with itself"):
        run(Mutant(LosesOneToken, generate.test_greedy, "", forgets, LLAMA))
    with pytest.raises(AssertionError, match="those of a manual loop with the same cache"):
        run(Mutant(StaysInPlace, generate.test_beam_search, "", forgets, LLAMA))
