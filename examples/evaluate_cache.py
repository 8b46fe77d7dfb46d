"""Measure what caches cost in quality on a text of your own, with how sure each number is."""

import sys
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

from hfkv_lab.candidates import candidates
from hfkv_lab.evaluate import EvalOptions, evaluate

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
# the prefill is longer than the residual: a cache that has packed nothing costs nothing
options = EvalOptions(parts=("decoding", "layers"), windows=1, prefill=512, tokens=128)
compared = candidates(model, ["kivi:nbits=4", "kivi:nbits=2"])
for result in evaluate(compared, tokenizer, "\n".join(topics.values()), options):
    worst = max(result.layers, key=lambda layer: layer.output)
    print(
        f"{result.label:12}  KL {result.kl.value:.4f} ({result.kl.low:.4f} to {result.kl.high:.4f})  "
        f"top 1 {result.top1.value:.1%} ({result.top1.low:.1%} to {result.top1.high:.1%})  "
        f"worst layer {worst.layer}: {worst.output:.4f}"
    )
