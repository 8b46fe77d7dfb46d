"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_caches() -> Iterator[hfkv.CacheSpec]:
    """The cache "crosslayer"."""
    yield hfkv.CacheSpec(
        name="crosslayer",
        summary="groups of layers share the keys and values of their first one; any other cache can store them",
        load="hfkv_crosslayer.layer:CrossLayer",
        contract_options={"store": "dynamic"},
        # of what the layers compute when they share, nothing is lost
        contract_tolerance=0.005,
        contract_reference="hfkv_crosslayer.reference:reference",
    )


@hfkv.hookimpl
def hfkv_structures() -> Iterator[hfkv.StructureSpec]:
    """Models whose layers share, as `hfkv_crosslayer.share` makes and `save_pretrained` saves them."""
    yield hfkv.StructureSpec(
        name="crosslayer",
        summary="groups of layers share the keys and values of their first one, in training too",
        load="hfkv_crosslayer.sharing:restore",
        change="hfkv_crosslayer.sharing:share",
    )
