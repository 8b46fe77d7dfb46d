"""Keys and values as 8-bit integers, with one scale for each token of each head."""

from dataclasses import dataclass

import torch

from hfkv.cache import CacheOptions, KVLayer, check_choice, check_crop, option


@dataclass(frozen=True, kw_only=True)
class Int8Options(CacheOptions):
    """What ``cache_config`` takes."""

    scale_dtype: str = option("float16", "how scales are stored: float16, bfloat16 or float32")

    def __post_init__(self):
        """Check the value; unknown names never come this far."""
        check_choice("scale_dtype", self.scale_dtype, ("float16", "bfloat16", "float32"))


class Int8Layer(KVLayer):
    """A layer that stores codes and scales, ``[batch, kv_heads, tokens, head_dim or 1]`` each."""

    Options = Int8Options
    # key codes, key scales, value codes, value scales
    stored = ()

    def update(self, key_states, value_states, *args, **kwargs):
        """Store the new tokens as codes; the current forward sees them as they are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.dtype = key_states.dtype
        new, past = (key_states, value_states), self.dense()
        packed = (*self.encode(key_states), *self.encode(value_states))
        self.stored = packed if past is None else join(self.stored, packed)
        return new if past is None else join(past, new)

    def encode(self, states):
        """Codes from -127 to 127, and the scale that each token's largest number sets."""
        scales = states.float().abs().amax(dim=-1, keepdim=True) / 127
        # a scale of zero would divide by zero
        scales = scales.clamp(min=1e-7).to(getattr(torch, self.options.scale_dtype))
        return (states / scales).round().clamp(-127, 127).to(torch.int8), scales

    def dense(self):
        """All keys and values, decoded."""
        if not self.stored:
            return None
        key_codes, key_scales, value_codes, value_scales = self.stored
        return (key_codes * key_scales.float()).to(self.dtype), (value_codes * value_scales.float()).to(self.dtype)

    def get_seq_length(self):
        """Tokens stored."""
        return self.stored[0].shape[2] if self.stored else 0

    def crop(self, tokens_to_remove):
        """Remove the newest tokens; the number is zero or negative, as in transformers."""
        keep = max(self.get_seq_length() - check_crop(tokens_to_remove), 0)
        self.stored = tuple(part[:, :, :keep] for part in self.stored)

    def map_rows(self, rows):
        """Replace the batch by the rows of these indices."""
        self.stored = tuple(part[rows.to(part.device)] for part in self.stored)

    def reset(self):
        """Forget all tokens."""
        self.stored = ()

    def segments(self):
        """For `hfkv.memory`: nothing that is stored is full precision."""
        yield "packed", sum(part.untyped_storage().nbytes() for part in self.stored)


def join(past, new):
    """Append tokens to each part."""
    return tuple(torch.cat(pair, dim=2) for pair in zip(past, new, strict=True))
