"""Give single layers their own options, and see what each stores.

Errors in the first layer pass through all others, so it gets 8 bits here; the last one keeps the plain cache.
"""

import sys
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer(topics["strings"][:3000], return_tensors="pt")
output = model.generate(
    **inputs,
    max_new_tokens=20,
    return_dict_in_generate=True,
    cache_implementation="kivi",
    # later entries win; "dynamic" leaves a layer as transformers has it
    cache_config={"nbits": 2, "layers": {"0": {"nbits": 8}, "-1": "dynamic"}},
)
report = hfkv.memory(output)
for index, layer in enumerate(report.layers):
    print(
        f"layer {index:2}  {layer.kind:12}  {layer.packed_bytes:>9,} packed  "
        f"{layer.full_precision_bytes:>9,} full precision  {layer.bits_per_element:5.2f} bits per element"
    )
print(f"{report.stored_bytes:,} bytes, {report.bits_per_element:.2f} bits per element")
