"""What a technique requires, checked against installed metadata before anything is imported."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from .specs import Spec


def invalid(spec: Spec) -> str | None:
    """What is wrong with the way in which a spec writes its requirements."""
    if isinstance(spec.requires, str):
        return f"requires={spec.requires!r} must be a tuple of strings"
    for text in spec.requires:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            return f"requires {text!r}, which is not a valid requirement: {error}"
    return None


def unmet(spec: Spec) -> list[str]:
    """The requirements of a spec that the installed distributions do not meet, each with what is there instead."""
    problems = []
    for text in spec.requires:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{text} (not installed)")
            continue
        if not _satisfies(version, requirement):
            problems.append(f"{text} (found {version})")
    return problems


def _satisfies(version: str | None, requirement: Requirement) -> bool:
    # a version that cannot be read (a damaged or a very old distribution) only satisfies a bare name
    if not requirement.specifier:
        return True
    try:
        return version is not None and requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False
