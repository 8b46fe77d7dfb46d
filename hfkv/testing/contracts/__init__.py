"""The contracts: every installed cache, in every mode of `generate`, on every tiny model where the mode applies."""
