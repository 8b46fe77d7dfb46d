"""The conformance kit: what every cache of `model.generate` promises, as tests that any plugin can run.

``pytest --pyargs hfkv.testing.contracts --hfkv-plugin NAME`` runs every contract over the caches of one plugin.
"""
