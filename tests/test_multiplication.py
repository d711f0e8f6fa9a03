"""Multiplication: what is written and read, how operands are drawn and how fast columns become tokens."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_icot.tasks import TokenizedProblems
from hf_icot.tasks.multiplication import (
    MultiplicationTask,
    columns,
    encode,
    format_lines,
    parse,
    parse_lines,
    running_sums,
    sequence_length,
    thinking_length,
)
from hf_icot.tasks.operands import from_integers, sample_operands, split_operands
from hf_icot.tasks.text import COLUMNS, parse_text, tokenize_rows
from hf_icot.tokenization_icot import TOKEN_IDS, VOCABULARY, ArithmeticTokenizer


HERE = Path(__file__).parent
# Operands of the validation files of github.com/da03/Internalize_CoT_Step_by_Step (MIT licence, Copyright 2024
# Yuntian Deng) stand in tests/data; these are the SHA-256 of the files themselves.
AUTHORS = {
    (4, 4): "27c2ca51e9368367b43b4a99eb6148f8dc904531f7ead074d3a97056f788058c",
    (7, 7): "3916e4871b6368065db115a640194e4ef6eebba195fdb29a2b9d4c788feee53c",
}
LINES = {
    (2365, 4347): "5 6 3 2 * 7 4 3 4||5 5 5 6 1 + 0 0 6 4 9 0 ( 5 5 1 1 1 1 ) + 0 0 5 9 0 7 0 ( 5 5 6 0 2 8 0 ) "
    "+ 0 0 0 0 6 4 9 0 #### 5 5 6 0 8 2 0 1",
    (5196, 7446): "6 9 1 5 * 6 4 4 7||6 7 1 1 3 + 0 4 8 7 0 2 ( 6 1 0 9 3 2 ) + 0 0 4 8 7 0 2 ( 6 1 4 7 1 3 2 ) "
    "+ 0 0 0 2 7 3 6 3 #### 6 1 4 9 8 6 8 3",
    (9, 9): "9 * 9||1 8 #### 1 8",
    (0, 7): "0 * 7||0 0 #### 0 0",
    (123, 4): "3 2 1 * 4||2 9 4 0 #### 2 9 4 0",
    (123, 45): "3 2 1 * 5 4||5 1 6 0 + 0 2 9 4 0 #### 5 3 5 5 0",
}


def numbers(digits):
    """The digit arrays' numbers as Python integers."""
    return [int("".join(map(str, row[::-1]))) for row in digits.tolist()]


def pairs(operands):
    return list(zip(numbers(operands.a), numbers(operands.b), strict=True))


def spaced(number, width):
    return " ".join(f"{number:0{width}d}"[::-1])


def expected_line(a, b, n, m):
    """The format once more, from integers."""
    cot, total = "", 0
    for j in range(m):
        product = a * (b // 10**j % 10) * 10**j
        total += product
        cot += (" + " if j else "") + spaced(product, n + 1 + j)
        if 0 < j < m - 1:
            cot += f" ( {spaced(total, n + 1 + j)} )"
    return f"{spaced(a, n)} * {spaced(b, m)}||{cot} #### {spaced(a * b, n + m)}"


@st.composite
def operands(draw):
    n, m, rows = draw(st.integers(1, 20)), draw(st.integers(1, 20)), draw(st.integers(1, 4))
    flat = draw(st.lists(st.integers(0, 9), min_size=rows * (n + m), max_size=rows * (n + m)))
    digits = np.array(flat, np.uint8).reshape(rows, n + m)
    return digits[:, :n], digits[:, n:]


@given(operands())
@settings(max_examples=150, deadline=None)
def test_every_size_is_written_and_read_back(drawn):
    a, b = drawn
    (n, m), rows = (a.shape[1], b.shape[1]), len(a)
    expected = [expected_line(x, y, n, m) for x, y in zip(numbers(a), numbers(b), strict=True)]
    text = format_lines(a, b)
    assert text.decode().splitlines() == expected and text.endswith(b"\n")
    table = columns(a, b)
    assert table.equals(parse_text(text))
    for groups in (parse_lines(text), parse(table["question"], table["cot"], table["answer"])):
        assert list(groups) == [(n, m)]
        group = groups[n, m]
        assert (group.a == a).all() and (group.b == b).all() and group.rows.tolist() == list(range(rows))
    tokens = [[VOCABULARY[token] for token in row] for row in encode(a, b).tokens.tolist()]
    assert [" ".join(row) for row in tokens] == [f"{line.replace('||', ' %%% ')} <eos>" for line in expected]


@given(operands())
@settings(max_examples=150, deadline=None)
def test_partial_products_and_running_sums(drawn):
    a, b = drawn
    n, m = a.shape[1], b.shape[1]
    sums = running_sums(a, b)
    assert all(values.shape == (len(a), n + m) and values.dtype == np.int32 for values in sums)
    for row, (x, y) in enumerate(zip(numbers(a), numbers(b), strict=True)):
        s = [sum(int(a[row, i]) * int(b[row, k - i]) for i in range(n) if 0 <= k - i < m) for k in range(n + m)]
        assert sums.s[row].tolist() == s and sum(value * 10**k for k, value in enumerate(s)) == x * y
        carried = 0
        for k in range(n + m):
            c_hat = s[k] + carried
            carried = c_hat // 10
            assert (sums.c_hat[row, k], sums.c[row, k], sums.r[row, k]) == (c_hat, c_hat % 10, carried)
        assert carried == 0 and numbers(sums.c)[row] == x * y


@given(operands())
@settings(max_examples=60, deadline=None)
def test_thinking_tokens_add_up(drawn):
    """Read p_j and s_j off the tokens and add them as Python integers."""
    a, b = drawn
    n, m = a.shape[1], b.shape[1]
    problems = encode(a, b)
    assert problems.tokens.dtype == torch.uint8 and problems.pad_token_id == TOKEN_IDS["<pad>"]
    assert problems.question_length.tolist() == [n + m + 1] * len(a)
    assert problems.thinking_length.tolist() == [thinking_length(n, m)] * len(a)
    assert problems.answer_length.tolist() == [n + m] * len(a)
    assert problems.lengths.tolist() == [sequence_length(n, m)] * len(a) == [problems.tokens.shape[1]] * len(a)
    for row, x, y in zip(problems.tokens.tolist(), numbers(a), numbers(b), strict=True):
        cot = "".join(VOCABULARY[token] for token in row[n + m + 2 : n + m + 2 + thinking_length(n, m)])
        total = 0
        for j, term in enumerate(cot.split("+")):
            product, _, partial = term.rstrip(")").partition("(")
            total += int(product[::-1])
            assert len(product) == n + 1 + j and int(product[::-1]) == x * (y // 10**j % 10) * 10**j
            assert bool(partial) == (0 < j < m - 1)
            assert not partial or (len(partial) == n + 1 + j and int(partial[::-1]) == total)
        assert j == m - 1 and total == x * y


@pytest.mark.parametrize("digits", AUTHORS)
def test_the_authors_files_come_back_from_their_operands(digits):
    """Byte for byte, by the digest of the whole file. The file itself is not ours to ship."""
    path = HERE.parent.parent / "shared" / "data" / "mult_{}x{}_valid.txt".format(*digits)
    if not path.exists():
        pytest.skip(f"{path.name} of the ICoT authors is not at hand; test_lines has lines of it")
    questions = [line.partition("||")[0] for line in path.read_text().splitlines()]
    group = parse(questions)[digits]
    text = format_lines(group.a, group.b)
    assert len(group.a) == 1000 and hashlib.sha256(text).hexdigest() == AUTHORS[digits]
    assert path.read_bytes() == text


@pytest.mark.parametrize("pair", LINES)
def test_lines(pair):
    size = tuple(len(str(number)) for number in pair)
    assert format_lines(*from_integers([pair], size)).decode() == LINES[pair] + "\n"


def test_columns_of_no_rows():
    none = np.empty((0, 3), np.uint8)
    assert columns(none, none).num_rows == 0 and format_lines(none, none) == b"" and len(encode(none, none)) == 0
    assert encode(none, none).max_length == 0 and parse([]) == {}


def test_many_blocks_agree_with_one_row():
    """Rows on both sides of every block's border are worked out as they are alone."""
    a, b = sample_operands((5, 3), 40_001)
    tokens, table = encode(a, b).tokens, columns(a, b)
    lines = format_lines(a, b).splitlines()
    assert len(lines) == len(tokens) == table.num_rows == 40_001
    for row in (0, 1023, 1024, 2047, 2048, 16_383, 16_384, *range(20_000, 40_001, 997), 40_000):
        one = slice(row, row + 1)
        assert torch.equal(tokens[one], encode(a[one], b[one]).tokens)
        assert table.slice(row, 1).equals(columns(a[one], b[one]))
        assert lines[row] == format_lines(a[one], b[one]).rstrip()


@pytest.mark.parametrize("digits", [(1, 1), (3, 1), (1, 2), (4, 4), (12, 7)])
def test_the_tokenizer_gives_the_same_tokens(digits):
    drawn = sample_operands(digits, 50)
    fast, slow = encode(*drawn), tokenize_rows(columns(*drawn), ArithmeticTokenizer())
    for name in ("tokens", "question_length", "thinking_length", "answer_length"):
        assert torch.equal(getattr(fast, name), getattr(slow, name))
        assert getattr(fast, name).dtype == getattr(slow, name).dtype
    assert fast.pad_token_id == slow.pad_token_id


@pytest.mark.parametrize(
    ("question", "cot", "answer", "message"),
    [
        ("1 2 x 3", None, None, "row 2: the question '1 2 x 3' is not"),
        ("1 2 * ", None, None, "row 2: the question '1 2 [*] '"),
        ("* 1 2", None, None, "row 2"),
        ("1 2  * 3", None, None, "row 2"),
        ("12 * 3 4", None, None, "row 2"),
        ("1 a * 3", None, None, "row 2"),
        ("1 * 3 * 4", None, None, "row 2"),
        ("1_2 * 3", None, None, "row 2"),
        (" ".join("1" * 21) + " * 3", None, None, "1 to 20 digits a side"),
        ("3 * 4", "2 1", "2 2", "row 2: the answer is '2 2', but should be '2 1' for the question '3 [*] 4'"),
        ("3 * 4", "2 0", "2 1", "row 2: the cot is '2 0', but should be '2 1'"),
    ],
)
def test_what_is_not_a_problem_is_named(question, cot, answer, message):
    good = columns(*from_integers([(7, 8), (6, 9)], (1, 1)))
    rows = {
        name: good[name].to_pylist() + [value] for name, value in zip(COLUMNS, (question, cot, answer), strict=True)
    }
    given = () if cot is None else (rows["cot"], rows["answer"])
    with pytest.raises(ValueError, match=message):
        parse(rows["question"], *given)


def test_the_first_wrong_row_is_named_among_sizes():
    with pytest.raises(ValueError, match="file.txt, line 3: the answer"):
        parse_lines(
            "1 * 2||2 0 #### 2 0\n1 2 * 3||3 6 0 #### 3 6 0\n1 2 * 3||3 6 0 #### 3 7 0\n1 * 2||2 0 #### 3 0",
            "file.txt",
        )
    groups = parse_lines("1 * 2||2 0 #### 2 0\n1 2 * 3||3 6 0 #### 9 9 9\n2 * 2||4 0 #### 4 0", check=False)
    assert {size: group.rows.tolist() for size, group in groups.items()} == {(1, 1): [0, 2], (2, 1): [1]}


def test_parse_takes_arrow_columns_with_offsets_and_chunks():
    table = columns(*sample_operands((3, 2), 30))
    chunked = pa.concat_tables([table.slice(4, 9), table.slice(20, 5)])
    group = parse(chunked["question"], chunked["cot"], chunked["answer"])[3, 2]
    assert columns(group.a, group.b).equals(chunked.combine_chunks()) and len(group.a) == 14
    with pytest.raises(ValueError, match="must be 2 strings"):
        parse(["1 * 2", "1 * 3"], ["2 0", None])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode(np.zeros((2, 3), np.uint8), np.zeros((3, 3), np.uint8)), "a has 2 rows and b has 3"),
        (lambda: encode(np.zeros((2, 21), np.uint8), np.zeros((2, 3), np.uint8)), "from 1 to 20, not 21 and 3"),
        (lambda: encode(np.full((2, 3), 10), np.zeros((2, 3), int)), "a holds 10 to 10: digits are 0 to 9"),
        (lambda: encode(np.zeros((2, 3)), np.zeros((2, 3), int)), "integer array .* not float64"),
        (lambda: thinking_length(0, 4), "from 1 to 20"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_task_of_one_size():
    task = MultiplicationTask((3, 2), valid_size=100, test_size=0, seed=2)
    assert task.name == "multiplication-3x2" and task.sizes == [[3, 2]]
    splits = task.splits()
    assert {name: len(problems) for name, problems in splits.items()} == {"train": 80_900, "validation": 100}
    drawn = split_operands((3, 2), {"train": None, "validation": 100}, seed=2)
    assert torch.equal(splits["validation"].tokens, encode(*drawn["validation"]).tokens)
    assert "\n".join(task.example_lines).encode() + b"\n" == format_lines(*(d[:2] for d in drawn["train"]))


def test_task_of_several_sizes(tmp_path):
    first = MultiplicationTask([(1, 2), (2, 2)], train_size=300, valid_size=50, test_size=10)
    assert first.name == "multiplication-1x2+2x2" and first.sizes == [[1, 2], [2, 2]]
    problems = first.splits()["validation"]
    assert problems.tokens.shape == (100, sequence_length(2, 2)) and problems.max_length == sequence_length(2, 2)
    assert problems.lengths.unique_consecutive().tolist() == [sequence_length(1, 2), sequence_length(2, 2)]
    padding = problems.tokens[:50, sequence_length(1, 2) :]
    assert padding.numel() and (padding == TOKEN_IDS["<pad>"]).all()
    sizes = set()
    for line in first.example_lines:
        sizes |= set(parse_lines(line))
    assert sizes == {(1, 2), (2, 2)}
    held = b"".join(format_lines(*operands) for operands in first.operands["validation"])
    (tmp_path / "held.txt").write_bytes(held)
    second = MultiplicationTask([(2, 2), (3, 3)], 3000, 50, 50, seed=1, exclude=tmp_path / "held.txt")
    banned = set(pairs(first.operands["validation"][1]))
    banned |= {(b, a) for a, b in banned}
    assert not any(banned & set(pairs(split[0])) for split in second.operands.values())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"digits": [(4, 4), (4, 4)]}, "named twice"),
        ({"digits": [(4, 4), (4,)]}, "two integers"),
        ({"digits": []}, "two integers"),
        ({"digits": (4, 4), "train_size": 0}, "train_size must be 1 or more"),
        ({"digits": (1, 1)}, "1x1 digits: 2,001 .* only 100 exist"),
    ],
)
def test_task_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MultiplicationTask(**kwargs)


def test_tokenized_problems_select_and_concatenate():
    small, large = encode(*sample_operands((1, 1), 5)), encode(*sample_operands((3, 2), 4))
    both = TokenizedProblems.concatenate([small, large])
    picked = both.select([6, 0])
    assert picked.lengths.tolist() == [sequence_length(3, 2), sequence_length(1, 1)]
    assert torch.equal(picked.tokens[0], large.tokens[1])
    assert torch.equal(picked.tokens[1, : sequence_length(1, 1)], small.tokens[0])
    assert both.select(torch.tensor([2])).max_length == sequence_length(1, 1)
    assert torch.equal(both.select(slice(5, 9)).tokens, large.tokens)
    assert len(both.select([])) == 0
    with pytest.raises(ValueError, match="at least one part"):
        TokenizedProblems.concatenate([])
    with pytest.raises(ValueError, match=r"different tokens: \[0, 5\]"):
        TokenizedProblems.concatenate([small, TokenizedProblems(**{**vars(large), "pad_token_id": 5})])
    with pytest.raises(ValueError, match=r"answer_length must have shape \[4\]"):
        TokenizedProblems(**{**vars(large), "answer_length": small.answer_length})
