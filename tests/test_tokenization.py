"""What ArithmeticTokenizer reads, refuses, writes, saves and loads."""

import copy
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BatchEncoding, DataCollatorWithPadding, TokenizersBackend

from hf_icot import ICoTConfig
from hf_icot.tokenization_icot import DIGIT_OFFSET, TOKEN_IDS, VOCABULARY, ArithmeticTokenizer


ROW = "5 6 3 2 * 7 4 3 4 %%% 5 5 5 6 1 + 0 0 6 4 9 0 ( 5 5 1 1 1 1 ) #### 5 5"
SQUEEZED = "5632*7434%%%55561+006490(551111)####55"
BIT_ROW = "+1 -1 +1 +1 %%% -1 +1 #### -1"
PAD, EOS, UNK = 0, 1, 2
SPECIALS = VOCABULARY[:3]


@pytest.fixture
def tokenizer() -> ArithmeticTokenizer:
    return ArithmeticTokenizer()


# Shared by the property tests: hypothesis and function-scoped fixtures do not mix.
READER = ArithmeticTokenizer()


def ids_of(spaced: str) -> list[int]:
    return [TOKEN_IDS[token] for token in spaced.split(" ")]


def multiplication_row(a: int, b: int) -> str:
    """A row as a task writes it, built here from the product so that the reader is tested on real lines."""
    digits = [int(digit) for digit in str(b)[::-1]]
    width, total, thinking = len(str(a)) + 1, 0, []
    for j, digit in enumerate(digits):
        total += a * digit * 10**j
        thinking.append(str(a * digit * 10**j).zfill(width + j)[::-1])
        if 0 < j < len(digits) - 1:
            thinking[-1] += "(" + str(total).zfill(width + j)[::-1] + ")"
    squeezed = f"{str(a)[::-1]}*{str(b)[::-1]}%{'+'.join(thinking)}#{str(a * b)[::-1]}"
    return " ".join(squeezed).replace("%", "%%%").replace("#", "####")


# ---- vocabulary and reading ----


def test_vocabulary_is_fixed(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == len(VOCABULARY) == 21
    assert tokenizer.get_vocab() == TOKEN_IDS
    assert [TOKEN_IDS[str(digit)] for digit in range(10)] == list(range(DIGIT_OFFSET, DIGIT_OFFSET + 10))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (PAD, EOS, UNK)
    assert sorted(tokenizer.all_special_ids) == [PAD, EOS, UNK]
    assert tokenizer.bos_token is None
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    assert tokenizer.is_fast and isinstance(tokenizer, TokenizersBackend)


@pytest.mark.parametrize("spaced, squeezed", [(ROW, SQUEEZED), (BIT_ROW, BIT_ROW.replace(" ", ""))])
def test_reads_rows_with_or_without_spaces(tokenizer, spaced, squeezed):
    expected = ids_of(spaced)
    encoded = tokenizer(spaced)
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert encoded["input_ids"] == expected
    assert encoded["attention_mask"] == [1] * len(expected)
    assert tokenizer(squeezed)["input_ids"] == expected
    assert tokenizer("  " + spaced.replace(" ", " \t\n ") + "\n")["input_ids"] == expected
    assert tokenizer.encode(squeezed) == expected
    assert tokenizer.tokenize(squeezed) == spaced.split(" ")


def test_text_format_separator_is_read_as_thinking(tokenizer):
    for row in (ROW, BIT_ROW):
        text = row.replace(" %%% ", "||")
        encoded = tokenizer(text, return_offsets_mapping=True)
        assert encoded["input_ids"] == ids_of(row)
        start, end = encoded["offset_mapping"][encoded["input_ids"].index(TOKEN_IDS["%%%"])]
        assert text[start:end] == "||"
    # The pipeline's private mark, written in the text, is no way around the vocabulary.
    for text, character, index in [("5|6", "|", 1), ("\ue000%", "\ue000", 0), ("|%%", "|", 0), ("%%|", "%", 0)]:
        with pytest.raises(ValueError, match="cannot read") as error:
            tokenizer(text)
        assert f"{character!r} at index {index}:" in str(error.value)


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("+1-1+1", "+1 -1 +1"),
        ("+1 -1+1", "+1 -1 +1"),
        ("-1", "-1"),
        ("+1||-1+1####-1<eos>", "+1 %%% -1 +1 #### -1 <eos>"),
        ("5+1", "5 + 1"),
        ("5 + 1", "5 + 1"),
        ("(5)+1", "( 5 ) + 1"),
        ("+11", "+ 1 1"),
        ("+1+", "+ 1 +"),
        ("+1+2", "+ 1 + 2"),
        ("1+1", "1 + 1"),
        ("+ 1", "+ 1"),
        ("+1 1", "+1 1"),
        ("%%%+1", "%%% +1"),
    ],
)
def test_plus_one_is_a_bit_only_in_a_word_of_bits(tokenizer, tmp_path, text, tokens):
    assert tokenizer.tokenize(text) == tokens.split(" ")
    tokenizer.save_pretrained(tmp_path)
    assert ArithmeticTokenizer.from_pretrained(tmp_path).tokenize(text) == tokens.split(" ")
    assert tokenizer.decode(tokenizer.encode(text)) == tokens


def test_special_tokens_are_read_but_never_added(tokenizer):
    assert tokenizer.encode("5 6") == tokenizer.encode("5 6", add_special_tokens=False) == ids_of("5 6")
    assert tokenizer.encode("5<eos>6 <pad><unk>") == [8, EOS, 9, PAD, UNK]
    assert tokenizer.num_special_tokens_to_add() == tokenizer.num_special_tokens_to_add(pair=True) == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(VOCABULARY)))
def test_decoding_inverts_encoding(tokens):
    text, ids = " ".join(tokens), [TOKEN_IDS[token] for token in tokens]
    assert READER.encode(text) == ids
    assert READER.decode(ids) == text
    assert READER.convert_tokens_to_string(tokens) == text
    assert READER.decode(ids, skip_special_tokens=True) == " ".join(t for t in tokens if t not in SPECIALS)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**22), st.integers(0, 10**22))
def test_multiplication_rows_round_trip_in_every_spelling(a, b):
    row = multiplication_row(a, b)
    ids = ids_of(row)
    for text in (row, row.replace(" ", ""), row.replace(" %%% ", "||")):
        assert READER.encode(text) == ids
    assert READER.decode(ids) == row
    assert READER.decode_answers(ids) == [a * b]


def test_decoding_batches_and_tensors(tokenizer):
    batch = tokenizer([ROW, "5 6"], padding=True, return_tensors="pt")
    assert tokenizer.decode(batch["input_ids"], skip_special_tokens=True) == [ROW, "5 6"]
    assert tokenizer.batch_decode(batch["input_ids"].numpy(), skip_special_tokens=True) == [ROW, "5 6"]
    assert tokenizer.clean_up_tokenization_spaces is False


def test_offsets_point_into_the_text(tokenizer):
    for text, row in [(ROW, ROW), (SQUEEZED, ROW), ("+1-1 +1", "+1 -1 +1"), (" 5 <eos>+1", "5 <eos> +1")]:
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        assert [text[start:end] for start, end in offsets] == row.split(" ")
    encoded = tokenizer("5 6+1")
    assert [encoded.char_to_token(index) for index in range(5)] == [0, None, 1, 2, 3]


# ---- what cannot be read ----


RUST_SPACES = {chr(code) for code in range(0x3001) if chr(code).isspace()} - set("\x1c\x1d\x1e\x1f")
# "-1" would be a bit, so the digits that follow a bad character start at 2.
BAD = st.characters().filter(lambda character: character not in RUST_SPACES and character not in "0123456789*+()")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(VOCABULARY)), BAD, st.integers(2, 9))
def test_any_other_character_is_refused_by_name_and_place(tokens, bad, digit):
    prefix = " ".join([*tokens, ""])
    text = f"{prefix}{bad}{digit} 5"
    with pytest.raises(ValueError) as error:
        READER(text)
    assert f"cannot read {bad!r} at index {len(prefix)}:" in str(error.value)
    assert "on_unknown='unk'" in str(error.value)
    expected = [TOKEN_IDS[token] for token in tokens] + [UNK, DIGIT_OFFSET + digit, TOKEN_IDS["5"]]
    assert READER.encode(text, on_unknown="unk") == expected


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: t("5 6a"), "'a' at index 3:"),
        (lambda t: t.encode("5 6a"), "'a' at index 3:"),
        (lambda t: t.tokenize("5 6a"), "'a' at index 3:"),
        (lambda t: t.tokenize("5", pair="6é"), "'é' at index 1 of the second member of the pair:"),
        (lambda t: t(text_target="5 6a"), "'a' at index 3:"),
        (lambda t: t("5", text_target=["5", "6.5"]), "'.' at index 1 of text 1:"),
        (lambda t: t("5\x006"), r"'\x00' at index 1:"),
        (lambda t: t("5\ud8006"), r"'\ud800' at index 1:"),
        (lambda t: t("😀a"), "'😀' at index 0:"),
        (lambda t: t("e\u03015", padding="max_length", max_length=9), "'e' at index 0:"),
        (lambda t: t(["5", "6", "7 x"], padding=True, return_tensors="pt"), "'x' at index 2 of text 2:"),
        (lambda t: t(["5", "6"], ["7", "8 9?"]), "'?' at index 3 of the second member of text 1:"),
        (lambda t: t(["5", "6 -"], ["7", "8 9?"]), "'-' at index 2 of the first member of text 1:"),
        (lambda t: t([("5", "6"), ("7", "8q")]), "'q' at index 1 of the second member of text 1:"),
        (lambda t: t("5", "6="), "'=' at index 1 of the second member of the pair:"),
        (lambda t: t(["5", "6a"], is_split_into_words=True), "'a' at index 1 of word 1:"),
        (lambda t: t([["5"], ["6", "a"]], is_split_into_words=True), "'a' at index 0 of word 1 of text 1:"),
        (
            lambda t: t([["5"], ["6"]], [["7"], ["8", "9", "x"]], is_split_into_words=True),
            "'x' at index 0 of word 2 of the second member of text 1:",
        ),
        (
            lambda t: t([(["5"], ["6", "x"])], is_split_into_words=True),
            "'x' at index 0 of word 1 of the second member of text 0:",
        ),
        (
            lambda t: t([], ["x"], is_split_into_words=True),
            "'x' at index 0 of word 0 of the second member of the pair:",
        ),
        (lambda t: t("5 6 7 8 q", truncation=True, max_length=2), "'q' at index 8:"),
        (
            lambda t: t(
                ["5 6 7 8 9", "5 6 7 8 q", "5"], truncation=True, max_length=2, return_overflowing_tokens=True
            ),
            "'q' at index 8 of text 1:",
        ),
        (lambda t: t("<unk> x <unk>"), "'x' at index 6:"),
        (lambda t: t("<eos", split_special_tokens=False), "'<' at index 0:"),
        (lambda t: t("5-1"), "inside a bit"),
    ],
)
def test_unreadable_text_is_refused_on_every_way_in(tokenizer, call, message):
    with pytest.raises(ValueError, match="cannot read") as error:
        call(tokenizer)
    assert message in str(error.value)


def test_unknown_characters_as_tokens_when_asked(tokenizer, tmp_path):
    assert tokenizer.encode("5 ab", on_unknown="unk") == [8, UNK, UNK]
    assert tokenizer(["5a"], on_unknown="unk")["input_ids"] == [[8, UNK]]
    assert tokenizer.tokenize("5a", on_unknown="unk") == ["5", "<unk>"]
    assert tokenizer([["a"], ["5"]], is_split_into_words=True, on_unknown="unk")["input_ids"] == [[UNK], [8]]
    with pytest.raises(ValueError, match="cannot read 'a'"):
        tokenizer("5a")  # asking once does not change the tokenizer

    lenient = ArithmeticTokenizer(on_unknown="unk")
    assert lenient.encode("5a") == [8, UNK]
    with pytest.raises(ValueError, match="cannot read 'a'"):
        lenient("5a", on_unknown="raise")
    lenient.save_pretrained(tmp_path)
    assert ArithmeticTokenizer.from_pretrained(tmp_path).on_unknown == "unk"
    assert ArithmeticTokenizer.from_pretrained(tmp_path, on_unknown="raise").on_unknown == "raise"
    tokenizer.on_unknown = "unk"
    assert tokenizer.encode("5a") == [8, UNK]


def test_on_unknown_is_checked(tokenizer):
    with pytest.raises(ValueError, match="on_unknown='ignore'.*'raise', 'unk'"):
        ArithmeticTokenizer(on_unknown="ignore")
    with pytest.raises(ValueError, match="on_unknown='ignore'"):
        tokenizer("5", on_unknown="ignore")


def test_presplit_words_follow_the_bit_rule(tokenizer):
    words = ["+1", "+", "1", "5+1", "+1-1"]
    encoded = tokenizer(words, is_split_into_words=True)
    assert encoded.tokens() == ["+1", "+", "1", "5", "+", "1", "+1", "-1"]
    assert encoded.word_ids() == [0, 1, 2, 3, 3, 3, 4, 4]
    tokens = tokenizer.tokenize(ROW + " <eos> " + BIT_ROW)
    assert tokenizer(tokens, is_split_into_words=True).tokens() == tokens


# ---- batches ----


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(tokenizer, side):
    batch = tokenizer(["5 6 7", "8"], padding=True, padding_side=side, return_tensors="np")
    short = [PAD, PAD, 11] if side == "left" else [11, PAD, PAD]
    assert batch["input_ids"].tolist() == [[8, 9, 10], short]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [int(token != PAD) for token in short]]
    tokenizer.padding_side = side
    rows = [tokenizer("5 6 7"), tokenizer("8")]
    assert DataCollatorWithPadding(tokenizer)(rows)["input_ids"].tolist() == batch["input_ids"].tolist()


def test_truncation_and_pairs(tokenizer):
    assert tokenizer("5 6 7 8", truncation=True, max_length=3)["input_ids"] == [8, 9, 10]
    tokenizer.truncation_side = "left"
    assert tokenizer("5 6 7 8", truncation=True, max_length=3)["input_ids"] == [9, 10, 11]
    pair = tokenizer("5 6", "7")
    assert pair["input_ids"] == [8, 9, 10] and pair.sequence_ids() == [0, 0, 1]


# ---- problems and answers ----


def test_problems_become_prompts(tokenizer):
    batch = tokenizer.encode_problems([(2365, 4347)])
    assert isinstance(batch, BatchEncoding) and set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"] == [ids_of("5 6 3 2 * 7 4 3 4 %%% ####")]
    assert tokenizer.encode_problems([(2365, 4347)], chain=True)["input_ids"] == [ids_of("5 6 3 2 * 7 4 3 4 %%%")]


def test_ragged_problems_are_padded_on_the_left(tokenizer):
    batch = tokenizer.encode_problems([(123, 45), (6, 7)], return_tensors="pt")
    assert tokenizer.decode(batch["input_ids"]) == [
        "3 2 1 * 5 4 %%% ####",
        "<pad> <pad> <pad> 6 * 7 %%% ####",
    ]
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != PAD).long())
    ragged = tokenizer.encode_problems([(123, 45), (6, 7)], padding=False)
    assert [len(row) for row in ragged["input_ids"]] == [8, 5]
    wide = tokenizer.encode_problems([(6, 7)], padding="max_length", max_length=7, padding_side="right")
    assert wide["input_ids"][0][-2:] == [PAD, PAD]
    assert tokenizer.padding_side == "right"


def test_digits_pad_operands_with_zeros(tokenizer):
    batch = tokenizer.encode_problems([(12, 0), (3456, 789)], digits=(4, 3), return_tensors="pt")
    assert tokenizer.decode(batch["input_ids"]) == ["2 1 0 0 * 0 0 0 %%% ####", "6 5 4 3 * 9 8 7 %%% ####"]


def test_problems_from_arrays_and_integer_types(tokenizer):
    pairs = [(12, 345), (67, 8)]
    expected = tokenizer.encode_problems(pairs)["input_ids"]
    for problems in (
        np.array(pairs),
        np.array(pairs, dtype=np.uint16),
        np.array(pairs, dtype=object),
        torch.tensor(pairs),
        [(np.int8(12), np.uint64(345)), (torch.tensor(67), 8)],
        (list(pair) for pair in pairs),
    ):
        assert tokenizer.encode_problems(problems)["input_ids"] == expected
    assert tokenizer.encode_problems(pairs, digits=np.array([2, 3])).keys() == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    "problems, digits, error, message",
    [
        ([], None, ValueError, "no problems"),
        ((12, 34), None, ValueError, r"problem 0 is 12, not a pair.*\[\(12, 34\)\]"),
        ([(1, 2), (1, 2, 3)], None, ValueError, r"problem 1 is \(1, 2, 3\), not a pair"),
        (["12"], None, ValueError, "problem 0 is '12', not a pair"),
        ([(1, 2), (3, -4)], None, ValueError, "problem 1 holds -4.*must not be negative"),
        ([(1, 2), (3, True)], None, TypeError, r"problem 1 holds True \(bool\)"),
        ([(np.bool_(True), 2)], None, TypeError, "bool"),
        (torch.tensor([[True, False]]), None, TypeError, "bool"),
        ([(1.0, 2)], None, TypeError, r"problem 0 holds 1.0 \(float\)"),
        (np.array([[1.0, 2.0]]), None, TypeError, "float"),
        ([("1", 2)], None, TypeError, r"problem 0 holds '1' \(str\)"),
        ([(1, None)], None, TypeError, "NoneType"),
        ([(123, 4567)], (4, 3), ValueError, "problem 0 holds 4567, which has more than 3 digits"),
        ([(1, 2)], 4, ValueError, r"digits=4 is not a pair"),
        ([(1, 2)], (4,), ValueError, r"digits=\(4,\) is not a pair"),
        ([(1, 2)], (0, 4), ValueError, "positive integers"),
        ([(1, 2)], (True, 4), ValueError, "positive integers"),
        ([(1, 2)], (4.0, 4), ValueError, "positive integers"),
    ],
)
def test_bad_problems_are_refused(tokenizer, problems, digits, error, message):
    with pytest.raises(error, match=message):
        tokenizer.encode_problems(problems, digits=digits)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**40), st.integers(0, 10**40)), min_size=1, max_size=5))
def test_problems_and_answers_of_any_size(problems):
    prompts = READER.encode_problems(problems)
    answers = READER([f"{str(a * b)[::-1]}<eos>" for a, b in problems], padding=True)
    rows = [prompt + answer for prompt, answer in zip(prompts["input_ids"], answers["input_ids"], strict=True)]
    assert READER.decode_answers(rows) == [a * b for a, b in problems]
    for (a, b), text in zip(problems, READER.decode(prompts["input_ids"], skip_special_tokens=True), strict=True):
        left, right = text.removesuffix(" %%% ####").replace(" ", "").split("*")
        assert (int(left[::-1]), int(right[::-1])) == (a, b)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("3 2 * 1 %%% #### 3 2 0 <eos>", 23),
        ("3 2 * 1 %%% 3 2 + 4 #### 7 <eos> <pad> 5", 7),
        ("<pad> <pad> 3 * 1 %%% #### 3 <pad> 4", 3),
        ("3 2 1", 123),
        ("3 2 1 <eos> 9", 123),
        ("#### 0 0", 0),
        ("5 #### 6", 6),
        ("#### 1 2 #### 3 <eos>", None),
        ("#### 1 + 2", None),
        ("#### <unk> 2", None),
        ("#### +1", None),
        ("####", None),
        ("#### <eos> 5", None),
        ("<eos> 5", None),
        ("3 * 1 %%% 5", None),
        ("", None),
    ],
)
def test_answers_are_read_from_ids(tokenizer, text, answer):
    ids = tokenizer.encode(text)
    assert tokenizer.decode_answers([ids]) == [answer]
    if text:
        assert tokenizer.decode_answers(ids) == [answer]
        assert tokenizer.decode_answer(ids) == answer
        assert tokenizer.decode_answers(torch.tensor(ids)) == [answer]


def test_answers_of_batches(tokenizer):
    texts = ["3 * 1 %%% #### 3 <eos>", "3 2 * 1 2 %%% #### 3 8 4 <eos>", "3 * 1 %%% #### <eos>"]
    expected = [3, 483, None]
    ragged = tokenizer(texts)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids = batch["input_ids"]
    for form in (ragged, ragged["input_ids"], batch, dict(batch), ids, ids.numpy(), ids.to(torch.uint8), list(ids)):
        assert tokenizer.decode_answers(form) == expected
    assert tokenizer.decode_answers(tokenizer(texts[0])) == [3]
    assert tokenizer.decode_answers([torch.tensor(token) for token in ragged["input_ids"][0]]) == [3]
    assert tokenizer.decode_answers([]) == []
    # Ignored labels and ids of tokens added later are no digits, wherever they stand.
    assert tokenizer.decode_answers([[-100, -100, 18, 5, 1], [18, 5, 300], [18, -100]]) == [2, None, None]
    assert tokenizer.decode_answer(ids[:1]) == 3
    with pytest.raises(ValueError, match="got 3"):
        tokenizer.decode_answer(ids)
    with pytest.raises(TypeError, match="token ids.*'5 6'"):
        tokenizer.decode_answers(["5 6"])


# ---- saving, loading, copying ----


def behaviour(tokenizer) -> list:
    texts = [ROW, SQUEEZED, BIT_ROW.replace(" ", ""), "5||6 +1-1", "5+1", "5 <eos>"]
    encoded = tokenizer(texts, return_offsets_mapping=True, padding=True)
    return [encoded["input_ids"], encoded["attention_mask"], encoded["offset_mapping"], len(tokenizer)]


def test_save_and_load_keeps_everything(tmp_path):
    tokenizer = ArithmeticTokenizer(on_unknown="unk", padding_side="left", model_max_length=64)
    tokenizer.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "ArithmeticTokenizer" and saved["on_unknown"] == "unk"
    loaded = ArithmeticTokenizer.from_pretrained(tmp_path)
    assert (loaded.on_unknown, loaded.padding_side, loaded.model_max_length) == ("unk", "left", 64)
    assert (loaded.pad_token, loaded.eos_token, loaded.unk_token, loaded.bos_token) == (*SPECIALS, None)
    assert behaviour(loaded) == behaviour(tokenizer)
    assert loaded.decode(loaded.encode(ROW)) == ROW


def test_what_was_read_last_is_not_saved(tokenizer, tmp_path):
    # Leaves left padding and truncation in the Rust object, until the next call.
    tokenizer.encode_problems([(123, 45), (6, 7)], truncation=True, max_length=20)
    assert tokenizer.backend_tokenizer.padding and tokenizer.backend_tokenizer.truncation
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["padding"] is None and saved["truncation"] is None
    assert ArithmeticTokenizer.from_pretrained(tmp_path).padding_side == "right"
    tokenizer.padding_side, tokenizer.on_unknown = "left", "unk"  # set after construction: saved
    tokenizer.save_pretrained(tmp_path)
    loaded = ArithmeticTokenizer.from_pretrained(tmp_path)
    assert (loaded.padding_side, loaded.on_unknown) == ("left", "unk")


def test_wrong_folders_are_refused(tmp_path):
    with pytest.raises(OSError, match="no tokenizer.json"):
        ArithmeticTokenizer.from_pretrained(tmp_path)
    other = json.loads(ArithmeticTokenizer().backend_tokenizer.to_str())
    vocab = other["model"]["vocab"]
    vocab["5"], vocab["6"] = vocab["6"], vocab["5"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="token 8 is '6' where an arithmetic tokenizer has '5'"):
        ArithmeticTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("with_config", [False, True])
def test_auto_tokenizer_finds_the_class(tokenizer, tmp_path, with_config):
    tokenizer.save_pretrained(tmp_path)
    if with_config:
        ICoTConfig().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, on_unknown="unk")
    assert type(loaded) is ArithmeticTokenizer and loaded.on_unknown == "unk"
    assert behaviour(loaded) == behaviour(tokenizer)


def test_generic_fast_tokenizer_reads_the_same_ids(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    generic = TokenizersBackend.from_pretrained(tmp_path)
    assert behaviour(generic) == behaviour(tokenizer)
    assert generic.decode(generic.encode(ROW)) == ROW and generic.pad_token_id == PAD


REMOTE = """
import sys
sys.modules["hf_icot"] = None  # importing the package would fail
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(tokenizer).__name__ == "ArithmeticTokenizer", type(tokenizer)
assert type(tokenizer).__module__.startswith("transformers_modules."), type(tokenizer).__module__
assert (tokenizer.on_unknown, tokenizer.padding_side, len(tokenizer)) == ("unk", "left", 21)
assert tokenizer.tokenize("5+1||+1-1a") == ["5", "+", "1", "%%%", "+", "1", "<unk>", "1", "<unk>"]
assert tokenizer.decode_answers(tokenizer.encode_problems([(12, 34)])) == [None]
try:
    tokenizer("a", on_unknown="raise")
    raise SystemExit("not refused")
except ValueError:
    pass
tokenizer.save_pretrained(sys.argv[2])
"""


@pytest.mark.parametrize("with_config", [True, False])
def test_pushed_folder_loads_where_the_package_is_missing(tmp_path, with_config):
    folder, again = tmp_path / "pushed", tmp_path / "again"
    if with_config:
        ICoTConfig().save_pretrained(folder)
    try:
        ArithmeticTokenizer.register_for_auto_class()
        ArithmeticTokenizer(on_unknown="unk", padding_side="left").save_pretrained(folder)
    finally:
        ArithmeticTokenizer._auto_class = None
    assert (folder / "tokenization_icot.py").exists()
    assert type(AutoTokenizer.from_pretrained(folder)) is ArithmeticTokenizer  # with the package: no remote code
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", REMOTE, str(folder), str(again)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"tokenization_icot.py", "tokenizer.json", "tokenizer_config.json"} <= {f.name for f in again.iterdir()}


def test_pickle_and_deepcopy(tokenizer):
    tokenizer.on_unknown, tokenizer.padding_side = "unk", "left"
    for twin in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert type(twin) is ArithmeticTokenizer and twin is not tokenizer
        assert (twin.on_unknown, twin.padding_side) == ("unk", "left")
        assert behaviour(twin) == behaviour(tokenizer)
        twin.add_tokens(["x"])
    assert len(tokenizer) == 21


def test_added_tokens_work_and_survive(tokenizer, tmp_path):
    assert tokenizer.add_tokens(["="]) == 1
    assert tokenizer.add_special_tokens({"bos_token": "<bos>", "extra_special_tokens": ["<step>"]}) == 2
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, ArithmeticTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert len(each) == 24 and each.bos_token_id == each.convert_tokens_to_ids("<bos>") >= 21
        text = "<bos> 5 * 6 = 0 3 <step> +1 <eos>"
        assert each.decode(each.encode(text.replace("5 * 6 =", "5*6="))) == text
        assert each.decode(each.encode(text), skip_special_tokens=True) == "5 * 6 = 0 3 +1"
        with pytest.raises(ValueError, match="'x' at index 2"):
            each("= x")
