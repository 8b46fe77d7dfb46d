"""optimum-quanto for hfkv: its optimizers decide the codes of quantized KV caches."""
