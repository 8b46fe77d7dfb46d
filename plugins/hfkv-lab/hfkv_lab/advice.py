"""What the numbers of an inspection ask for, with the numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .geometry import NBITS, SINKS, best
from .inspection import CHANNEL_OUTLIER, SIGMAS, Inspection

# a difference of fewer per cent is none
MARGIN = 1.1


@dataclass(frozen=True)
class Advice:
    """One answer.

    Attributes
    ----------
    option
        The option of kivi that it is about, or what else.
    answer
        What to choose.
    because
        The numbers.
    """

    option: str
    answer: str
    because: str


def advise(found: Inspection) -> list[Advice]:
    """The geometry that the model asks for."""
    return [_axis(found, "keys"), _axis(found, "values"), _sinks(found), _rotation(found), _weights(found)]


def _axis(found: Inspection, part: str) -> Advice:
    mine = {
        trial.axis: trial
        for trial in found.geometry
        if trial.part == part and trial.sinks == SINKS and not trial.rotated
    }
    winner = min(mine.values(), key=lambda trial: trial.output)
    loser = mine["token" if winner.axis == "channel" else "channel"]
    option = "key_axis" if part == "keys" else "value_axis"
    answer = winner.axis if loser.output > MARGIN * winner.output else f"{winner.axis}, by a little"
    counts = [len(getattr(layer, part).outliers) for layer in found.layers]
    outliers = f"{statistics.mean(counts):.1f} channels a layer are above {CHANNEL_OUTLIER:g} times the median channel"
    steady = [getattr(layer, part).steadiness for layer in found.layers]
    steady = [share for share in steady if share is not None]
    if steady:
        outliers += f", in {statistics.mean(steady):.0%} of the tokens"
    return Advice(
        option,
        answer,
        f"{NBITS} bits per {winner.axis}: error of the output {winner.output:.3f}, per {loser.axis} {loser.output:.3f} "
        f"(of reconstruction {winner.reconstruction:.3f} and {loser.reconstruction:.3f}); {outliers}",
    )


def _sinks(found: Inspection) -> Advice:
    pairs = {sinks: [best(found.geometry, part, sinks).output for part in ("keys", "values")] for sinks in (0, SINKS)}
    gains = [without / kept for without, kept in zip(pairs[0], pairs[SINKS], strict=True)]
    share = statistics.mean(layer.attention.sinks for layer in found.layers)
    return Advice(
        "sink_length",
        f"{SINKS}" if max(gains) > MARGIN else "0 will do",
        f"the first {SINKS} tokens receive {share:.0%} of the attention; kept exact, they divide the error of the "
        f"output from keys by {gains[0]:.2f} and from values by {gains[1]:.2f}",
    )


def _rotation(found: Inspection) -> Advice:
    if not any(trial.rotated for trial in found.geometry):
        return Advice("rotation", "not tried", "head_dim is no power of two, and a Hadamard matrix needs one")
    said, helps = [], []
    for part in ("keys", "values"):
        plain, rotated = (best(found.geometry, part, SINKS, turned) for turned in (False, True))
        said.append(
            f"{part}: {plain.output:.3f} per {plain.axis} plain, {rotated.output:.3f} per {rotated.axis} rotated"
        )
        if plain.output > MARGIN * rotated.output:
            helps.append(part)
    return Advice("rotation", f"helps {' and '.join(helps)}" if helps else "does not help", "; ".join(said))


def _weights(found: Inspection) -> Advice:
    beyond = sum(matrix.beyond for matrix in found.matrices)
    total = sum(matrix.weights for matrix in found.matrices)
    worst = max(found.matrices, key=lambda matrix: matrix.largest)
    return Advice(
        "weights",
        "quantize in groups" if beyond else "a scale per row will do",
        f"{beyond:,} of {total:,} weights lie beyond {SIGMAS:g} standard deviations of their matrix (normal ones: "
        f"{total * 2e-9:.1g}); the farthest at {worst.largest:.0f}, in {worst.name}",
    )
