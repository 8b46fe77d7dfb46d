"""One layer in six sees everything, the others a window; groups of layers share, and what they store has 4 bits.

Shown on random keys and values of 8,192 tokens, in the shape of SmolLM2-135M: what counts here is bytes. A model has
to be trained for such a cache, with `hfkv_crosslayer.share`.
"""

import torch
from transformers import AutoConfig, DynamicCache

import hfkv

LAYERS, HEADS, CHANNELS, TOKENS = 30, 3, 64, 8192
config = AutoConfig.for_model(
    "llama", num_hidden_layers=LAYERS, hidden_size=576, num_attention_heads=9, num_key_value_heads=HEADS
)
# layers 0, 6, 12, 18 and 24 are global; the five between two of them are local
global_layers = list(range(0, LAYERS, 6))
groups = [global_layers[:3], global_layers[3:]]
groups += [[first + 1, first + 2, first + 3] for first in global_layers]
groups += [[first + 4, first + 5] for first in global_layers]
packed = {"nbits": 4, "residual_length": 64}
local = {**packed, "window_length": 256, "residual_length": 32, "positions": "absolute"}
hybrid = hfkv.make_cache(
    "crosslayer",
    config,
    groups=groups,
    store="kivi",
    store_config=packed,
    # settings by layer are those of the layers that store; borrowers read what their donor keeps
    layers={str(first + offset): {"store_config": local} for first in global_layers for offset in (1, 4)},
)
plain = DynamicCache(config=config)
for cache in (plain, hybrid):
    for layer in range(LAYERS):
        states = torch.randn(2, 1, HEADS, TOKENS, CHANNELS, dtype=torch.bfloat16)
        cache.update(states[0], states[1], layer)
before, after = (hfkv.memory(cache).stored_bytes for cache in (plain, hybrid))
print(f"plain   {before:>12,} bytes")
print(f"hybrid  {after:>12,} bytes, {before / after:.1f} times smaller")
