"""The layers of bitsandbytes, in tensors that can be saved, with its own products where they are right.

Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022, and "QLoRA: Efficient
Finetuning of Quantized LLMs", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from bitsandbytes import functional

from hfkv.weights import QuantizedLinear
from hfkv.weights.linear import Layout

from .options import BnbOptions

# scales that are quantized together, by double quantization
NESTED_BLOCK = 256
# outputs that the product for AVX-512 wants next to each other
PACKED_OUTPUTS = 32


class BnbLinear(QuantizedLinear):
    """A weight as bitsandbytes holds it.

    8 bits: ``codes`` ``[out_features, in_features]`` int8 and ``absmax`` ``[out_features]`` float32; the inputs are
    quantized too, row by row, but for the features beyond the threshold. 4 bits: ``codes`` ``[weights / 2, 1]`` uint8,
    ``absmax`` ``[blocks]`` float32, or uint8 with ``nested_absmax`` and ``nested_offset`` for double quantization.

    On a CPU with AVX-512 for bfloat16, a product of bitsandbytes wants 4-bit codes in another order,
    ``[out_features, in_features / 2]``. bitsandbytes leaves them so, and its later gradients are wrong; here the shape
    tells the orders apart, and everything but that product puts the codes back.
    """

    Options = BnbOptions
    backend = "bnb"
    options: BnbOptions
    codes: torch.Tensor
    absmax: torch.Tensor
    nested_absmax: torch.Tensor
    nested_offset: torch.Tensor

    def check(self) -> None:
        """Refuse a shape whose bytes would not be whole."""
        if self.options.nbits == 4 and self.in_features * self.out_features % 2:
            raise ValueError(f"4 bits need an even number of weights, got {self.out_features} x {self.in_features}")

    @property
    def activation_bits(self) -> int | None:
        """8 with LLM.int8."""
        return 8 if self.options.nbits == 8 else None

    def layout(self) -> Layout:
        """Shape and dtype of what is stored."""
        if self.options.nbits == 8:
            codes = ((self.out_features, self.in_features), torch.int8)
            return {"codes": codes, "absmax": ((self.out_features,), torch.float32)}
        count = self.in_features * self.out_features
        blocks = -(-count // self.options.block_size)
        result: dict[str, Any] = {"codes": ((count // 2, 1), torch.uint8), "absmax": ((blocks,), torch.float32)}
        if self.options.double_quant:
            result["absmax"] = ((blocks,), torch.uint8)
            result["nested_absmax"] = ((-(-blocks // NESTED_BLOCK),), torch.float32)
            result["nested_offset"] = ((1,), torch.float32)
        return result

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """What bitsandbytes makes of the weight."""
        if self.options.nbits == 8:
            codes, absmax, _ = functional.int8_vectorwise_quant(weight.half())
            return {"codes": codes, "absmax": absmax}
        codes, state = functional.quantize_4bit(
            weight.float().contiguous(),
            blocksize=self.options.block_size,
            compress_statistics=self.options.double_quant,
            quant_type=self.options.kind,
        )
        stored = {"codes": codes, "absmax": state.absmax}
        if self.options.double_quant:
            stored |= {"nested_absmax": state.state2.absmax, "nested_offset": state.offset.view(1)}
        return stored

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, by bitsandbytes."""
        if self.options.nbits == 8:
            return (self.codes.float() * (self.absmax / 127)[:, None]).to(dtype)
        return functional.dequantize_4bit(self._codes(), self._state(dtype))

    def _state(self, dtype: torch.dtype) -> functional.QuantState:
        device = self.codes.device
        nested = {}
        if self.options.double_quant:
            inner = functional.QuantState(
                absmax=self.nested_absmax,
                blocksize=NESTED_BLOCK,
                code=functional.create_dynamic_map().to(device),
                dtype=torch.float32,
            )
            nested = {"offset": self.nested_offset[0], "state2": inner}
        return functional.QuantState(
            absmax=self.absmax,
            shape=torch.Size((self.out_features, self.in_features)),
            code=functional.get_4bit_type(self.options.kind, device=device),
            blocksize=self.options.block_size,
            quant_type=self.options.kind,
            dtype=dtype,
            **nested,
        )

    # the products

    def fast(self, states: torch.Tensor) -> bool:
        """Every product with 8 bits; with 4 bits what a CPU with AVX-512 takes in bfloat16."""
        return self.options.nbits == 8 or (self._has_product and states.dtype == torch.bfloat16)

    @property
    def _has_product(self) -> bool:
        whole = self.out_features % PACKED_OUTPUTS == 0 and self.in_features % self.options.block_size == 0
        return whole and self.codes.device.type == "cpu" and functional.has_avx512bf16()

    def matmul(self, states: torch.Tensor) -> torch.Tensor:
        """The product of bitsandbytes."""
        return self._llm_int8(states) if self.options.nbits == 8 else self._packed(states)

    def _llm_int8(self, states: torch.Tensor) -> torch.Tensor:
        threshold = float(self.options.threshold)
        rows, absmax, outliers = functional.int8_vectorwise_quant(states.half(), threshold=threshold)
        if threshold == 0:
            return torch.ops.bitsandbytes.int8_scaled_mm.default(
                rows, self.codes, absmax, self.absmax, bias=None, dtype=states.dtype
            )
        output, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            states, rows, self.codes, absmax, self.absmax, outliers, None
        )
        return output.to(states.dtype)

    def _packed(self, states: torch.Tensor) -> torch.Tensor:
        scales = self._buffers.get("product_scales")
        if scales is None or self.codes.shape[1] == 1:
            packed, state = functional._convert_weight_packed_for_cpu(self._codes(), self._state(torch.bfloat16))
            scales = state.absmax
            self.register_buffer("product_scales", scales, persistent=False)
            self.codes = packed
        state = functional.QuantState(
            absmax=scales,
            shape=torch.Size((self.out_features, self.in_features)),
            code=functional.get_4bit_type(self.options.kind, device=self.codes.device),
            blocksize=self.options.block_size,
            quant_type=self.options.kind,
            dtype=torch.bfloat16,
        )
        state.packing_format_for_cpu = True
        return functional.gemv_4bit(states.contiguous(), self.codes, state=state)

    def path(self) -> str:
        """Which product computes."""
        if self.options.nbits == 8:
            return f"bitsandbytes: int8 products, features beyond {self.options.threshold:g} in 16 bits"
        decoded = "decoded by bitsandbytes for each call"
        return f"bitsandbytes' AVX-512 product for bfloat16, otherwise {decoded}" if self._has_product else decoded

    # the codes are saved, moved and copied in one order

    def _codes(self) -> torch.Tensor:
        """The codes as they are saved."""
        if self.options.nbits == 8 or self.codes.shape[1] == 1:
            return self.codes
        blocks = self.codes.view(-1, PACKED_OUTPUTS)
        halves = torch.cat([blocks & 15, blocks >> 4], dim=1)
        shape = (self.out_features // PACKED_OUTPUTS, self.in_features // 2, PACKED_OUTPUTS, 2)
        pairs = halves.view(shape).transpose(1, 2).reshape(-1, 2)
        return (pairs[:, :1] << 4) | pairs[:, 1:]

    def settle(self) -> None:
        """Put the codes into the order in which they are saved."""
        self.codes = self._codes()
        self._buffers.pop("product_scales", None)
        self._non_persistent_buffers_set.discard("product_scales")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}codes"] = self._codes()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.settle()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.settle()
        return super()._apply(fn, recurse)
