"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv

# for the contracts: on tiny models nothing pays
ALWAYS = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}


@hfkv.hookimpl
def hfkv_assistants() -> Iterator[hfkv.AssistantSpec]:
    """The assistants."""
    yield hfkv.AssistantSpec(
        name="lookup",
        summary="copies what followed the longest match in the prompt, the output and texts handed over",
        load="hfkv_speculative.lookup:LookupDrafter",
        contract_options={"min_match": 1, **ALWAYS},
    )
    yield hfkv.AssistantSpec(
        name="model",
        summary="a smaller model drafts; its tokenizer and vocabulary may differ",
        load="hfkv_speculative.model:ModelDrafter",
        contract_options="hfkv_speculative.contract:draft_model",
    )
    yield hfkv.AssistantSpec(
        name="self-kv",
        summary="the model itself drafts from its cache in fewer bits: a view of a hierarchical one, else a copy",
        load="hfkv_speculative.self_kv:SelfKVDrafter",
        requires=("hfkv-kivi",),
        contract_options={
            "cache_config": {"nbits": 4, "group_size": 8, "residual_length": 8, "sink_length": 2},
            **ALWAYS,
        },
    )
    yield hfkv.AssistantSpec(
        name="self-weights",
        summary="the model itself drafts with 4-bit weights, from its own cache",
        load="hfkv_speculative.self_weights:SelfWeightsDrafter",
        requires=("hfkv-rtn",),
        contract_options=ALWAYS,
    )
    yield hfkv.AssistantSpec(
        name="early-exit",
        summary="the first layers of the model draft, from its own cache",
        load="hfkv_speculative.early_exit:EarlyExitDrafter",
        contract_options=ALWAYS,
    )
    yield hfkv.AssistantSpec(
        name="medusa",
        summary="trained heads on the model's last hidden state draft, all tokens at once",
        load="hfkv_speculative.medusa:MedusaDrafter",
        contract_options="hfkv_speculative.contract:medusa_heads",
    )
    yield hfkv.AssistantSpec(
        name="eagle",
        summary="a trained decoder layer predicts the model's next hidden states",
        load="hfkv_speculative.eagle:EagleDrafter",
        contract_options="hfkv_speculative.contract:eagle_head",
    )
