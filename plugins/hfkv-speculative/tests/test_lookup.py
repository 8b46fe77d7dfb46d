"""The assistant "lookup": what is found, and that it is the longest."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import hfkv
from hfkv.speculation import Block
from hfkv.testing.models import load
from hfkv_speculative.copy_evidence import CopyEvidence
from hfkv_speculative.lookup import Index, LookupDrafter, LookupOptions


def longest(tokens, recent, min_match):
    """The longest earlier occurrence of the end of ``recent``, the newest of equal ones, by comparing everything."""
    best = (0, 0)
    for start in range(1, len(tokens)):
        length = 0
        while length < min(48, len(recent), start) and tokens[start - 1 - length] == recent[-1 - length]:
            length += 1
        if length >= max(min_match, best[0]):
            best = length, start
    return best


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_match_is_the_longest_and_the_newest(min_match):
    chance = random.Random(0)
    index = Index(min_match)
    for _ in range(60):
        index.extend([chance.randrange(4) for _ in range(chance.randrange(1, 4))])
        if len(index.tokens) < 30:
            assert index.match(index.tokens) == longest(index.tokens, index.tokens, min_match)
    other = Index(min_match, [chance.randrange(3) for _ in range(25)])
    for length in range(min_match, 20):
        recent = index.tokens[:length]
        assert other.match(recent) == longest(other.tokens, recent, min_match)


def propose(rows, width, **options):
    """What is proposed after these rows of tokens."""
    drafter = LookupDrafter(None, LookupOptions(**options), options.pop("resources", []))
    ids = torch.zeros(len(rows), max(map(len, rows)) + width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    cached = min(map(len, rows)) - 1
    draft = drafter.propose(Block(ids, [len(tokens) for tokens in rows], cached, width, {}))
    return [
        ids[row, len(tokens) : len(tokens) + length].tolist()
        for row, (tokens, length) in enumerate(zip(rows, draft.lengths, strict=True))
    ]


def test_rows_are_searched_on_their_own():
    assert propose([[1, 2, 3, 9, 1, 2], [5, 6, 7, 8, 9, 10], [4, 4, 4, 4, 4, 4]], 4) == [[3, 9, 1], [], [4, 4, 4]]


def test_a_row_that_is_ahead_proposes_what_there_is_room_for():
    assert propose([[1, 2, 3, 9, 1, 2], [1, 2, 3, 4, 9, 9, 1, 2]], 4) == [[3, 9, 1], [3]]


def test_a_match_at_the_end_repeats_itself():
    assert propose([[7, 1, 2, 1, 2]], 8) == [[1, 2, 1, 2, 1, 2, 1]]


def test_texts_are_copied_from_where_they_match_longer():
    model = load("llama", "sdpa").model
    resources = LookupDrafter.prepare(model, LookupOptions(texts=[[8, 1, 2, 5, 6], [1, 2, 7, 7]]))
    drafter = LookupDrafter(None, LookupOptions(), resources)
    ids = torch.tensor([[1, 2, 3, 8, 1, 2, 0, 0]])
    draft = drafter.propose(Block(ids, [6], 5, 3, {}))
    assert draft.lengths == [2]
    assert ids[0, 6:].tolist() == [5, 6]


def test_texts_are_checked():
    model = load("llama", "sdpa").model
    with pytest.raises(ValueError, match="texts is one string: pass a list"):
        hfkv.assistant("lookup", model, texts="a text")
    with pytest.raises(ValueError, match="texts are strings, and tokenizer=None"):
        hfkv.assistant("lookup", model, texts=["a text"])
    with pytest.raises(ValueError, match="token ids must be integers from 0 to 95"):
        hfkv.assistant("lookup", model, texts=[[95, 96]])


def test_texts_that_are_strings_are_tokenized():
    words = Tokenizer(WordLevel({"a": 4, "bird": 5, "sings": 6}))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    options = LookupOptions(texts=["a bird sings"], tokenizer=tokenizer)
    (index,) = LookupDrafter.prepare(load("llama", "sdpa").model, options)
    assert index.tokens == [4, 5, 6]


def test_handed_over_text_saves_forwards():
    tiny = load("llama", "sdpa")
    ids = tiny.prompt()
    answer = tiny.generate(ids, max_new_tokens=64).sequences[0].tolist()
    asked = {"num_assistant_tokens": 7, "num_assistant_tokens_schedule": "constant"}
    output = tiny.generate(ids, max_new_tokens=64, **hfkv.assistant("lookup", tiny.model, texts=[answer], **asked))
    assert output.sequences[0].tolist() == answer
    assert hfkv.stats(output).verifications == 8


def test_forecast_is_that_all_rows_are_right():
    drafter = LookupDrafter(None, LookupOptions(num_assistant_tokens=4), [])
    evidence = CopyEvidence()
    # matches of two tokens, of one, and none at all
    two, one, none = [1, 2, 3, 9, 1, 2], [3, 9, 4, 9, 5, 4], [1, 2, 3, 4, 5, 6]
    ids = torch.tensor([two, one])
    both = [x * y for x, y in zip(evidence.chances(2, 4), evidence.chances(1, 4), strict=True)]
    assert drafter.forecast(ids, [6, 6]) == pytest.approx(both)
    # each token that is right makes a match one longer, and the next is likelier
    assert evidence.chances(2, 2)[1] == evidence.chance(2) * evidence.chance(3)
    drafter = LookupDrafter(None, LookupOptions(num_assistant_tokens=4), [])
    assert drafter.forecast(torch.tensor([two, none]), [6, 6]) == [0.0] * 4
    # what a row knows beyond the others is certain; one that has ended is waited for by nobody
    drafter = LookupDrafter(None, LookupOptions(num_assistant_tokens=4), [])
    ahead = torch.tensor([[*two, 3, 9], [*none, 0, 0], [*two, 0, 0]])
    longer = [1.0, 1.0, *drafter.forecast(torch.tensor([[*two, 3, 9]]), [8])[:2]]
    expected = [x * y for x, y in zip(evidence.chances(2, 4), longer, strict=True)]
    drafter = LookupDrafter(None, LookupOptions(num_assistant_tokens=4), [])
    assert drafter.forecast(ahead, [8, 6 + 5, 6]) == pytest.approx(expected)


def test_every_token_teaches_and_no_other_call():
    resources = LookupDrafter.prepare(load("llama", "sdpa").model, LookupOptions(texts=[[8, 1, 2, 5, 6]]))
    drafter, other = (LookupDrafter(None, LookupOptions(), resources) for _ in range(2))
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2, 3]])
    before = drafter.forecast(ids, [4])
    # nothing was drafted, and yet five copies would have been right
    assert drafter.forecast(ids, [9])[0] > before[0]
    assert other.forecast(ids[:, :4], [4]) == before


def test_chances_become_those_of_the_text():
    chance = random.Random(0)
    evidence = CopyEvidence()
    for _ in range(500):
        evidence.learn(1, chance.random() < 0.8)
        evidence.learn(20, chance.random() < 0.3)
    assert evidence.chance(1) == pytest.approx(0.8, abs=0.1)
    assert evidence.chance(20) == pytest.approx(0.3, abs=0.1)
    assert evidence.chance(5) == CopyEvidence().chance(5)
    assert CopyEvidence().chances(0, 3) == [0.0] * 3
