"""Rows of text: files in the format of the ICoT authors, datasets, and their way to tokens."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_icot.tasks.multiplication import columns, encode, format_lines
from hf_icot.tasks.operands import sample_operands
from hf_icot.tasks.text import TextTask, load_rows, parse_text, tokenize_rows
from hf_icot.tokenization_icot import TOKEN_IDS, ArithmeticTokenizer


LINES = [
    "Ann has 3 pens.  She finds 2.  How many?||<<3+2=5>> | || <<5>> #### 5",
    "A £5 book costs half. What is saved?||<<5/2=2.5>> #### <<5-2.5=2.5>> #### 2.5",
    "No thought needed: 7?|| #### 7",
    "Nor here||#### 8",
]
ROWS = [
    {"question": "Ann has 3 pens.  She finds 2.  How many?", "cot": "<<3+2=5>> | || <<5>>", "answer": "5"},
    {"question": "A £5 book costs half. What is saved?", "cot": "<<5/2=2.5>> #### <<5-2.5=2.5>>", "answer": "2.5"},
    {"question": "No thought needed: 7?", "cot": "", "answer": "7"},
    {"question": "Nor here", "cot": "", "answer": "8"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def words():
    """A tokenizer of words, larger than a byte, without padding token."""
    vocabulary = ["<eos>", "<unk>", "%%%", "####", *(f"w{i}" for i in range(300))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "\n", "\n\n  \n"])
def test_prose(end, tail):
    text = end.join(LINES) + tail.replace("\n", end)
    assert parse_text(text.encode()).to_pylist() == ROWS
    assert parse_text(b"\xef\xbb\xbf" + text.encode()).to_pylist() == ROWS


def test_separators_of_unicode_do_not_end_lines():
    table = parse_text("a\u2028b\x0bc||d\x85e #### f".encode())
    assert table.to_pylist() == [{"question": "a\u2028b\x0bc", "cot": "d\x85e", "answer": "f"}]
    assert parse_text(b"").num_rows == parse_text(b"\n\n").num_rows == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1 * 2 2 0 #### 2 0", r"lacks '\|\|' after the question"),
        (b"1 * 2|2 0 #### 2 0", r"lacks '\|\|' after the question"),
        (b"1 * 2||2 0 ### 2 0", "lacks ' #### ' before the answer"),
        (b"1 * 2||2 0####2 0", "lacks ' #### ' before the answer"),
        (b"1 * 2||", "lacks ' #### ' before the answer"),
        (b" ||2 0 #### 2 0", r"has no question before '\|\|'"),
        (b"1 * 2||2 0 #### ", "has no answer after '####'"),
        (b"1 * 2||2 0 ####", "has no answer after '####'"),
        (b"", "is empty"),
        (b"1 * 2||2 \xff #### 2 0", "not UTF-8 .invalid start byte"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "train.txt"
    path.write_bytes(b"1 * 2||2 0 #### 2 0\r\n" + line + b"\n3 * 1||3 0 #### 3 0\n")
    with pytest.raises(ValueError, match=rf"train.txt, line 2:? {message}"):
        load_rows(path)


def test_rows_from_every_source(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    (tmp_path / "rows.txt").write_text("\n".join(LINES), encoding="utf-8")
    extra = [{"id": i, **row} for i, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in extra), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(extra), tmp_path / "rows.parquet")
    (tmp_path / "repository").mkdir()
    pq.write_table(table, tmp_path / "repository" / "train.parquet")
    pq.write_table(table.slice(1), tmp_path / "repository" / "validation.parquet")
    dataset = Dataset.from_list(extra)
    sources = [
        *(tmp_path / f"rows.{suffix}" for suffix in ("txt", "jsonl", "parquet")),
        str(tmp_path / "repository"),
        table,
        dataset,
        {column: [row[column] for row in ROWS] for column in ROWS[0]},
    ]
    for source in sources:
        assert load_rows(source).to_pylist() == ROWS, source
    assert load_rows(dataset.select([2, 0])).to_pylist() == [ROWS[2], ROWS[0]]
    assert load_rows(str(tmp_path / "repository"), split="validation").to_pylist() == ROWS[1:]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"question": ["q"], "answer": ["a"]}, "rows: no column 'cot' among"),
        ({"question": ["q", ""], "cot": ["", ""], "answer": ["a", "a"]}, "rows, row 1: 'question' is empty"),
        ({"question": ["q"], "cot": ["c"], "answer": [""]}, "rows, row 0: 'answer' is empty"),
        ({"question": ["q", "q"], "cot": ["c", None], "answer": ["a", "b"]}, "rows, row 1: 'cot' is null"),
        ({"question": ["q"], "cot": ["c"], "answer": [7]}, "column 'answer' must hold strings, not int64"),
        (DatasetDict({"train": Dataset.from_list(ROWS)}), "give one split of a dataset"),
        (7, "rows cannot be read from a int"),
    ],
)
def test_rows_that_are_none(rows, message):
    with pytest.raises(ValueError, match=message):
        load_rows(rows)
    if isinstance(rows, dict) and not isinstance(rows, DatasetDict) and "cot" not in rows:
        with pytest.raises(ValueError, match="no column 'cot'"):
            load_rows(Dataset.from_dict(rows))


def test_files_that_are_none(tmp_path):
    for name in ("none.txt", "none.jsonl", "none.parquet"):
        with pytest.raises(FileNotFoundError, match=name):
            load_rows(tmp_path / name)
    (tmp_path / "bad.jsonl").write_text('{"question": "q"\n')
    (tmp_path / "bad.parquet").write_text("PAR0")
    for name in ("bad.jsonl", "bad.parquet"):
        with pytest.raises(ValueError, match=name):
            load_rows(tmp_path / name)


def test_any_tokenizer(words):
    """Ragged rows, over several calls of the tokenizer, against one row at a time."""
    rng = np.random.default_rng(0)
    low = {"question": 1, "cot": 0, "answer": 1}
    rows = [
        {name: " ".join(f"w{i}" for i in rng.integers(0, 300, rng.integers(least, 9))) for name, least in low.items()}
        for _ in range(25)
    ]
    problems = tokenize_rows(pa.Table.from_pylist(rows), words, batch_size=4)
    assert problems.tokens.dtype == torch.int32 and problems.pad_token_id == words.eos_token_id
    assert problems.max_length == problems.tokens.shape[1]
    for i, row in enumerate(rows):
        text = f"{row['question']} %%% {row['cot']} #### {row['answer']} <eos>"
        ids = words(text)["input_ids"]
        assert problems.tokens[i, : len(ids)].tolist() == ids
        assert problems.tokens[i, len(ids) :].tolist() == [words.eos_token_id] * (problems.max_length - len(ids))
        lengths = [getattr(problems, f"{name}_length")[i] for name in ("question", "thinking", "answer")]
        assert lengths == [len(row[name].split()) for name in low] and problems.lengths[i] == len(ids)
    assert len(tokenize_rows(pa.Table.from_pylist(rows).slice(0, 0), words)) == 0


def test_the_arithmetic_tokenizer_decides_also_where_bytes_do_not():
    """Single characters take a short cut; bits, and texts with tokens of several characters, must not."""
    tokenizer = ArithmeticTokenizer()
    rows = {
        "question": ["+1 -1 +1 -1", "12*3", "4+1 * 2", "  1 2  *3 ", "1 <unk> 2"],
        "cot": ["-1 -1", "", "( 4 ) + 1", "3 6 9 + ( )", "1 %%% 2"],
        "answer": ["+1", "3 6", "0 1", "9", "1"],
    }
    problems = tokenize_rows(load_rows(rows), tokenizer)
    for i in range(5):
        ids = [tokenizer.encode(rows[name][i], add_special_tokens=False) for name in rows]
        row = [*ids[0], TOKEN_IDS["%%%"], *ids[1], TOKEN_IDS["####"], *ids[2], TOKEN_IDS["<eos>"]]
        assert problems.tokens[i, : len(row)].tolist() == row and problems.lengths[i] == len(row)
    assert problems.tokens.dtype == torch.uint8
    # One row at a time, so that rows which qualify take the short cut and are held against the tokenizer too.
    for i in range(5):
        alone = tokenize_rows(load_rows(rows).slice(i, 1), tokenizer)
        assert alone.tokens[0].tolist() == problems.tokens[i, : alone.max_length].tolist()
    grown = ArithmeticTokenizer()
    grown.add_tokens(["12"])
    assert tokenize_rows(load_rows(rows).slice(1, 1), grown).question_length.tolist() == [3]


def test_tokens_that_must_be_single(words):
    lacking = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "%%%": 2}, unk_token="<unk>"))
    lacking.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rows = load_rows({"question": ["w1"], "cot": ["w2"], "answer": ["w3"]})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=lacking, eos_token="<eos>", unk_token="<unk>")
    with pytest.raises(ValueError, match=r"'####' must be a single token.*tokenizer.add_tokens\(\['####'\]\)"):
        tokenize_rows(rows, tokenizer)
    tokenizer.add_tokens(["####"])
    assert tokenize_rows(rows, tokenizer).tokens.tolist() == [[1, 2, 1, 3, 1, 0]]
    endless = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, unk_token="<unk>")
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        tokenize_rows(rows, endless)


def test_task_from_files(tmp_path):
    drawn = {name: sample_operands((2, 2), 20, seed) for seed, name in enumerate(("train", "valid", "test"))}
    for name, operands in drawn.items():
        (tmp_path / f"{name}.txt").write_bytes(format_lines(*operands))
    files = [tmp_path / f"{name}.txt" for name in drawn]
    task = TextTask(files[0], files[1], ArithmeticTokenizer(), files[2])
    assert task.name == "train" and task.sizes == []
    assert task.example_lines == files[0].read_text().splitlines()[:3]
    splits = task.splits()
    assert list(splits) == ["train", "validation", "test"]
    for problems, operands in zip(splits.values(), drawn.values(), strict=True):
        assert torch.equal(problems.tokens, encode(*operands).tokens)
    assert list(TextTask(files[0], files[1], ArithmeticTokenizer(), name="own").splits()) == ["train", "validation"]
    files[1].write_text("\n")
    with pytest.raises(ValueError, match="split 'validation' has no rows"):
        TextTask(files[0], files[1], ArithmeticTokenizer())


def test_task_from_a_dataset(tmp_path):
    tables = {name: columns(*sample_operands((3, 2), 10, seed)) for seed, name in enumerate(("train", "validation"))}
    splits = DatasetDict({name: Dataset.from_dict(table.to_pydict()) for name, table in tables.items()})
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}-00000-of-00001.parquet")
    for source in (splits, tables, tmp_path, str(tmp_path)):
        task = TextTask.from_dataset(source, ArithmeticTokenizer())
        assert list(task.splits()) == ["train", "validation"]
        assert {name: rows.to_pylist() for name, rows in task.rows.items()} == {
            name: table.to_pylist() for name, table in tables.items()
        }
    assert task.name == tmp_path.name
    with pytest.raises(ValueError, match="no split 'validation' among"):
        TextTask.from_dataset({"train": tables["train"], "test": tables["validation"]}, ArithmeticTokenizer())
