"""Multi-digit multiplication with its partial products as chain of thought, worked out in columns of digits.

The format is that of "From Explicit CoT to Implicit CoT" (arXiv 2405.14838) as "Why Can't Transformers Learn
Multiplication?" (arXiv 2510.00184, section 2) uses it. Numbers are arrays of digits `uint8 [N, n]`, least significant
first, so no size overflows. A problem of n times m digits is

* question `a_0 … a_{n-1} * b_0 … b_{m-1}`,
* cot `p_0 + p_1 ( s_1 ) + p_2 ( s_2 ) + … + p_{m-1}` with p_j = a·b_j·10^j and s_j = p_0 + … + p_j, both of n+1+j
  digits; s_j is written for 0 < j < m-1 only, as s_0 is p_0 and the last sum is the answer,
* answer `a·b` with n+m digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ..tokenization_icot import TOKEN_IDS
from . import TokenizedProblems
from .operands import MAX_DIGITS, Exclude, Operands, Parsed, check_digits, check_operands, split_operands
from .text import ANSWER, COLUMNS, THINK, parse_text


# All tokens of a problem are one byte of text, but for three that no column holds.
_CHARACTERS = {token: ord(token) if len(token) == 1 else 0 for token in TOKEN_IDS}
_BLOCK_BYTES = 1 << 20  # a block of columns stays in the cache while it is worked out and transposed


class RunningSums(NamedTuple):
    """The auxiliary target of arXiv 2510.00184 (section 3): int32 arrays [N, n+m], k from the lowest place up."""

    s: np.ndarray  # s_k = sum over i+j=k of a_i·b_j
    c_hat: np.ndarray  # ĉ_k = s_k + r_{k-1}, with r_{-1} = 0
    c: np.ndarray  # c_k = ĉ_k mod 10, the digit of the product
    r: np.ndarray  # r_k = floor(ĉ_k / 10), what is carried


class _Layout(NamedTuple):
    """Where everything stands among the tokens of a row of one size; starts are token positions."""

    tokens: tuple[str, ...]  # "0" at each place of a digit
    products: tuple[int, ...]  # start of p_j
    sums: tuple[int, ...]  # start of s_j: of p_0 for j = 0, of the answer for j = m-1
    question: slice
    cot: slice
    answer: slice


@cache
def _layout(n: int, m: int) -> _Layout:
    tokens = [*"0" * n, "*", *"0" * m, THINK]
    products, sums = [], []
    for j in range(m):
        if j:
            tokens.append("+")
        products.append(len(tokens))
        tokens += "0" * (n + 1 + j)
        if 0 < j < m - 1:
            sums.append(len(tokens) + 1)
            tokens += ["(", *"0" * (n + 1 + j), ")"]
        elif j == 0:
            sums.append(products[0])
    cot = slice(n + m + 2, len(tokens))
    tokens.append(ANSWER)
    answer = slice(len(tokens), len(tokens) + n + m)
    if m > 1:
        sums.append(answer.start)
    tokens += [*"0" * (n + m), "<eos>"]
    return _Layout(tuple(tokens), tuple(products), tuple(sums), slice(0, n + m + 1), cot, answer)


def thinking_length(n: int, m: int) -> int:
    """Tokens of the cot of n times m digits: all p_j, `+` between them, and `( s_j )` for 0 < j < m-1."""
    check_digits((n, m))
    products = m * (n + 1) + m * (m - 1) // 2 + (m - 1)
    return products + sum(n + 3 + j for j in range(1, m - 1))


def sequence_length(n: int, m: int) -> int:
    """Tokens of `question %%% cot #### answer <eos>` for n times m digits."""
    return (n + m + 1) + 1 + thinking_length(n, m) + 1 + (n + m) + 1


def _multiply_columns(a: np.ndarray, b: np.ndarray, layout: _Layout, work: np.ndarray) -> None:
    """Write the digits of operands `a [n, R]`, `b [m, R]` and of all that follows from them to `work [L, R]` (uint8).

    One row of `work` is one token position for R problems: schoolbook multiplication, each step one operation on R
    contiguous bytes. A digit times a digit and a carry is at most 89, so bytes suffice. Other rows keep their zeros,
    which the low places of p_j rely on.
    """
    n, m = len(a), len(b)
    digit, carry, tens = (np.empty(a.shape[1], np.uint8) for _ in range(3))
    overflow = carry.view(np.bool_)
    work[:n], work[n + 1 : n + 1 + m] = a, b
    total = work[layout.products[0] :]  # the last sum, the addend of the next one
    for j in range(m):
        product = work[layout.products[j] :]
        for i in range(n):
            np.multiply(a[i], b[j], out=digit)
            if i:
                np.add(digit, carry, out=digit)
            np.floor_divide(digit, 10, out=carry)
            np.multiply(carry, 10, out=tens)
            np.subtract(digit, tens, out=product[j + i])
        product[j + n] = carry
        if j == 0:
            continue
        new = work[layout.sums[j] :]
        new[:j] = total[:j]
        for k in range(j, j + n):
            np.add(total[k], product[k], out=digit)
            if k > j:
                np.add(digit, carry, out=digit)
            np.greater_equal(digit, 10, out=overflow)
            np.multiply(carry, 10, out=tens)
            np.subtract(digit, tens, out=new[k])
        np.add(product[j + n], carry, out=new[j + n])
        total = new
    if m == 1:
        work[layout.answer] = work[layout.cot]


def _blocks(a: np.ndarray, b: np.ndarray, symbols: dict[str, int]) -> Iterator[tuple[slice, np.ndarray]]:
    """For block after block of rows: the slice of rows and `[L, R]` symbols, reused by the next block.

    `symbols` says which number stands for each token; that of "0" is added to the digits.
    """
    n, m = a.shape[1], b.shape[1]
    layout = _layout(n, m)
    template = np.array([symbols[token] for token in layout.tokens], np.uint8)[:, None]
    size = max(1024, _BLOCK_BYTES // len(template))
    buffers = np.zeros((2, len(template), min(size, len(a))), np.uint8)
    for start in range(0, len(a), size):
        rows = slice(start, min(start + size, len(a)))
        work, block = buffers[:, :, : rows.stop - start]
        _multiply_columns(np.ascontiguousarray(a[rows].T), np.ascontiguousarray(b[rows].T), layout, work)
        np.add(work, template, out=block)
        yield rows, block


def encode(a: np.ndarray, b: np.ndarray) -> TokenizedProblems:
    """Tokens of N problems of one size, equal to the tokenizer's output for `columns(a, b)` but without any text.

    Args:
        a, b: digits, uint8 [N, n] and [N, m], least significant first.

    Returns:
        `TokenizedProblems` with tokens uint8 [N, sequence_length(n, m)].

    Raises:
        ValueError: shapes that do not fit, more than 20 digits, or values that are no digits.
    """
    a, b = check_operands(a, b)
    n, m = a.shape[1], b.shape[1]
    tokens = np.empty((len(a), sequence_length(n, m)), np.uint8)
    for rows, block in _blocks(a, b, TOKEN_IDS):
        tokens[rows] = block.T
    lengths = (n + m + 1, thinking_length(n, m), n + m)
    return TokenizedProblems(
        torch.from_numpy(tokens),
        *(torch.full((len(a),), length, dtype=torch.int32) for length in lengths),
        pad_token_id=TOKEN_IDS["<pad>"],
    )


def running_sums(a: np.ndarray, b: np.ndarray) -> RunningSums:
    """s_k, ĉ_k, c_k and r_k for k = 0 … n+m-1 of operands uint8 [N, n] and [N, m]: int32 arrays [N, n+m].

    Raises:
        ValueError: as `encode`.
    """
    a, b = check_operands(a, b)
    n, m = a.shape[1], b.shape[1]
    at, bt = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    s, c_hat, c, r = np.zeros((4, n + m, len(a)), np.int32)
    for i in range(n):
        for j in range(m):
            s[i + j] += np.multiply(at[i], bt[j], dtype=np.uint8)
    for k in range(n + m):
        c_hat[k] = s[k] + r[k - 1] if k else s[k]
        np.divmod(c_hat[k], 10, out=(r[k], c[k]))
    return RunningSums(*(np.ascontiguousarray(values.T) for values in (s, c_hat, c, r)))


def columns(a: np.ndarray, b: np.ndarray) -> pa.Table:
    """The rows as text: a table of strings `question`, `cot`, `answer`, made without a Python object for any row.

    Raises:
        ValueError: as `encode`.
    """
    a, b = check_operands(a, b)
    layout = _layout(a.shape[1], b.shape[1])
    parts = (layout.question, layout.cot, layout.answer)
    chunk = (1 << 30) // (2 * len(layout.tokens))  # offsets into a string array are 32-bit
    tables = []
    for start in range(0, max(1, len(a)), chunk):
        size = len(a[start : start + chunk])
        texts = [np.full((size, 2 * (part.stop - part.start) - 1), ord(" "), np.uint8) for part in parts]
        for rows, block in _blocks(a[start : start + chunk], b[start : start + chunk], _CHARACTERS):
            for text, part in zip(texts, parts, strict=True):
                text[rows, ::2] = block[part].T
        arrays = []
        for text in texts:
            offsets = np.arange(size + 1, dtype=np.int32) * np.int32(text.shape[1])
            arrays.append(pa.StringArray.from_buffers(size, pa.py_buffer(offsets), pa.py_buffer(text)))
        tables.append(pa.table(arrays, names=list(COLUMNS)))
    return pa.concat_tables(tables)


def format_lines(a: np.ndarray, b: np.ndarray) -> bytes:
    """All rows in the text format, `question||cot #### answer` and a newline each.

    Raises:
        ValueError: as `encode`.
    """
    a, b = check_operands(a, b)
    layout = _layout(a.shape[1], b.shape[1])
    parts = (layout.question, layout.cot, layout.answer)
    texts = [" ".join(layout.tokens[part]) for part in parts]
    line = f"{texts[0]}||{texts[1]} {ANSWER} {texts[2]}\n"
    starts = (0, len(texts[0]) + 2, len(line) - 1 - len(texts[2]))
    lines = np.empty((len(a), len(line)), np.uint8)
    lines[:] = np.frombuffer(line.encode(), np.uint8)
    for rows, block in _blocks(a, b, _CHARACTERS):
        for part, text, start in zip(parts, texts, starts, strict=True):
            lines[rows, start : start + len(text) : 2] = block[part].T
    return lines.tobytes()


def parse(
    questions: Sequence[str] | pa.Array | pa.ChunkedArray,
    cots: Sequence[str] | pa.Array | pa.ChunkedArray | None = None,
    answers: Sequence[str] | pa.Array | pa.ChunkedArray | None = None,
    where: Callable[[int], str] = "row {}".format,
) -> dict[tuple[int, int], Parsed]:
    """Operands of questions `a_0 … a_{n-1} * b_0 … b_{m-1}`, by size; with `cots` or `answers`, checked against them.

    Args:
        questions, cots, answers: N strings each.
        where: what errors call row i, counted from 0.

    Returns:
        `{(n, m): Parsed}` in ascending order of sizes.

    Raises:
        ValueError: a question that is not so, or a cot or answer other than the operands'; names the first such row.
    """
    questions = _strings(questions, len(questions))
    given = {
        name: _strings(values, len(questions))
        for name, values in (("cot", cots), ("answer", answers))
        if values is not None
    }
    lengths = np.asarray(pc.binary_length(questions.cast(pa.large_binary())), np.int64)
    stars = np.asarray(pc.find_substring(questions, "*"), np.int64)  # in bytes; -1 without one
    shapes, shape_of = np.unique(lengths << 32 | stars + 1, return_inverse=True)
    errors: list[tuple[int, str]] = []
    groups = {}
    for shape in range(len(shapes)):
        rows = np.flatnonzero(shape_of == shape)
        length, star = int(lengths[rows[0]]), int(stars[rows[0]])
        n, m = star // 2, (length - star - 1) // 2
        bad = np.zeros(1, np.int64)  # by its form alone, else by its characters
        if length % 2 and star % 2 == 0 and 1 <= n <= MAX_DIGITS and 1 <= m <= MAX_DIGITS:
            taken = questions.take(rows)
            text = np.frombuffer(taken.buffers()[2], np.uint8)[: len(rows) * length].reshape(-1, length)
            digits = text[:, ::2] - ord("0")
            digits[:, n] = 0
            bad = np.flatnonzero((digits > 9).any(1) | (text[:, 1::2] != ord(" ")).any(1))
        if len(bad):
            row = rows[bad[0]]
            form = f"'a_0 … a_n-1 * b_0 … b_m-1' with 1 to {MAX_DIGITS} digits a side"
            errors.append((row, f"the question {questions[row].as_py()!r} is not {form}"))
            continue
        group = Parsed(rows, np.ascontiguousarray(digits[:, :n]), np.ascontiguousarray(digits[:, n + 1 :]))
        expected = columns(group.a, group.b) if given else None
        for name, values in given.items():
            right = expected.column(name).cast(pa.large_string())
            wrong = np.flatnonzero(~np.asarray(pc.equal(right, values.take(rows))))
            if len(wrong):
                row = rows[wrong[0]]
                texts = f"the {name} is {values[row].as_py()!r}, but should be {right[wrong[0]].as_py()!r}"
                errors.append((row, f"{texts} for the question {questions[row].as_py()!r}"))
        groups[n, m] = group
    if errors:
        row, message = min(errors)
        raise ValueError(f"{where(int(row))}: {message}")
    return dict(sorted(groups.items()))


def _strings(values: Sequence[str] | pa.Array | pa.ChunkedArray, length: int) -> pa.Array:
    array = pa.array(values, pa.large_string()) if isinstance(values, list | tuple) else values.cast(pa.large_string())
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if len(array) != length or array.null_count:
        raise ValueError(f"there must be {length} strings in each column, not {len(array) - array.null_count}")
    return array


def parse_lines(data: bytes | str, name: str = "text", check: bool = True) -> dict[tuple[int, int], Parsed]:
    """Operands of a text in the format `question||cot #### answer`, by size; with `check`, all of it is worked out.

    Raises:
        ValueError: as `text.parse_text` and `parse`; names the line.
    """
    table = parse_text(data.encode() if isinstance(data, str) else data, name)
    given = (table.column("cot"), table.column("answer")) if check else (None, None)
    return parse(table.column("question"), *given, where=lambda row: f"{name}, line {row + 1}")


class MultiplicationTask:
    """Multiplication of drawn operands, of one size or of several mixed.

    Args:
        digits: (n, m), or a list of such pairs.
        train_size: training rows of each size; None for all that exist beside the held-out ones, at most 808,000.
        valid_size, test_size: rows of each size in the held-out splits; 0 for no such split.
        seed, exclude: as `split_operands`. `exclude` may be the path of a file in the text format too.

    Raises:
        ValueError: as `split_operands` and `parse_lines`, or a size named twice.
    """

    def __init__(
        self,
        digits: Sequence[int] | Sequence[Sequence[int]] = (4, 4),
        train_size: int | None = None,
        valid_size: int = 1000,
        test_size: int = 1000,
        seed: int = 0,
        exclude: Exclude | str | Path = None,
    ):
        several = len(digits) > 0 and not isinstance(digits[0], int | np.integer)
        sizes = [check_digits(size) for size in (digits if several else [digits])]
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"a size is named twice among {sizes}")
        counts = {"train": train_size, "validation": valid_size, "test": test_size}
        counts = {split: count for split, count in counts.items() if count != 0}
        if "train" not in counts:
            raise ValueError("train_size must be 1 or more, or None for all")
        self.sizes = [list(size) for size in sizes]
        self.name = "multiplication-" + "+".join(f"{n}x{m}" for n, m in sizes)
        excluded = dict.fromkeys(sizes, exclude)
        if isinstance(exclude, str | Path):
            parsed = parse_lines(Path(exclude).read_bytes(), str(exclude))
            excluded = {size: parsed[size][1:] if size in parsed else None for size in sizes}
        drawn = [split_operands(size, counts, seed, excluded[size]) for size in sizes]
        self.operands: dict[str, list[Operands]] = {split: [parts[split] for parts in drawn] for split in counts}

    @property
    def example_lines(self) -> list[str]:
        firsts = [format_lines(a[:2], b[:2]).decode().splitlines() for a, b in self.operands["train"]]
        return [line for lines in firsts for line in lines][:6]

    def splits(self, running_sums: bool = False) -> dict[str, TokenizedProblems]:
        """The problems of each split; with the ĉ_k that belong to the answers' places if `running_sums`."""
        return {
            split: TokenizedProblems.concatenate([_encode_with(a, b, running_sums) for a, b in parts])
            for split, parts in self.operands.items()
        }


def _encode_with(a: np.ndarray, b: np.ndarray, with_sums: bool) -> TokenizedProblems:
    problems = encode(a, b)
    if with_sums:
        problems.running_sums = torch.from_numpy(running_sums(a, b).c_hat.astype(np.int16))
    return problems
