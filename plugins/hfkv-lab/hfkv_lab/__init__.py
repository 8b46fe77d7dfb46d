"""hfkv's laboratory: what a technique buys and costs on your model, before you trust it."""
