"""What fits on a card: the longest context of a model for each cache, from its config alone."""

import sys

from hfkv.cli.settings import parse_cache
from hfkv_lab.plan import CachePlan, fit
from hfkv_lab.plan_model import from_name
from hfkv_lab.plan_weights import parse_weights

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = from_name(name)
weights = parse_weights("bfloat16")
print(f"{model.parameters.total:,} parameters, {weights.bytes_of(model.parameters):,} bytes of weights")
for cache in ("dynamic", "kivi:nbits=4", "kivi:nbits=2"):
    planned = CachePlan(model, parse_cache(cache))
    found = fit(model, weights, planned, memory=8e9, context=1024)
    print(f"{cache:12}  {planned.bytes(1024):>9,} bytes at 1,024 tokens  {found.most_users:>7,} users in 8 GB")
