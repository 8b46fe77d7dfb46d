"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_assistants() -> Iterator[hfkv.AssistantSpec]:
    """The assistants."""
    yield hfkv.AssistantSpec(
        name="lookup",
        summary="copies what followed the longest match in the prompt, the output and texts handed over",
        load="hfkv_speculative.lookup:LookupDrafter",
        contract_options={"min_match": 1, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
    )
    yield hfkv.AssistantSpec(
        name="model",
        summary="a smaller model drafts; its tokenizer and vocabulary may differ",
        load="hfkv_speculative.model:ModelDrafter",
        contract_options="hfkv_speculative.contract:draft_model",
    )
