"""Make a model use a cache wherever the caller names none, and save that with it.

A saved `cache_implementation="kivi"` could not be loaded where hfkv is not installed; this loads everywhere.
"""

import sys
import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv


def cache_of(model, **arguments):
    """Generate, and say which cache it was done with."""
    output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True, **arguments)
    return repr(output.get("cache", output.get("past_key_values")))


name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
inputs = AutoTokenizer.from_pretrained(name)("The KV cache", return_tensors="pt")
model = AutoModelForCausalLM.from_pretrained(name)

hfkv.set_default(model, "kivi", nbits=4)
print("with the default:", cache_of(model))
print("the caller's own choice wins:", cache_of(model, cache_implementation="dynamic"))

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    print("saved and loaded:", cache_of(AutoModelForCausalLM.from_pretrained(folder)))

hfkv.set_default(model, None)
print("without it again:", cache_of(model))
