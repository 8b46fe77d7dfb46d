"""Options of a weight-quantization backend: a dataclass whose fields are the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from .. import registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Base of every backend's options; `__post_init__` of a subclass checks the values; JSON knows the saved ones."""

    @classmethod
    def parse(cls, given: Mapping[str, Any], backend: str, named_in: str = "WeightConfig") -> Self:
        """Options from what a user wrote.

        Parameters
        ----------
        named_in
            Where the user wrote it, for the message.

        Raises
        ------
        ValueError
            An unknown option (the message lists the valid ones and the closest) or a value that is not allowed.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        registry.check_options(given, fields, f"{named_in} option", repr(backend), also=["skip", "layers"])
        return cls(**given)

    @classmethod
    def transient(cls) -> list[str]:
        """The options that are not saved, whose fields say ``saved=False``: a calibration text, say."""
        return [field.name for field in dataclasses.fields(cls) if not field.metadata.get("saved", True)]

    def given(self) -> dict[str, Any]:
        """All options, as they were given."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def as_dict(self) -> dict[str, Any]:
        """The options as they are saved."""
        return {name: value for name, value in self.given().items() if name not in self.transient()}
