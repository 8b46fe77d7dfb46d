"""The linear layer of every backend: packed weights in buffers, decoded when they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn

from .options import WeightOptions

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class QuantizedLinear(nn.Module, ABC):
    """Base class of the layers that ``backend`` names; stands in for an `nn.Linear`.

    A subclass says which tensors it stores (`layout`), how a weight becomes them (`encode`) and how they become a
    weight again (`decode`). All else is here: loading, saving, moving, the choice between the two ways to compute.

    Parameters
    ----------
    in_features, out_features
        As of `nn.Linear`.
    options
        An instance of ``Options``.
    dtype
        The dtype of the weight that is stood for.
    bias
        The layer's bias, used as it is.
    device
        Where the tensors are made, uninitialized.
    """

    Options: ClassVar[type[WeightOptions]] = WeightOptions
    backend: ClassVar[str]
    # whether `convert` looks at more than a layer's own weight, and so needs the model loaded
    whole_model: ClassVar[bool] = False
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        options: Any,
        *,
        dtype: torch.dtype,
        bias: nn.Parameter | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.options = options
        self.dtype = dtype
        self.check()
        for name, (shape, stored) in self.layout().items():
            self.register_buffer(name, torch.empty(shape, dtype=stored, device=device))
        self.register_parameter("bias", bias)
        # transformers must not initialize what stands for no random number
        self._is_hf_initialized = True

    # what a backend says

    def check(self) -> None:
        """Raise ValueError where the options do not fit the layer's shape; nothing by default."""

    @abstractmethod
    def layout(self) -> Layout:
        """Shape and dtype of each stored tensor, by name; ``weight`` and ``bias`` are taken."""

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of `layout` for a weight ``[out_features, in_features]``."""

    @abstractmethod
    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """``[out_features, in_features]``: the weight that the stored tensors stand for."""

    def fast(self, states: torch.Tensor) -> bool:
        """Whether `matmul` should compute this product, rather than the decoded weight; never, by default.

        It is asked only where no gradient has to flow through.

        Parameters
        ----------
        states
            ``[rows, in_features]``.
        """
        return False

    def matmul(self, states: torch.Tensor) -> torch.Tensor:
        """``[rows, out_features]`` from the stored tensors, without the bias; called where `fast` says so."""
        raise NotImplementedError

    @property
    def activation_bits(self) -> int | None:
        """Bits in which `matmul` takes the inputs; None, the default, for the inputs as they are."""
        return None

    def path(self) -> str:
        """How a token is computed here, for `hfkv.describe`."""
        return "decoded for each call"

    # what every backend has

    @classmethod
    def skeleton(cls, linear: nn.Linear, options: Any) -> Self:
        """A layer of the same shape, device and bias whose tensors wait to be loaded."""
        weight = linear.weight
        return cls(
            linear.in_features,
            linear.out_features,
            options,
            dtype=weight.dtype,
            bias=linear.bias,
            device=weight.device,
        )

    @classmethod
    def quantized(cls, linear: nn.Linear, options: Any, weight: torch.Tensor | None = None) -> Self:
        """The layer that stands for a linear one; ``weight`` in place of the layer's own, where that is not loaded."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            options,
            dtype=linear.weight.dtype if weight is None else weight.dtype,
            bias=linear.bias,
            device="meta",
        )
        layer.store(linear.weight if weight is None else weight)
        return layer.train(linear.training)

    @classmethod
    def convert(cls, model: nn.Module, targets: Mapping[str, Any]) -> Iterator[tuple[str, Self]]:
        """The layers that stand for a model's own, each by its name; by default each is made from its own weight.

        A backend that looks at the model first (that calibrates it, say) sets ``whole_model`` and does so here. What it
        changes must leave the model's function as it is.

        Parameters
        ----------
        targets
            The options of each layer to quantize, by name; all are `nn.Linear`.
        """
        for name, options in targets.items():
            yield name, cls.quantized(model.get_submodule(name), options)  # type: ignore[arg-type]

    @torch.no_grad()
    def store(self, weight: torch.Tensor) -> None:
        """Keep a weight ``[out_features, in_features]``, encoded."""
        encoded = self.encode(weight.detach())
        layout = self.layout()
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in encoded.items()}
        if found != {name: (tuple(shape), dtype) for name, (shape, dtype) in layout.items()}:
            raise RuntimeError(f"{type(self).__name__}.encode made {found}, and its layout is {dict(layout)}")
        for name, tensor in encoded.items():
            # a view would keep what it was cut from alive
            compact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            self._buffers[name] = tensor if tensor.is_contiguous() and compact else tensor.contiguous().clone()

    def restored(self, dtype: torch.dtype) -> nn.Linear:
        """A plain layer with the decoded weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta", dtype=dtype)
        with torch.no_grad():
            linear.weight = nn.Parameter(self.decode(dtype))
            if self.bias is not None:
                linear.bias = nn.Parameter(self.bias.to(dtype))
        return linear.train(self.training)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., out_features]`` for ``[..., in_features]``."""
        flows = torch.is_grad_enabled() and states.requires_grad
        if not flows:
            rows = states.reshape(-1, self.in_features)
            if self.fast(rows):
                output = self.matmul(rows).view(*states.shape[:-1], self.out_features)
                return output if self.bias is None else output + self.bias.to(output.dtype)
        return nn.functional.linear(states, self.decode(states.dtype), self._bias_as(states.dtype))

    def _bias_as(self, dtype: torch.dtype) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.to(dtype)

    @property
    def weight(self) -> WeightHandle:
        """What stands for the weight of a linear layer: its shape, dtype and device; decoded when it is touched."""
        return WeightHandle(self)

    @property
    def device(self) -> torch.device:
        """Where the stored tensors are."""
        return next(iter(self._buffers[name] for name in self.layout())).device  # type: ignore[union-attr]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored tensors, the bias aside."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers(recurse=False))

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per number of the weight."""
        return 8 * self.stored_bytes / (self.in_features * self.out_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            # another dtype for the model is none for what is packed: scales would be rounded
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
                self.dtype = new.dtype
        return self

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        shown = ", ".join(f"{name}={value!r}" for name, value in self.options.as_dict().items())
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {shown}"


class WeightHandle(torch.Tensor):
    """The weight of a quantized layer, with the shape, dtype and device of the decoded tensor.

    Reading those costs nothing; any operation sees the decoded weight.
    """

    layer: QuantizedLinear

    @staticmethod
    def __new__(cls, layer: QuantizedLinear) -> WeightHandle:
        """A tensor without storage."""
        return torch.Tensor._make_wrapper_subclass(
            cls, (layer.out_features, layer.in_features), dtype=layer.dtype, device=layer.device
        )

    def __init__(self, layer: QuantizedLinear) -> None:
        self.layer = layer

    def dense(self) -> torch.Tensor:
        """The decoded weight."""
        return self.layer.decode(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightHandle({type(self.layer).__name__}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(WeightHandle, WeightHandle.dense, (args, kwargs or {}))
        return func(*args, **kwargs)
