"""Every mode of `generate`, re-scored: by the plain model, and by the same cache in a manual loop."""

from __future__ import annotations

from typing import Any

import torch

from hfkv.testing.cases import CacheCase
from hfkv.testing.matrix import every_attention, every_decoder, every_generating_family, families
from hfkv.testing.models import NEW_TOKENS, PADDING, PROMPT_LENGTH
from hfkv.testing.oracle import Judge

BEAMS = 3
# rows of a left-padded batch: padding shares a block with many real tokens, with a few, with none
LENGTHS = (PROMPT_LENGTH, PROMPT_LENGTH - 3, PROMPT_LENGTH - 9, 6)


def check(judge: Judge, output: Any, what: str, hint: str = "") -> None:
    """Re-score an output twice."""
    actual = judge.generated(output)
    sequences = output.sequences
    replay = judge.replay(sequences, sequences.shape[1] - actual.shape[1])
    judge.same(actual, replay, what, "those of a manual loop with the same cache", hint)
    judge.faithful(actual, judge.plain(sequences, actual.shape[1]), what, hint)


@every_generating_family
@every_attention
def test_greedy(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Greedy search scores every step as the model without a cache does."""
    judge = Judge(hfkv_case, family, attention)
    output = judge.generate(judge.tiny.prompt(rows=2))
    check(judge, output, "greedy search", "update() stores or returns wrong tokens")


@every_generating_family
@every_attention
def test_sampling(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Sampling draws from the right distribution, whatever was drawn before."""
    judge = Judge(hfkv_case, family, attention)
    torch.manual_seed(0)
    output = judge.generate(judge.tiny.prompt(rows=2), do_sample=True, temperature=1.5, top_k=0)
    check(judge, output, "sampling", "update() stores or returns wrong tokens")


@every_generating_family
@every_attention
def test_beam_search(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Beams that change rows take their keys and values along."""
    judge = Judge(hfkv_case, family, attention)
    with judge.capability("reorder"):
        output = judge.generate(judge.tiny.prompt(rows=2), num_beams=BEAMS, num_return_sequences=BEAMS)
        beams = output.beam_indices
        assert (beams[:, 1:] != beams[:, :-1]).any(), "no beam changed its row: this search proves nothing"
        check(judge, output, "beam search", "reorder_cache() does not move the rows of everything that is stored")


@every_generating_family
@every_attention
def test_several_sequences_of_one_prompt(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """With ``num_return_sequences`` each sequence goes on from its own tokens."""
    judge = Judge(hfkv_case, family, attention)
    torch.manual_seed(0)
    output = judge.generate(judge.tiny.prompt(rows=2), do_sample=True, temperature=1.5, top_k=0, num_return_sequences=3)
    assert len(output.sequences) == 6
    assert len(output.sequences.unique(dim=0)) > 2, "the samples are copies: this proves nothing"
    check(judge, output, "num_return_sequences=3", "rows of the batch are mixed up")


@every_decoder
@every_attention
def test_left_padded_batch(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Each row of a left-padded batch is what it is alone."""
    judge = Judge(hfkv_case, family, attention)
    ids = judge.tiny.prompt(rows=len(LENGTHS))
    for row, length in enumerate(LENGTHS):
        ids[row, :-length] = PADDING
    output = judge.generate(ids, attention_mask=(ids != PADDING).long())
    actual = judge.generated(output)
    replay = judge.replay(output.sequences, ids.shape[1])
    judge.same(actual, replay, "a left-padded batch", "those of a manual loop with the same cache")
    for row, length in enumerate(LENGTHS):
        alone = output.sequences[row : row + 1, -length - NEW_TOKENS :]
        judge.faithful(
            actual[row : row + 1],
            judge.plain(alone, NEW_TOKENS),
            f"row {row} of a left-padded batch",
            "padding takes part: in the mask's columns, in positions, or in what is stored for real tokens (the cache "
            "knows the mask: HFKVCache.padding)",
        )


@families(["t5"])
@every_attention
def test_batch_with_padded_sources(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """The encoder's padding does not reach the cache of the decoder."""
    judge = Judge(hfkv_case, family, attention)
    tiny = judge.tiny
    ids, source = tiny.prompt(rows=2), tiny.prompt(rows=2, length=12, seed=5)
    source[0, -5:] = PADDING
    output = judge.generate(ids, input_ids=source, attention_mask=(source != PADDING).long())
    actual = judge.generated(output)
    for row, length in enumerate((7, 12)):
        with torch.no_grad(), judge.forgetting(output.sequences.shape[1]):
            alone = tiny.model(
                input_ids=source[row : row + 1, :length],
                decoder_input_ids=output.sequences[row : row + 1],
                **{tiny.cache_argument: judge.reference()},
            )
        expected = alone.logits[:, -NEW_TOKENS - 1 : -1]
        judge.faithful(actual[row : row + 1], expected, f"row {row} of a batch with padded sources")


@every_decoder
@every_attention
def test_chunked_prefill(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """A prompt in chunks is the prompt, with ``prefill_chunk_size`` and in a manual loop."""
    judge = Judge(hfkv_case, family, attention)
    chunk = 7
    output = judge.generate(judge.tiny.prompt(rows=2), prefill_chunk_size=chunk)
    actual = judge.generated(output)
    replay = judge.replay(output.sequences, PROMPT_LENGTH, chunk)
    what = f"prefill_chunk_size={chunk}"
    judge.same(actual, replay, what, "those of a manual loop with the same chunks")
    hint = "an update of several tokens on top of stored ones goes wrong"
    judge.faithful(actual, judge.plain(output.sequences, NEW_TOKENS), what, hint)


@every_generating_family
@every_attention
def test_assisted_decoding(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Drafts that the model rejects leave no trace; a cache that cannot crop says so."""
    judge = Judge(hfkv_case, family, attention)
    with judge.capability("crop"):
        output, lengths = _counted(judge, judge.tiny.prompt(), assistant_model=judge.assistant())
        assert len(lengths) < NEW_TOKENS, "no draft was accepted: this proves nothing"
        assert sum(lengths) > PROMPT_LENGTH + NEW_TOKENS - 1, "no draft was rejected: this proves nothing"
        _check_drafts(judge, output, "assisted decoding")


@every_generating_family
@every_attention
def test_prompt_lookup(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Drafts copied from the prompt leave no trace where they are rejected."""
    judge = Judge(hfkv_case, family, attention)
    ids = judge.tiny.prompt(length=PROMPT_LENGTH // 4).repeat(1, 4)
    with judge.capability("crop"):
        output, lengths = _counted(judge, ids, prompt_lookup_num_tokens=3)
        assert sum(lengths) > PROMPT_LENGTH + NEW_TOKENS - 1, "no draft was rejected: this proves nothing"
        _check_drafts(judge, output, "prompt lookup")


def _counted(judge: Judge, ids: torch.Tensor, **arguments: Any) -> tuple[Any, list[int]]:
    """The output, and how many tokens each forward of the model was given."""
    lengths: list[int] = []
    ids_argument = "decoder_input_ids" if judge.tiny.is_encoder_decoder else "input_ids"
    hook = judge.tiny.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs[ids_argument].shape[1]), with_kwargs=True
    )
    try:
        return judge.generate(ids, **arguments), lengths
    finally:
        hook.remove()


def _check_drafts(judge: Judge, output: Any, what: str) -> None:
    actual = judge.generated(output)
    hint = "crop() leaves rejected tokens, or takes accepted ones"
    judge.faithful(actual, judge.plain(output.sequences, actual.shape[1]), what, hint)
