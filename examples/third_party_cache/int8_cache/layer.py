"""Keys and values as 8-bit integers, with one scale for each token of each head."""

import torch

from hfkv.cache import KVLayer
from hfkv.cache.layer import check_crop


class Int8Layer(KVLayer):
    """A layer that stores codes and scales, ``[batch, kv_heads, tokens, head_dim or 1]`` each."""

    # key codes, key scales, value codes, value scales
    stored = ()

    def update(self, key_states, value_states, *args, **kwargs):
        """Store the new tokens as codes; the current forward sees them as they are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.dtype = key_states.dtype
        new, past = (key_states, value_states), self.dense()
        packed = (*encode(key_states), *encode(value_states))
        if past is None:
            self.stored = packed
            return new
        self.stored = join(self.stored, packed)
        return join(past, new)

    def dense(self):
        """All keys and values, decoded."""
        if not self.stored:
            return None
        key_codes, key_scales, value_codes, value_scales = self.stored
        return (key_codes * key_scales).to(self.dtype), (value_codes * value_scales).to(self.dtype)

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


def encode(states):
    """Codes from -127 to 127, and the scale that each token's largest number sets."""
    scales = states.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (states / scales).round().to(torch.int8), scales


def join(past, new):
    """Append tokens to each part."""
    return tuple(torch.cat(pair, dim=2) for pair in zip(past, new, strict=True))
