# mypy: disable-error-code="empty-body"
"""Every hook of hfkv, on one page. A plugin implements those that it needs and yields records.

A plugin module is found through the entry point group ``hfkv`` and imports nothing heavy::

    # pyproject.toml
    [project.entry-points.hfkv]
    ema = "hfkv_ema.plugin"

    # hfkv_ema/plugin.py
    import hfkv

    @hfkv.hookimpl
    def hfkv_caches():
        yield hfkv.CacheSpec(name="ema", summary="keys smoothed in time", load="hfkv_ema.layer:EmaLayer")
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from .specs import (
    AssistantSpec,
    CacheSpec,
    KernelSpec,
    KVQuantizerSpec,
    StructureSpec,
    SubcommandSpec,
    TrainerSpec,
    WeightQuantizerSpec,
)

hookspec = pluggy.HookspecMarker("hfkv")
hookimpl = pluggy.HookimplMarker("hfkv")
"""Mark a function, or a method of an object that is registered, as the implementation of the hook of its name."""


@hookspec(historic=True)
def hfkv_caches() -> Iterable[CacheSpec]:
    """Names for ``model.generate(cache_implementation=...)``.

    Example::

        yield CacheSpec(name="kivi", summary="...", load="hfkv_kivi.layer:KiviLayer")
    """


@hookspec(historic=True)
def hfkv_kv_quantizers() -> Iterable[KVQuantizerSpec]:
    """Names for the option ``backend`` of quantized caches.

    Example::

        yield KVQuantizerSpec(name="hqq", summary="...", load="hfkv_hqq.kv:HqqKVQuantizer", requires=("hqq>=0.2",))
    """


@hookspec(historic=True)
def hfkv_weight_quantizers() -> Iterable[WeightQuantizerSpec]:
    """Names for ``hfkv.WeightConfig``.

    Example::

        yield WeightQuantizerSpec(name="rtn", summary="...", load="hfkv_rtn.weights:RtnQuantizer")
    """


@hookspec(historic=True)
def hfkv_kernels() -> Iterable[KernelSpec]:
    """Fast kernels for the op table: pack, unpack, attend.

    Example::

        yield KernelSpec(name="cpu", summary="C++, SIMD, threads", load="hfkv_cpu.kernels:kernels")
    """


@hookspec(historic=True)
def hfkv_assistants() -> Iterable[AssistantSpec]:
    """Names for ``hfkv.assistant(name, model)``.

    Example::

        yield AssistantSpec(name="self-kv", summary="...", load="hfkv_speculative.self_kv:SelfKVDrafter")
    """


@hookspec(historic=True)
def hfkv_trainers() -> Iterable[TrainerSpec]:
    """Trainers that heal what compression breaks.

    Example::

        yield TrainerSpec(name="distill", summary="...", load="hfkv_distill.trainer:DistillationTrainer")
    """


@hookspec(historic=True)
def hfkv_structures() -> Iterable[StructureSpec]:
    """Changes of a model's modules that are saved with its config and made again by `from_pretrained`.

    Example::

        yield StructureSpec(
            name="crosslayer",
            summary="...",
            load="hfkv_crosslayer.sharing:restore",
            change="hfkv_crosslayer.sharing:share",
        )
    """


@hookspec(historic=True)
def hfkv_subcommands() -> Iterable[SubcommandSpec]:
    """Subcommands of the command ``hfkv``.

    Example::

        yield SubcommandSpec(name="eval", summary="...", load="hfkv_lab.eval:main")
    """
