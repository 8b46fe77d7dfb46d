"""HQQ for hfkv: its half-quadratic solver decides the codes of quantized KV caches."""
