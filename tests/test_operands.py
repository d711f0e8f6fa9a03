"""How operands are drawn: no pair twice, no problem in two splits, the same on every machine."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_icot.tasks.multiplication import format_lines
from hf_icot.tasks.operands import count_operands, parse_integers, sample_operands, split_operands


# SHA-256, shortened, of small draws with seed 0.
DIGESTS = {(4, 4): "6710786be3f97bcd", (3, 2): "968f1f75c106fb13", (12, 12): "d6726e9d1195d3ed"}


def numbers(digits):
    """The digit arrays' numbers as Python integers."""
    return [int("".join(map(str, row[::-1]))) for row in digits.tolist()]


def pairs(operands):
    return list(zip(numbers(operands.a), numbers(operands.b), strict=True))


SPLITS = [
    ((4, 4), {"train": 20_000, "validation": 1000, "test": 1000}),
    ((3, 2), {"train": 79_000, "validation": 1000, "test": 1000}),  # all that exist
    ((2, 2), {"train": None, "validation": 1000, "test": 1000}),
    ((2, 2), {"train": 6100, "validation": 1000, "test": 1000}),  # all that exist, mirrors together
    ((2, 2), {"train": 5500, "validation": 1001, "test": 1001}),
    ((1, 1), {"train": 1, "validation": 33, "test": 33, "hard": 33}),
    ((1, 3), {"test": 200, "train": 3000}),
    ((7, 7), {"train": 3000, "validation": 100, "test": 100}),
    ((20, 20), {"train": 3000, "validation": 100, "test": 100}),
]


@pytest.mark.parametrize(("digits", "sizes"), SPLITS)
def test_no_pair_stands_in_two_splits(digits, sizes):
    n, m = digits
    splits = split_operands(digits, sizes, seed=3)
    assert list(splits) == list(sizes)
    found = {}
    for name, (a, b) in splits.items():
        assert a.dtype == b.dtype == np.uint8 and a.shape[1:] + b.shape[1:] == digits
        assert sizes[name] in (None, len(a))
        assert (n == 1 or a[:, -1].all()) and (m == 1 or b[:, -1].all()) and max(a.max(), b.max()) <= 9
        found[name] = set(pairs(splits[name]))
        assert len(found[name]) == len(a)
    for one, other in itertools.combinations(found.values(), 2):
        mirrored = {(b, a) for a, b in other} if n == m else set()
        assert not one & (other | mirrored)
    if digits == (3, 2):
        assert sum(map(len, found.values())) == 81_000 == count_operands(digits)
    if sizes.get("train", 0) is None:  # what is left out are mirrors of held-out pairs
        held = found["validation"] | found["test"]
        assert len(found["train"]) == 8100 - len(held | {(b, a) for a, b in held})


def test_draws_look_uniform():
    """Every digit at every place, and every order of a pair, about as often as it should."""
    a, b = sample_operands((4, 4), 40_000, seed=1)
    for digits in (a, b):
        counts = np.stack([np.bincount(digits[:, place], minlength=10) for place in range(4)])
        assert np.abs(counts[:3] - 4000).max() < 350 and counts[3, 0] == 0
        assert np.abs(counts[3, 1:] - 40_000 / 9).max() < 350
    held = split_operands((2, 2), {"train": 1, "validation": 3000})["validation"]
    greater = sum(x > y for x, y in pairs(held))
    assert 1300 < greater < 1670


@pytest.mark.parametrize("digits", [(4, 4), (3, 3), (20, 20)])
def test_the_seed_decides(digits):
    sizes = {"train": 2000, "validation": 50, "test": 50}
    first, again, other = (split_operands(digits, sizes, seed) for seed in (5, 5, 6))
    for name in sizes:
        assert pairs(first[name]) == pairs(again[name])
        assert pairs(first[name]) != pairs(other[name])
    fewer = split_operands(digits, {**sizes, "train": 700}, 5)
    assert pairs(fewer["validation"]) == pairs(first["validation"])
    assert pairs(fewer["train"]) == pairs(first["train"])[:700]


def test_draws_stay_as_they_are():
    """The digests of what seed 0 gives: a change would change published data sets."""
    digests = {}
    for digits in ((4, 4), (3, 2), (12, 12)):
        splits = split_operands(digits, {"train": 500, "validation": 20, "test": 20})
        text = b"".join(format_lines(*splits[name]) for name in splits)
        digests[digits] = hashlib.sha256(text).hexdigest()[:16]
    assert digests == DIGESTS


@pytest.mark.parametrize("digits", [(2, 2), (4, 4), (2, 3)])
def test_excluded_pairs_are_never_drawn(digits):
    held = split_operands(digits, {"validation": 1000}, seed=9)["validation"]
    banned = set(pairs(held))
    as_integers = [*banned, (1, 1), (10**19, 5)]  # pairs of other sizes are passed over
    for exclude in (held, as_integers):
        drawn = set(pairs(sample_operands(digits, 5000 if digits != (2, 2) else 6000, exclude=exclude)))
        assert not drawn & banned
        if digits[0] == digits[1]:
            assert not drawn & {(b, a) for a, b in banned}
    left = count_operands(digits, held)
    closure = banned | ({(b, a) for a, b in banned} if digits[0] == digits[1] else set())
    assert left == 9**2 * 10 ** (sum(digits) - 2) - len(closure)
    if digits == (2, 2):
        assert len(sample_operands(digits, left, exclude=held).a) == left
        with pytest.raises(ValueError, match=rf"2x2 digits: {left + 1:,} .* only {left:,} exist \({len(closure)} exc"):
            sample_operands(digits, left + 1, exclude=held)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_operands((3, 2), {"train": 79_001, "test": 2000}), "3x2 digits: 81,001 .* only 81,000 exist"),
        (lambda: split_operands((1, 1), {"train": 99, "test": 2}), "1x1 digits: 101 .* only 100 exist"),
        (lambda: split_operands((0, 2)), "from 1 to 20, not 0 and 2"),
        (lambda: split_operands((4, 21)), "from 1 to 20, not 4 and 21"),
        (lambda: split_operands((4, 4, 4)), r"two integers \(n, m\), not \(4, 4, 4\)"),
        (lambda: split_operands((4.5, 4)), "two integers"),
        (lambda: split_operands(4), "two integers"),
        (lambda: split_operands("44"), r"two integers \(n, m\), not '44'"),
        (lambda: split_operands((4, 4), {"train": -1}), "'train' must be 0 or more, not -1"),
        (lambda: split_operands((4, 4), {"test": None}), "'test' must be 0 or more, not None"),
        (lambda: split_operands((4, 4), {"train": 5}, seed=-1), "seed must be 0 or more, not -1"),
        (lambda: sample_operands((2, 2), 5, exclude=[(1, "2")]), "two integers, not"),
        (lambda: sample_operands((2, 2), 5, exclude=[(-1, 2)]), "0 or more, not -1 and 2"),
        (lambda: sample_operands((3, 2), 5, exclude=sample_operands((2, 3), 5)), "exclude holds 2x3 digits for 3x2"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_odd_split_of_mirrored_pairs_needs_a_square():
    """The ten squares of 1x1 excluded, 90 pairs are left; odd held-out sizes would part a pair and leave 89."""
    squares = [(i, i) for i in range(10)]
    whole = split_operands((1, 1), {"train": 80, "validation": 10}, exclude=squares)
    assert {(b, a) for a, b in pairs(whole["validation"])} == set(pairs(whole["validation"]))
    with pytest.raises(ValueError, match="an even number to hold out"):
        split_operands((1, 1), {"train": 79, "validation": 11}, exclude=squares)
    assert len(split_operands((1, 1), {"train": 78, "validation": 11}, exclude=squares)["validation"].a) == 11


@given(
    st.sampled_from([(1, 1), (1, 1), (1, 2), (2, 1), (2, 2)]),
    st.integers(0, 110),
    st.integers(0, 110),
    st.one_of(st.none(), st.integers(0, 110)),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=30),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_small_spaces_are_used_to_the_last_pair(digits, validation, test, train, exclude, fill):
    """Whatever can be drawn is, and else it is said why not."""
    exists = count_operands(digits, exclude)
    if fill and train is not None:
        train = max(0, exists - validation - test)
    sizes = {"validation": validation, "test": test, "train": train}
    asked = validation + test + (1 if train is None else train)
    try:
        splits = split_operands(digits, sizes, 1, exclude)
    except ValueError as error:
        odd = sum(size % 2 for size in (validation, test))
        squares = sum((i, i) not in exclude for i in range(*((0, 10) if digits == (1, 1) else (10, 100))))
        assert "even number" in str(error) and odd > squares or f"only {exists:,} exist" in str(error)
        assert "even number" in str(error) or asked > exists
        return
    assert asked <= exists
    banned = set(exclude)
    for name in ("validation", "test", "train"):
        found = set(pairs(splits[name]))
        assert len(found) == len(splits[name].a) == (len(found) if sizes[name] is None else sizes[name])
        assert not found & (banned | ({(b, a) for a, b in banned} if digits[0] == digits[1] else set()))
        banned |= found


def test_integers_are_read_by_size():
    groups = parse_integers(b"0012 34\n7\t8\r\n  5600   10  \n\n \n")
    assert list(groups) == [(1, 1), (4, 2)] and groups[1, 1].rows.tolist() == [1]
    assert groups[4, 2].rows.tolist() == [0, 2]
    assert groups[4, 2].a.tolist() == [[2, 1, 0, 0], [0, 0, 6, 5]] and groups[4, 2].b.tolist() == [[4, 3], [0, 1]]
    assert parse_integers(b"") == parse_integers(b" \n") == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("12", "'12'"),
        ("1 2 3", "'1 2 3'"),
        ("-1 2", "'-1 2'"),
        ("1.5 2", "'1.5 2'"),
        ("", "''"),
        ("١ ٢", "'١ ٢'"),
        ("1" * 21 + " 2", "has 21 digits, more than 20"),
    ],
)
def test_lines_that_are_not_two_integers(line, message):
    with pytest.raises(ValueError, match=f"operands.txt, line 2: .*{message}"):
        parse_integers(f"1 2\n{line}\n3 4\n".encode(), "operands.txt")
