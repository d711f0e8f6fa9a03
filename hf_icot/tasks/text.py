"""Problems as three strings, from files `question||cot #### answer` or from datasets, and their way to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from ..tokenization_icot import TOKEN_IDS, ArithmeticTokenizer
from . import TokenizedProblems


COLUMNS = ("question", "cot", "answer")
THINK, ANSWER = "%%%", "####"


def parse_text(data: bytes, name: str = "text") -> pa.Table:
    """Rows of a text in the format of the ICoT authors, one `question||cot #### answer` a line.

    The question ends at the first `||`, the answer begins after the last ` #### `, so that prose may hold either.
    White space around each part is dropped. Lines may end as on Windows, and empty lines may end the text.

    Args:
        data: UTF-8.
        name: what errors call the text, e.g. the file's path.

    Returns:
        Table of strings `question`, `cot` (may be empty) and `answer`.

    Raises:
        ValueError: a line that is not so, or not UTF-8; names the line and what it lacks.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}, line {line}: not UTF-8 ({error.reason})") from None
    lines = text.rstrip().split("\n") if text.strip() else []
    rows: tuple[list[str], ...] = ([], [], [])
    for number, line in enumerate(lines, 1):
        question, bar, rest = line.partition("||")
        cot, separator, answer = f" {rest.strip()} ".rpartition(f" {ANSWER} ")
        parts = [part.strip() for part in (question, cot, answer)]
        lacks = None
        if not line.strip():
            lacks = "is empty"
        elif not bar:
            lacks = "lacks '||' after the question"
        elif not separator:
            lacks = f"lacks ' {ANSWER} ' before the answer"
        elif not parts[0]:
            lacks = "has no question before '||'"
        elif not parts[2]:
            lacks = f"has no answer after '{ANSWER}'"
        if lacks:
            start = line.strip()[:60]
            raise ValueError(f"{name}, line {number} {lacks}; lines are 'question||cot #### answer', not {start!r}")
        for column, part in zip(rows, parts, strict=True):
            column.append(part)
    return pa.table({name: pa.array(column, pa.string()) for name, column in zip(COLUMNS, rows, strict=True)})


def load_rows(source, config: str | None = None, split: str = "train") -> pa.Table:
    """Rows from wherever they are.

    Args:
        source: a `datasets.Dataset`, a `pyarrow.Table`, a mapping of columns, the path of a `.txt` (as `parse_text`),
            `.jsonl` or `.parquet` file, or else a folder or Hub name for `datasets.load_dataset`.
        config, split: what to load of a dataset; of no use to the other sources.

    Returns:
        Table of strings `question`, `cot` and `answer`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a malformed file, a missing column, or a row without question or answer.
    """
    name = "rows"
    if isinstance(source, str | Path):
        name, path = str(source), Path(source)
        suffix = path.suffix.lower()
        if suffix == ".txt":
            return parse_text(path.read_bytes(), name)
        if suffix in (".jsonl", ".parquet"):
            table = _read_table(path, suffix)
        else:
            from datasets import load_dataset

            table = _dataset_table(load_dataset(name, config, split=split))
    elif isinstance(source, pa.Table):
        table = source
    elif isinstance(getattr(source, "num_rows", None), int) and hasattr(source, "with_format"):  # a datasets.Dataset
        table = _dataset_table(source)
    elif isinstance(source, Mapping) and not hasattr(source, "with_format"):
        table = pa.table({column: pa.array(values) for column, values in source.items()})
    else:
        raise ValueError(f"rows cannot be read from a {type(source).__name__}; give one split of a dataset or a file")
    return _checked(table, name)


def _read_table(path: Path, suffix: str) -> pa.Table:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path)
        import pyarrow.json

        return pyarrow.json.read_json(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: {error}") from None


def _dataset_table(dataset) -> pa.Table:
    missing = [column for column in COLUMNS if column not in dataset.column_names]
    kept = dataset if missing else dataset.select_columns(list(COLUMNS))
    return kept.with_format("arrow")[:]


def _checked(table: pa.Table, name: str) -> pa.Table:
    missing = [column for column in COLUMNS if column not in table.column_names]
    if missing:
        raise ValueError(
            f"{name}: no column {missing[0]!r} among {table.column_names}; rows need {', '.join(COLUMNS)}"
        )
    columns = {}
    for column in COLUMNS:
        values = table.column(column)
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            raise ValueError(f"{name}: column {column!r} must hold strings, not {values.type}")
        lengths = np.asarray(pc.fill_null(pc.utf8_length(values), -1))
        bad = np.flatnonzero(lengths < (0 if column == "cot" else 1))
        if len(bad):
            what = "null" if lengths[bad[0]] < 0 else "empty"
            raise ValueError(f"{name}, row {bad[0]}: {column!r} is {what}")
        columns[column] = values
    return pa.table(columns)


def tokenize_rows(rows: pa.Table, tokenizer: PreTrainedTokenizerBase, batch_size: int = 20_000) -> TokenizedProblems:
    """Tokens of rows: `ids(question) %%% ids(cot) #### ids(answer) <eos>`, each column tokenized many rows at once.

    Args:
        rows: table of strings `question`, `cot`, `answer`, N rows.
        tokenizer: any that has an end-of-sequence token and holds `%%%` and `####` as one token each. Rows are padded
            with its padding token, or else with its end-of-sequence token.
        batch_size: rows for one call of the tokenizer.

    Returns:
        `TokenizedProblems`, tokens uint8 [N, L] where the vocabulary fits into a byte, else int32.

    Raises:
        ValueError: the tokenizer lacks one of these tokens.
    """
    think, separator = (_single_token(tokenizer, token) for token in (THINK, ANSWER))
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError("the tokenizer has no end-of-sequence token: set tokenizer.eos_token")
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    dtype = np.uint8 if max(len(tokenizer), eos + 1, pad + 1) <= 256 else np.int32
    batches, counts = [], np.zeros((3, len(rows)), np.int64)
    for start in range(0, len(rows), batch_size):
        flat = []
        for part, column in enumerate(COLUMNS):
            ids, count = _token_ids(rows.column(column).slice(start, batch_size), tokenizer)
            counts[part, start : start + batch_size] = count
            flat.append(ids.astype(dtype, copy=False))
        batches.append(flat)
    length = int(counts.sum(0).max()) + 3 if len(rows) else 0
    tokens = np.full((len(rows), length), pad, dtype)
    for start, flat in zip(range(0, len(rows), batch_size), batches, strict=True):
        _place(
            tokens[start : start + batch_size], counts[:, start : start + batch_size], flat, (think, separator, eos)
        )
    lengths = (torch.from_numpy(count.astype(np.int32)) for count in counts)
    return TokenizedProblems(torch.from_numpy(tokens), *lengths, pad_token_id=pad)


def _single_token(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"{token!r} must be a single token, but the tokenizer reads it as {ids}: add it with "
            f"tokenizer.add_tokens([{token!r}]) and enlarge the model's embeddings"
        )
    return ids[0]


def _token_ids(column: pa.ChunkedArray, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all rows one after the other, and how many each row has [rows]."""
    if isinstance(tokenizer, ArithmeticTokenizer) and len(tokenizer) == len(TOKEN_IDS):
        found = _character_ids(pa.concat_arrays(column.cast(pa.large_string()).chunks))
        if found is not None:
            return found
    ids = tokenizer(column.to_pylist(), add_special_tokens=False, return_attention_mask=False, verbose=False)
    count = np.fromiter(map(len, ids["input_ids"]), np.int64, len(column))
    return np.fromiter(chain.from_iterable(ids["input_ids"]), np.int64, count.sum()), count


# What the arithmetic tokenizer makes of each byte: the id of a token of one character, _SPACE for none, _OTHER if it
# takes more than the byte to tell.
_SPACE, _OTHER = 254, 255
_BYTE_IDS = np.full(256, _OTHER, np.uint8)
_BYTE_IDS[ord(" ")] = _SPACE
for _token, _index in TOKEN_IDS.items():
    if len(_token) == 1:
        _BYTE_IDS[ord(_token)] = _index


def _character_ids(texts: pa.Array) -> tuple[np.ndarray, np.ndarray] | None:
    """As `_token_ids` for the arithmetic tokenizer, a hundred times as fast; None unless bytes alone decide."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    ids = _BYTE_IDS[data]
    # "+1" may be a bit, one token.
    if (ids == _OTHER).any() or ((data[:-1] == ord("+")) & (data[1:] == ord("1"))).any():
        return None
    kept = ids != _SPACE
    before = np.concatenate([[0], np.cumsum(kept)])
    return ids[kept], np.diff(before[ends - ends[0]])


def _place(tokens: np.ndarray, counts: np.ndarray, parts: Sequence[np.ndarray], ends: Sequence[int]) -> None:
    """Write the `parts`, each the ids of all rows one after the other, and the single token that ends each part.

    Args:
        tokens: padded rows to fill, [R, L].
        counts: ids of each part in each row, [parts, R].
    """
    row = np.arange(len(tokens))
    start = np.zeros(len(tokens), np.int64)
    for count, ids, end in zip(counts, parts, ends, strict=True):
        before = np.cumsum(count) - count
        tokens[np.repeat(row, count), np.arange(len(ids)) + np.repeat(start - before, count)] = ids
        tokens[row, start + count] = end
        start = start + count + 1


class TextTask:
    """Problems from files, one for each split.

    Args:
        train_file, validation_file, test_file: `.txt` in the format of `parse_text`, `.jsonl` or `.parquet`.
        tokenizer: as for `tokenize_rows`.
        name: for logs and cards; by default the stem of the training file.

    Raises:
        FileNotFoundError, ValueError: as `load_rows`; all files are read at once.
    """

    def __init__(
        self,
        train_file: str | Path,
        validation_file: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        test_file: str | Path | None = None,
        name: str | None = None,
    ):
        files = {"train": train_file, "validation": validation_file, "test": test_file}
        rows = {split: load_rows(file) for split, file in files.items() if file is not None}
        self._set_up(name or Path(train_file).stem, rows, tokenizer)

    def _set_up(self, name: str, rows: dict[str, pa.Table], tokenizer: PreTrainedTokenizerBase) -> None:
        empty = [split for split, table in rows.items() if not len(table)]
        if empty:
            raise ValueError(f"{name}: split {empty[0]!r} has no rows")
        self.name = name
        self.sizes: list[list[int]] = []
        self.tokenizer = tokenizer
        self.rows = rows

    @classmethod
    def from_dataset(
        cls, source, tokenizer: PreTrainedTokenizerBase, config: str | None = None, name: str | None = None
    ) -> TextTask:
        """The splits `train`, `validation` and, if there, `test` of a dataset with the columns of `load_rows`.

        Args:
            source: a `datasets.DatasetDict` or other mapping of splits to what `load_rows` takes, or the folder or Hub
                name of a dataset.
            config: which configuration to load, e.g. `4x4`.

        Raises:
            ValueError: a split is missing, or as `load_rows`.
        """
        if isinstance(source, Mapping):
            splits, label = source, "dataset"
        else:
            from datasets import load_dataset

            splits, label = load_dataset(str(source), config), f"{Path(source).name}{f'-{config}' if config else ''}"
        missing = [split for split in ("train", "validation") if split not in splits]
        if missing:
            raise ValueError(f"{label}: no split {missing[0]!r} among {sorted(splits)}")
        rows = {split: load_rows(splits[split]) for split in ("train", "validation", "test") if split in splits}
        task = cls.__new__(cls)
        task._set_up(name or label, rows, tokenizer)
        return task

    @property
    def example_lines(self) -> list[str]:
        return [
            f"{row['question']}||{row['cot']} {ANSWER} {row['answer']}" for row in self.rows["train"][:3].to_pylist()
        ]

    def splits(self) -> dict[str, TokenizedProblems]:
        return {split: tokenize_rows(table, self.tokenizer) for split, table in self.rows.items()}
