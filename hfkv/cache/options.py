"""Options of a technique: a dataclass whose fields are the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from .. import registry


def option(default: Any, help: str, *, saved: bool = True) -> Any:
    """A documented field of an options class; the CLI's and the docs' tables are made from it.

    Of weights, what only quantizing needs is not ``saved`` with the model.
    """
    return dataclasses.field(default=default, metadata={"help": help, "saved": saved})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Base of every technique's options; `__post_init__` of a subclass checks the values."""

    # other spellings that `translate` takes, each with the field that it stands for
    spellings: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Rewrite other spellings (transformers') into this class's own; nothing by default."""
        return dict(given)

    @classmethod
    def parse(cls, given: Mapping[str, Any], technique: str) -> Self:
        """Options from a user's ``cache_config``.

        Raises
        ------
        ValueError
            An unknown option (the message lists the valid ones and the closest) or a value that is not allowed.
        """
        translated = cls.translate(given)
        fields = [field.name for field in dataclasses.fields(cls)]
        registry.check_options(
            translated, fields, "cache_config option", repr(technique), also=["layers"], hints=cls.spellings
        )
        return cls(**translated)

    @classmethod
    def merge(cls, base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """A user's options, those of ``own`` in place of the same ones in ``base``, however each is spelt."""
        named = {cls.spellings.get(key, key) for key in own}
        return {**{key: value for key, value in base.items() if cls.spellings.get(key, key) not in named}, **own}


def check_choice(option: str, value: object, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless the value is one of the choices (of the same type)."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        hint = registry.closest(value, [choice for choice in choices if isinstance(choice, str)])
        raise ValueError(f"{option}={value!r} is not supported. Choose from: {listed}.{hint}")


def check_length(option: str, value: object, *, multiple: int = 1, minimum: int = 0) -> None:
    """Raise ValueError unless the value is an integer of at least ``minimum`` and a multiple of ``multiple``."""
    if type(value) is not int or value < minimum or value % multiple:
        what = "an integer" if multiple == 1 else f"a multiple of {multiple}"
        raise ValueError(f"{option}={value!r} must be {what} of at least {minimum}")
