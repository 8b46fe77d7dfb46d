"""What every assistant promises: the text of plain decoding, whatever it drafts."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hfkv
from hfkv import registry
from hfkv.testing.cases import AssistantCase, CacheCase, select
from hfkv.testing.models import NEW_TOKENS, PADDING, TinyModel, decoder_cache, load, logits_error
from hfkv.testing.oracle import LOSSLESS

# grouped queries and one KV head; sliding windows; an encoder
FAMILIES = ["llama", "gemma3", "t5"]
every_model = pytest.mark.parametrize("family", FAMILIES)
# a text that repeats itself, for assistants that copy
PERIOD = 6


def _caches() -> dict[str, CacheCase | None]:
    """Each cache that can crop: transformers' own (None), and all that are installed."""
    ours = {case.label: case for case in select() if case.spec.crop and not registry.unmet(case.spec)}
    return {"dynamic": None, **ours}


def _cached(cache: str, tiny: TinyModel) -> dict[str, Any]:
    """The keywords of `generate` for a cache."""
    case = _caches()[cache]
    if case is None:
        return {}
    return {"cache_implementation": case.spec.name, "cache_config": case.options_for(tiny.model)}


every_cache = pytest.mark.parametrize("cache", _caches())


def _assisted(case: AssistantCase, tiny: TinyModel, **options: Any) -> dict[str, Any]:
    """The keywords that make `generate` use the assistant; skips, visibly, a model that it does not work with."""
    try:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return case.make(tiny.model, **options)
    except NotImplementedError as error:
        pytest.skip(f"{case.label} does not work with {tiny}: {error}")


def _prompt(tiny: TinyModel, rows: int = 1) -> torch.Tensor:
    return tiny.prompt(rows=rows, length=PERIOD).repeat(1, 4)


def _same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.tolist() == expected.tolist(), "the tokens are not those of plain decoding"


@every_model
@every_cache
def test_greedy_text_is_that_of_plain_decoding(hfkv_assistant: AssistantCase, family: str, cache: str) -> None:
    """The same cache decodes the same tokens; what a lossy one loses does not depend on the drafts."""
    tiny = load(family, "sdpa")
    arguments = {"max_new_tokens": 2 * NEW_TOKENS, **_cached(cache, tiny)}
    assisted = _assisted(hfkv_assistant, tiny)
    ids = _prompt(tiny)
    output = tiny.generate(ids, **arguments, **assisted)
    expected = tiny.generate(ids, **arguments)
    _same(output.sequences, expected.sequences)
    stats = hfkv.stats(output)
    assert stats.drafted > 0, "nothing was drafted: this proves nothing"
    assert stats.tokens == 2 * NEW_TOKENS - 1
    held = decoder_cache(tiny.cache_of(output)).get_seq_length()
    assert held == decoder_cache(tiny.cache_of(expected)).get_seq_length(), "the cache holds other tokens"


@every_model
def test_rejected_drafts_leave_no_trace(hfkv_assistant: AssistantCase, family: str) -> None:
    """Logits of every step, and a second turn with the cache that was returned, are those of plain decoding."""
    tiny = load(family, "sdpa")
    assisted = _assisted(hfkv_assistant, tiny)
    ids = _prompt(tiny)
    first, plain = (tiny.generate(ids, output_scores=True, **arguments) for arguments in (assisted, {}))
    for name in ("logits", "scores"):
        actual, expected = (torch.stack(output[name], dim=1).clamp(min=-1e4) for output in (first, plain))
        assert float(logits_error(actual, expected).max()) < LOSSLESS
    if tiny.is_encoder_decoder:
        return
    turn = torch.cat([first.sequences, tiny.prompt(length=5, seed=9)], dim=1)
    again = tiny.generate(turn, **{tiny.cache_argument: tiny.cache_of(first)}, **assisted)
    _same(again.sequences, tiny.generate(turn).sequences)


@every_model
@every_cache
def test_rows_of_a_batch_are_what_they_are_alone(hfkv_assistant: AssistantCase, family: str, cache: str) -> None:
    """Rows accept different numbers of drafts, and end at different places."""
    tiny = load(family, "sdpa")
    assisted = _assisted(hfkv_assistant, tiny)
    ids = torch.cat([_prompt(tiny), tiny.prompt(rows=2), _prompt(tiny).flip(1)])
    if tiny.is_encoder_decoder:
        ids[:, 0] = 1
    arguments = {"max_new_tokens": 2 * NEW_TOKENS, **_cached(cache, tiny)}
    free = tiny.generate(ids, **arguments).sequences
    # ends the first row early and, by chance, others
    arguments["eos_token_id"] = int(free[0, ids.shape[1] + 5])
    output = tiny.generate(ids, pad_token_id=PADDING, **arguments, **assisted)
    expected = tiny.generate(ids, pad_token_id=PADDING, **arguments).sequences
    _same(output.sequences, expected)
    stats = hfkv.stats(output)
    assert stats.drafted > 0
    for row in range(len(ids)):
        alone = tiny.generate(ids[row : row + 1], pad_token_id=PADDING, **arguments, **assisted).sequences
        _same(output.sequences[row : row + 1, : alone.shape[1]], alone)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_left_padded_rows_are_what_they_are_alone(hfkv_assistant: AssistantCase, family: str) -> None:
    """Padding takes no part in drafts."""
    tiny = load(family, "sdpa")
    assisted = _assisted(hfkv_assistant, tiny)
    ids = _prompt(tiny, rows=3)
    lengths = (ids.shape[1], 13, 7)
    for row, length in enumerate(lengths):
        ids[row, :-length] = PADDING
    output = tiny.generate(ids, attention_mask=(ids != PADDING).long(), **assisted)
    assert hfkv.stats(output).drafted > 0
    for row, length in enumerate(lengths):
        alone = tiny.generate(ids[row : row + 1, -length:])
        _same(output.sequences[row : row + 1, -length - NEW_TOKENS :], alone.sequences)


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value)

    def end(self) -> None:
        self.ended = True


class _AfterToken(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


@every_model
def test_stops_where_plain_decoding_stops(hfkv_assistant: AssistantCase, family: str) -> None:
    """At each length, at an end token inside a block of drafts, by a criterion; a streamer gets each token once."""
    tiny = load(family, "sdpa")
    assisted = _assisted(hfkv_assistant, tiny)
    ids = _prompt(tiny)
    free = tiny.generate(ids, max_new_tokens=NEW_TOKENS).sequences[0, ids.shape[1] :].tolist()
    for new_tokens in range(1, 8):
        output = tiny.generate(ids, max_new_tokens=new_tokens, **assisted)
        assert output.sequences[0, ids.shape[1] :].tolist() == free[:new_tokens]
    for token in dict.fromkeys(free):
        until = free[: free.index(token) + 1]
        criterion = StoppingCriteriaList([_AfterToken(token)])
        for how in ({"eos_token_id": token}, {"stopping_criteria": criterion}):
            streamer = _Recorder()
            output = tiny.generate(ids, streamer=streamer, **how, **assisted)
            assert output.sequences[0, ids.shape[1] :].tolist() == until
            assert decoder_cache(tiny.cache_of(output)).get_seq_length() == output.sequences.shape[1] - 1
            assert streamer.ended
            assert torch.cat([part.flatten() for part in streamer.tokens]).tolist() == output.sequences[0].tolist()


@every_model
def test_processors_are_honoured(hfkv_assistant: AssistantCase, family: str) -> None:
    """Penalties that depend on the text so far see each token's own past, drafts included."""
    tiny = load(family, "sdpa")
    assisted = _assisted(hfkv_assistant, tiny)
    ids = _prompt(tiny, rows=2)
    for processors in (
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(1, 40)), "pad_token_id": PADDING},
    ):
        actual = tiny.generate(ids, **processors, **assisted)
        _same(actual.sequences, tiny.generate(ids, **processors).sequences)


def test_calls_do_not_depend_on_each_other(hfkv_assistant: AssistantCase) -> None:
    """The assistant, the model and its settings are after a call what they were before it."""
    tiny = load("llama", "sdpa")
    before = copy.deepcopy(
        (tiny.model.state_dict(), tiny.model.config.to_dict(), tiny.model.generation_config.to_dict())
    )
    assisted = _assisted(hfkv_assistant, tiny)
    first = tiny.generate(_prompt(tiny), **assisted)
    tiny.generate(tiny.prompt(rows=2, seed=4), **assisted)
    again = tiny.generate(_prompt(tiny), **assisted)
    _same(again.sequences, first.sequences)
    one, other = hfkv.stats(first), hfkv.stats(again)
    assert (one.drafted, one.accepted, one.verifications) == (other.drafted, other.accepted, other.verifications)
    after = tiny.model.state_dict(), tiny.model.config.to_dict(), tiny.model.generation_config.to_dict()
    assert after[0].keys() == before[0].keys()
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    assert after[1:] == before[1:]


def _small(vocabulary: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
        )
        return transformers.LlamaForCausalLM(config).eval()


VOCABULARY = 8
DRAWS = 4000


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The likeliest tokens that reach ``top_p`` together, among ``[..., vocabulary]``."""
    ordered, places = probabilities.sort(dim=-1, descending=True)
    kept = torch.where(ordered.cumsum(dim=-1) - ordered < top_p, ordered, 0.0)
    return torch.zeros_like(ordered).scatter(-1, places, kept / kept.sum(dim=-1, keepdim=True))


def _exact_distribution(model: Any, prompt: list[int], temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The probability of each pair of next tokens, by the definition: no sampling."""
    ids = torch.tensor([[*prompt, first] for first in range(VOCABULARY)])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -2:] / temperature
    if top_k:
        worst = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < worst, -torch.inf)
    steps = _nucleus(logits.softmax(dim=-1), top_p)
    return (steps[0, 0][:, None] * steps[:, 1]).flatten()


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 0.7), (0.6, 0, 1.0), (1.5, 4, 1.0)])
def test_sampling_is_exact(hfkv_assistant: AssistantCase, temperature: float, top_k: int, top_p: float) -> None:
    """Pairs of sampled tokens have the model's own distribution: as near to it as draws from it are."""
    model = _small(VOCABULARY)
    assisted = hfkv_assistant.make(model)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    exact = _exact_distribution(model, prompt, temperature, top_k, top_p)
    torch.manual_seed(0)
    output = model.generate(
        torch.tensor([prompt]).expand(DRAWS, -1),
        do_sample=True,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        # the first token comes with the prompt: the next two may be drafts
        max_new_tokens=3,
        return_dict_in_generate=True,
        **assisted,
    )
    stats = hfkv.stats(output)
    assert stats.drafted > 0, "nothing was drafted: this proves nothing"
    pairs = output.sequences[:, len(prompt)] * VOCABULARY + output.sequences[:, len(prompt) + 1]
    # the second of the pair is a draft or its correction
    expected = [
        float(
            (exact.multinomial(DRAWS, replacement=True).bincount(minlength=len(exact)) / DRAWS - exact).abs().sum() / 2
        )
        for _ in range(200)
    ]
    counted = pairs.bincount(minlength=len(exact)) / DRAWS
    distance = float((counted - exact).abs().sum() / 2)
    assert distance <= max(expected), (
        f"total variation {distance:.4f}; 200 samples of the same size reach {max(expected):.4f}"
    )


def test_sampled_text_depends_on_the_seed_alone(hfkv_assistant: AssistantCase) -> None:
    """The same seed gives the same text however long drafts are, if drafts are not sampled by their own chance."""
    tiny = load("llama", "sdpa")
    texts = []
    for length in (1, 2, 5):
        assisted = _assisted(hfkv_assistant, tiny, num_assistant_tokens=length)
        torch.manual_seed(11)
        output = tiny.generate(_prompt(tiny, rows=2), do_sample=True, temperature=0.7, **assisted)
        texts.append(output.sequences.tolist())
    assert all(one == other for one, other in itertools.pairwise(texts))


def test_num_return_sequences(hfkv_assistant: AssistantCase) -> None:
    """Several samples of one prompt, which transformers' own assisted decoding refuses."""
    tiny = load("llama", "sdpa")
    assisted = _assisted(hfkv_assistant, tiny)
    output = tiny.generate(_prompt(tiny), do_sample=True, temperature=1.5, num_return_sequences=3, **assisted)
    assert len(output.sequences.unique(dim=0)) == 3
    judged = tiny.logits(output.sequences)[:, -NEW_TOKENS - 1 : -1]
    assert float(logits_error(torch.stack(output.logits, dim=1), judged).max()) < LOSSLESS


def test_unknown_option_is_refused(hfkv_assistant: AssistantCase) -> None:
    """A misspelt option is an error that lists the options and names the closest."""
    with pytest.raises(ValueError, match="Did you mean 'num_assistant_tokens'") as caught:
        hfkv_assistant.make(load("llama", "sdpa").model, num_asistant_tokens=3)
    assert repr(hfkv_assistant.label) in str(caught.value)
