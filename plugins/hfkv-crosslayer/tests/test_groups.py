"""Which layers may share."""

from __future__ import annotations

import pytest

from hfkv_crosslayer.groups import checked, donors, neighbours

FULL, SLIDING = ("full",), ("sliding", 8)
PLAIN = dict.fromkeys(range(6), FULL)
HYBRID = {index: SLIDING if index % 3 else FULL for index in range(7)}


def test_neighbours_of_one_kind():
    assert neighbours(PLAIN, 1) == [[0], [1], [2], [3], [4], [5]]
    assert neighbours(PLAIN, 2) == [[0, 1], [2, 3], [4, 5]]
    assert neighbours(PLAIN, 4) == [[0, 1, 2, 3], [4, 5]]


def test_layers_of_different_kinds_never_meet():
    assert neighbours(HYBRID, 2) == [[0, 3], [1, 2], [4, 5], [6]]


def test_layers_that_no_group_names_stay_alone():
    assert checked([[1, 2], [3, 4, 5]], PLAIN) == [[0], [1, 2], [3, 4, 5]]
    assert donors([[0], [1, 2], [3, 4, 5]]) == {2: 1, 4: 3, 5: 3}


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("0,1", "must be lists of layers"),
        ([0, 1], "must be lists of layers"),
        ([[]], "must be lists of layers"),
        ([[0, True]], "must be lists of layers"),
        ([[0, 6]], r"layer 6 cannot share. Layers that can: \[0, 1, 2, 3, 4, 5\]"),
        ([[0, 1], [1, 2]], "layer 1 is named twice"),
        ([[2, 1]], r"a layer reads what an earlier one has computed, so write \[1, 2\]"),
    ],
)
def test_groups_that_cannot_be(groups, says):
    with pytest.raises(ValueError, match=says):
        checked(groups, PLAIN)


def test_a_group_of_two_kinds_says_which():
    with pytest.raises(ValueError, match=r"0 \(full\), 1 \(sliding 8\)"):
        checked([[0, 1]], HYBRID)
