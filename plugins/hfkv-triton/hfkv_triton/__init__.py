"""GPU kernels for hfkv: attention on packed caches, packing and unpacking in Triton."""
