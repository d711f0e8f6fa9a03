"""Operands as digit arrays: checks, and draws without repetition that never share a problem between splits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


MAX_DIGITS = 20
TRAIN_ROWS = 808_000  # the training set of the ICoT authors (arXiv 2405.14838)
_DRAW = 1 << 14  # rows drawn at once


class Operands(NamedTuple):
    """Digits of N pairs, least significant first: uint8 [N, n] and [N, m]."""

    a: np.ndarray
    b: np.ndarray


class Parsed(NamedTuple):
    """The problems of one size among rows of mixed sizes."""

    rows: np.ndarray  # where they stood, ascending int64 [K]
    a: np.ndarray  # uint8 [K, n]
    b: np.ndarray  # uint8 [K, m]


# Digit arrays (a, b) or pairs of integers.
Exclude = tuple[np.ndarray, np.ndarray] | Sequence[tuple[int, int]] | None


def check_digits(digits: Sequence[int]) -> tuple[int, int]:
    """`digits` as (n, m).

    Raises:
        ValueError: it is not two integers from 1 to 20.
    """
    try:
        n, m = (operator.index(d) for d in digits)
    except (TypeError, ValueError):
        raise ValueError(f"digits must be two integers (n, m), not {digits!r}") from None
    if not (1 <= n <= MAX_DIGITS and 1 <= m <= MAX_DIGITS):
        raise ValueError(f"digits must be two integers from 1 to {MAX_DIGITS}, not {n} and {m}")
    return n, m


def check_operands(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`a` and `b` as uint8 arrays [N, n] and [N, m] of digits.

    Raises:
        ValueError: shapes that do not fit, sizes outside 1 … 20, or values that are no digits.
    """
    checked = []
    for name, digits in (("a", a), ("b", b)):
        array = np.asarray(digits)
        if array.ndim != 2 or array.dtype.kind not in "ui":
            raise ValueError(
                f"{name} must be an integer array [rows, digits], not {array.dtype} of shape {array.shape}"
            )
        if array.size and not (0 <= array.min() and array.max() <= 9):
            raise ValueError(f"{name} holds {array.min()} to {array.max()}: digits are 0 to 9")
        checked.append(array.astype(np.uint8, copy=False))
    a, b = checked
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} rows and b has {len(b)}: they must be as many")
    check_digits((a.shape[1], b.shape[1]))
    return a, b


def from_integers(pairs: Sequence[tuple[int, int]], digits: tuple[int, int]) -> Operands:
    """Digit arrays of the pairs that have at most (n, m) digits; the others are left out.

    Raises:
        ValueError: an entry is not a pair of integers of at least 0.
    """
    n, m = digits
    rows = []
    for pair in pairs:
        try:
            a, b = (operator.index(value) for value in pair)
        except TypeError:
            raise ValueError(f"an operand pair must be two integers, not {pair!r}") from None
        if a < 0 or b < 0:
            raise ValueError(f"operands must be 0 or more, not {a} and {b}")
        if a < 10**n and b < 10**m:
            rows.append(f"{a:0{n}d}"[::-1] + f"{b:0{m}d}"[::-1])
    flat = np.frombuffer("".join(rows).encode(), np.uint8).reshape(-1, n + m) - ord("0")
    return Operands(flat[:, :n], flat[:, n:])


def parse_integers(data: bytes, name: str = "text") -> dict[tuple[int, int], Parsed]:
    """Operands written as ordinary integers, two a line and highest digit first, by size in ascending order.

    A number has as many digits as are written, so `0012 34` is of size (4, 2). Empty lines may end the text.

    Args:
        data: ASCII text.
        name: what errors call the text, e.g. the file's path.

    Raises:
        ValueError: a line that is not two integers of 1 to 20 digits; names the line.
    """
    lines = data.rstrip().split(b"\n") if data.strip() else []
    found: dict[tuple[int, int], tuple[list[int], list[bytes]]] = {}
    for row, line in enumerate(lines):
        numbers = line.split()
        # isdigit is true of "0" to "9" alone where it is asked of bytes.
        if len(numbers) != 2 or not (numbers[0].isdigit() and numbers[1].isdigit()):
            text = line.decode("utf-8", "replace").strip()[:60]
            raise ValueError(f"{name}, line {row + 1}: expected two integers such as '1234 5678', not {text!r}")
        size = len(numbers[0]), len(numbers[1])
        if max(size) > MAX_DIGITS:
            raise ValueError(f"{name}, line {row + 1}: a number has {max(size)} digits, more than {MAX_DIGITS}")
        rows, texts = found.setdefault(size, ([], []))
        rows.append(row)
        texts += numbers
    groups = {}
    for (n, m), (rows, texts) in sorted(found.items()):
        digits = np.frombuffer(b"".join(texts), np.uint8).reshape(-1, n + m) - ord("0")
        a, b = (np.ascontiguousarray(part[:, ::-1]) for part in (digits[:, :n], digits[:, n:]))
        groups[n, m] = Parsed(np.array(rows, np.int64), a, b)
    return groups


class _Space:
    """All pairs of n times m digits whose highest digit is not zero (0 … 9 where there is one digit)."""

    def __init__(self, digits: Sequence[int], exclude: Exclude = None):
        self.n, self.m = check_digits(digits)
        self.square = self.n == self.m
        self.lows = [10 ** (d - 1) if d > 1 else 0 for d in (self.n, self.m)]
        self.sides = [10**d - low for d, low in zip((self.n, self.m), self.lows, strict=True)]
        self.total = self.sides[0] * self.sides[1]
        self.excluded = self._closure(exclude)
        self.exists = self.total - len(self.excluded.a)

    def _closure(self, exclude: Exclude) -> Operands:
        """The excluded pairs that belong to this space, each once; with their mirrors where n = m."""
        if exclude is None:
            exclude = []
        if len(exclude) == 2 and all(isinstance(part, np.ndarray) and part.ndim == 2 for part in exclude):
            a, b = check_operands(*exclude)
            if (a.shape[1], b.shape[1]) != (self.n, self.m):
                raise ValueError(f"exclude holds {a.shape[1]}x{b.shape[1]} digits for {self.n}x{self.m}")
        else:
            a, b = from_integers(exclude, (self.n, self.m))
        inside = ((a[:, -1] > 0) | (self.n == 1)) & ((b[:, -1] > 0) | (self.m == 1))
        a, b = a[inside], b[inside]
        if self.square:
            a, b = np.concatenate([a, b]), np.concatenate([b, a])
        first = np.unique(self.keys(a, b), return_index=True)[1]
        return Operands(a[first], b[first])

    def keys(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """One uint64 for each ordered pair.

        Exact up to 19 digits together. Beyond, keys wrap around, so two pairs may share one (in a draw of a million
        with a chance of 3 in 10^8); they are then taken for the same pair, which costs that one pair and no more.
        """
        base = 10**self.m if self.n + self.m <= 19 else 0x9E3779B97F4A7C15
        with np.errstate(over="ignore"):
            return _values(a) * np.uint64(base) + _values(b)

    def unit_keys(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """As `keys`, the same for (a, b) and (b, a) where n = m."""
        return np.minimum(self.keys(a, b), self.keys(b, a)) if self.square else self.keys(a, b)

    def indices(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The place of each pair among all pairs, int64; only for spaces small enough to be listed."""
        a, b = (_values(d).astype(np.int64) - low for d, low in zip((a, b), self.lows, strict=True))
        return a * self.sides[1] + b

    def mirrored(self, index: np.ndarray) -> np.ndarray:
        """The places of the pairs (b, a), where n = m."""
        a, b = np.divmod(index, self.sides[1])
        return b * self.sides[1] + a

    def at(self, index: np.ndarray) -> Operands:
        """The pairs that stand at these places."""
        parts = []
        for value, low, width in zip(np.divmod(index, self.sides[1]), self.lows, (self.n, self.m), strict=True):
            value = value + low
            digits = np.empty((width, len(index)), np.uint8)
            for place in range(width):
                value, digits[place] = np.divmod(value, 10)
            parts.append(np.ascontiguousarray(digits.T))
        return Operands(*parts)

    def free(self, banned: Operands) -> np.ndarray:
        """Indices of all pairs but the `banned` ones and, where n = m, their mirrors; ascending."""
        left = np.ones(self.total, bool)
        index = self.indices(*banned)
        left[index] = False
        if self.square:
            left[self.mirrored(index)] = False
        return np.flatnonzero(left)

    def listable(self, rows: int) -> bool:
        """Whether to list the whole space and shuffle it: always if small, else if a good part of it is asked for."""
        return self.total <= max(1 << 20, 4 * rows)

    def rejection(self, count: int, banned: Operands, units: bool, rng: np.random.Generator) -> Operands:
        """`count` different pairs, none of them in or mirrored in `banned`; with `units` no mirrors of each other."""
        n, blocks, accepted = self.n, [], np.empty(0, np.int64)
        forbidden = np.sort(self.unit_keys(*banned))
        while True:
            # Blocks of fixed size make a smaller draw the beginning of a larger one.
            for _ in range(max(1, -(-(count - len(accepted)) // _DRAW))):
                block = rng.integers(0, 10, (_DRAW, n + self.m), np.uint8)
                for width, top in ((n, n - 1), (self.m, -1)):
                    if width > 1:
                        block[:, top] = rng.integers(1, 10, _DRAW, np.uint8)
                blocks.append(block)
            rows = np.concatenate(blocks)
            a, b = rows[:, :n], rows[:, n:]
            keys = self.unit_keys(a, b)
            allowed = np.flatnonzero(~_contains(forbidden, keys))
            keys = keys if units else self.keys(a, b)
            accepted = allowed[np.sort(np.unique(keys[allowed], return_index=True)[1])]
            if len(accepted) >= count:
                break
        rows = rows[accepted[:count]]
        return Operands(np.ascontiguousarray(rows[:, :n]), np.ascontiguousarray(rows[:, n:]))


def _values(digits: np.ndarray) -> np.ndarray:
    """The numbers modulo 2^64: uint64 [N]."""
    values = np.zeros(len(digits), np.uint64)
    for place in range(digits.shape[1] - 1, -1, -1):
        values = values * np.uint64(10) + digits[:, place]
    return values


def _contains(ascending: np.ndarray, keys: np.ndarray) -> np.ndarray:
    if not len(ascending):
        return np.zeros(len(keys), bool)
    return ascending[np.searchsorted(ascending, keys).clip(max=len(ascending) - 1)] == keys


def count_operands(digits: Sequence[int], exclude: Exclude = None) -> int:
    """How many ordered pairs of n times m digits can be drawn, `exclude` (and, where n = m, its mirrors) left out."""
    return _Space(digits, exclude).exists


def check_sizes(digits: Sequence[int], sizes: dict[str, int | None], seed: int = 0, exclude: Exclude = None) -> _Space:
    """Refuse at once what `split_operands` could not draw.

    Raises:
        ValueError: digits, sizes or seed out of range, or more pairs asked for than exist.
    """
    space = _Space(digits, exclude)
    if seed < 0:
        raise ValueError(f"the seed must be 0 or more, not {seed}")
    for name, size in sizes.items():
        if (size is None and name != "train") or (size is not None and size < 0):
            raise ValueError(f"the size of split {name!r} must be 0 or more, not {size}")
    asked = sum(1 if size is None else size for size in sizes.values())
    if asked > space.exists:
        left_out = f" ({len(space.excluded.a)} excluded)" if len(space.excluded.a) else ""
        raise ValueError(
            f"{space.n}x{space.m} digits: {asked:,} operand pairs asked for, only {space.exists:,} exist{left_out}"
        )
    return space


def split_operands(
    digits: Sequence[int],
    sizes: dict[str, int | None] | None = None,
    seed: int = 0,
    exclude: Exclude = None,
) -> dict[str, Operands]:
    """Draw the operands of all splits, no ordered pair twice.

    Where n = m, (b, a) is the same problem as (a, b): the mirror of a pair in `exclude` is never drawn, and that of a
    pair held out (in any split but `train`) stands in no other split. The held-out splits are drawn first, so they
    depend on the train size only where so much is asked for that mirrors must share a held-out split.

    Args:
        digits: (n, m), each from 1 to 20. The highest digit is never zero, except in one-digit numbers.
        sizes: rows of each split, by default 808,000 `train`, 1,000 `validation` and 1,000 `test` as in the data of
            the ICoT authors. `train` may be None: all that remain, at most 808,000.
        seed: the same seed gives the same pairs on every machine (PCG64).
        exclude: pairs never to be drawn, e.g. the validation set of others: digit arrays (a, b), or pairs of integers,
            of which those of another size are passed over.

    Returns:
        For each split, in the order of `sizes`, `Operands(a, b)`: uint8 [rows, n] and [rows, m].

    Raises:
        ValueError: digits, sizes or seed out of range, or more pairs asked for than exist.
    """
    sizes = {"train": TRAIN_ROWS, "validation": 1000, "test": 1000} if sizes is None else sizes
    space = check_sizes(digits, sizes, seed, exclude)
    held_rng, train_rng = (np.random.Generator(np.random.PCG64([seed, space.n, space.m, i])) for i in range(2))
    held = {name: size for name, size in sizes.items() if name != "train"}
    rows, train = sum(held.values()), sizes.get("train", 0)
    slack = space.exists - rows - (1 if train is None else train)  # pairs that may stand in no split
    if space.listable(2 * rows + len(space.excluded.a)) or (space.square and slack < rows):
        drawn = _list_and_hold_out(space, list(held.values()), slack, held_rng)
    else:
        pairs = space.rejection(rows, space.excluded, True, held_rng)
        ends = np.cumsum([0, *held.values()])
        drawn = [Operands(*(d[i:j] for d in pairs)) for i, j in zip(ends[:-1], ends[1:], strict=True)]
    splits = dict(zip(held, drawn, strict=True))
    if "train" in sizes:
        banned = Operands(*(np.concatenate(parts) for parts in zip(space.excluded, *drawn, strict=True)))
        if space.listable((TRAIN_ROWS if train is None else train) + 2 * len(banned.a)):
            index = space.free(banned)
            count = min(TRAIN_ROWS, len(index)) if train is None else train
            splits["train"] = space.at(train_rng.permutation(index)[:count])
        else:
            splits["train"] = space.rejection(TRAIN_ROWS if train is None else train, banned, False, train_rng)
    return {name: splits[name] for name in sizes}


def _list_and_hold_out(space: _Space, counts: list[int], slack: int, rng: np.random.Generator) -> list[Operands]:
    """Held-out splits of the given sizes out of the listed space, leaving all but `slack` of the rest for `train`.

    Where n = m, a pair held out alone makes its mirror useless to every other split. As long as `slack` allows, pairs
    are drawn alone; then pairs go together with their mirrors.
    """
    index = space.free(space.excluded)
    if space.square:
        a, b = np.divmod(index, space.sides[1])
        index = index[a <= b]
    index = rng.permutation(index)
    ends = np.cumsum([0, *counts])

    def flipped(pairs: np.ndarray) -> np.ndarray:
        return np.where(rng.integers(0, 2, len(pairs), np.uint8) == 1, space.mirrored(pairs), pairs)

    if not space.square:
        return [space.at(index[i:j]) for i, j in zip(ends[:-1], ends[1:], strict=True)]
    if slack >= ends[-1]:
        index = flipped(index[: ends[-1]])
        return [space.at(index[i:j]) for i, j in zip(ends[:-1], ends[1:], strict=True)]
    squares = index[space.mirrored(index) == index]
    pairs = index[space.mirrored(index) != index]
    splits = []
    for count in counts:
        alone = min(count, slack, len(pairs))
        alone -= (count - alone) % 2 if alone else 0
        both = min((count - alone) // 2, len(pairs) - alone)
        rest = count - alone - 2 * both
        if rest > len(squares):
            raise ValueError(
                f"{space.n}x{space.m} digits: {space.exists:,} operand pairs exist, but they cannot fill all splits "
                "without parting a pair (a, b) from (b, a): ask for a few less, or for an even number to hold out"
            )
        whole = pairs[alone : alone + both]
        parts = [flipped(pairs[:alone]), whole, space.mirrored(whole), squares[:rest]]
        splits.append(space.at(rng.permutation(np.concatenate(parts))))
        pairs, squares, slack = pairs[alone + both :], squares[rest:], slack - alone
    return splits


def sample_operands(digits: Sequence[int], count: int, seed: int = 0, exclude: Exclude = None) -> Operands:
    """`count` different pairs of n times m digits, as a `train` split of `split_operands` with nothing held out.

    Raises:
        ValueError: as `split_operands`.
    """
    return split_operands(digits, {"train": count}, seed, exclude)["train"]
