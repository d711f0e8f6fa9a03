"""Fast tokenizer for digit-wise arithmetic: 21 tokens, digits least significant first, thinking after `%%%`.

Needs only transformers and tokenizers, so the file can travel to the Hub beside a checkpoint.
"""

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import BatchEncoding, TokenizersBackend


VOCABULARY: tuple[str, ...] = (
    *("<pad>", "<eos>", "<unk>"),
    *"0123456789",
    *("*", "+", "(", ")", "%%%", "####", "+1", "-1"),
)
TOKEN_IDS: dict[str, int] = {token: index for index, token in enumerate(VOCABULARY)}
DIGIT_OFFSET: int = TOKEN_IDS["0"]

THINK_TOKEN, ANSWER_TOKEN = "%%%", "####"
_ON_UNKNOWN = ("raise", "unk")
_SURROGATES = re.compile("[\ud800-\udfff]")
# One byte per token id for `decode_answers`: digits stay digits, "#" opens an answer, "." ends it, "x" spoils it.
_ANSWER_BYTES = bytes(
    {"<pad>": ".", "<eos>": ".", ANSWER_TOKEN: "#"}.get(token, token if token.isdigit() else "x").encode()[0]
    for token in VOCABULARY
).ljust(256, b"x")


def _build_backend() -> Tokenizer:
    """The WordLevel pipeline in Rust; everything in it is saved in tokenizer.json."""
    backend = Tokenizer(models.WordLevel(dict(TOKEN_IDS), unk_token="<unk>"))
    # `||` becomes `%%%` bar by bar: replaced in one go, the token's offsets would cover the second bar only. The mark
    # for "first bar of two" is a private-use character, so its own occurrences in the text are moved aside first.
    mark, aside = "\ue000", "\ue001"
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(mark, aside),
            normalizers.Replace(Regex(r"\|(?=\|)"), mark),
            normalizers.Replace(Regex(rf"(?<={mark})\|"), "%"),
            normalizers.Replace(mark, "%%"),
        ]
    )
    # A word made of bits alone is kept whole while every other word falls into single characters, so the last split
    # can only meet "+1" and "-1" where they are bits. \A and \z see one word, not the text.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex("%%%|####"), "isolated"),
            pre_tokenizers.Split(Regex(r"\A(?:[+-]1)+\z|%%%|####|."), "isolated"),
            pre_tokenizers.Split(Regex(r"[+-]1"), "isolated"),
        ]
    )
    return backend


class ArithmeticTokenizer(TokenizersBackend):
    """
    Tokenizer for rows `question %%% cot #### answer <eos>` of multi-digit multiplication (2510.00184, in the data
    format of 2405.14838) and k-parity (2605.28600).

    How text is read:

    * One token a digit and sign, with or without spaces between them: `5 6 * 7` and `56*7` are the same tokens. The
      text format's `||` is read as `%%%`.
    * Bits: a word consisting only of repeated `+1` and `-1` is read as bits (`+1 -1 +1` and `+1-1+1`). Words end at
      whitespace, `%%%`, `####`, `||` and special tokens. In every other word `+` and `1` are two tokens, so `5+1`,
      `5 + 1` and `)+1` are sums. A minus outside a bit is no token.
    * `<eos>`, `<pad>` and `<unk>` are read where they are written. None is added, so a prompt can be continued.
    * Anything else raises `ValueError` with the character and its place, or is read as one `<unk>` a character.

    Decoding joins tokens with single spaces, so `decode(encode(text)) == text` for text written that way.

    Args:
        on_unknown: `"raise"` or `"unk"`, what to do with a character outside the vocabulary. Saved with the
            tokenizer; every call that reads text (`tokenizer(...)`, `encode`, `tokenize`) takes it as a keyword too.
        tokenizer_file: a tokenizer.json to load; the fixed vocabulary is built if there is none.
        tokenizer_object: the same as a `tokenizers.Tokenizer`.
        padding_side: `"right"` (for training) or `"left"` (for generation).

    Raises:
        ValueError: `on_unknown` is neither value, or the file does not hold `VOCABULARY` as its first ids.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self,
        on_unknown: str = "raise",
        tokenizer_file: str | None = None,
        tokenizer_object: Tokenizer | None = None,
        pad_token: str = "<pad>",
        eos_token: str = "<eos>",
        unk_token: str = "<unk>",
        padding_side: str = "right",
        **kwargs,
    ):
        self.on_unknown = _checked_on_unknown(on_unknown)
        if tokenizer_file is None and tokenizer_object is None:
            tokenizer_object = _build_backend()
        super().__init__(
            # Named arguments reach tokenizer_config.json only through the base class.
            on_unknown=on_unknown,
            tokenizer_file=tokenizer_file,
            tokenizer_object=tokenizer_object,
            pad_token=pad_token,
            eos_token=eos_token,
            unk_token=unk_token,
            padding_side=padding_side,
            **kwargs,
        )
        for index, token in enumerate(VOCABULARY):
            if (found := self._tokenizer.id_to_token(index)) != token:
                raise ValueError(
                    f"token {index} is {found!r} where an arithmetic tokenizer has {token!r}; load it with the "
                    "class it was saved with, or AutoTokenizer."
                )

    @classmethod
    def convert_to_native_format(cls, **kwargs) -> dict[str, Any]:
        """Leave tokenizer.json to `__init__`: by default only its vocabulary would survive, not its pipeline."""
        if kwargs.get("tokenizer_file") is None and kwargs.get("tokenizer_object") is None:
            # Part of from_pretrained only: a wrong folder must not pass for the default tokenizer.
            raise OSError(
                f"{kwargs.get('name_or_path')!r} holds no tokenizer.json; write one with save_pretrained, or call "
                f"{cls.__name__}() for the fixed vocabulary."
            )
        return kwargs

    def _save_pretrained(self, *args, **kwargs) -> tuple[str, ...]:
        # The backend keeps the padding of the last call; a saved tokenizer must not depend on what was read last.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        return super()._save_pretrained(*args, **kwargs)

    def _encode_plus(self, text, text_pair=None, *, on_unknown: str | None = None, **kwargs) -> BatchEncoding:
        # __call__, encode and tokenize all end here, for single texts, batches, pairs, targets and pre-split words.
        on_unknown = self.on_unknown if on_unknown is None else on_unknown
        _checked_on_unknown(on_unknown)
        try:
            encoded = super()._encode_plus(text, text_pair, **kwargs)
        except TypeError:
            # Rust strings hold no lone surrogates; a stand-in of one character each keeps the offsets right.
            encoded = super()._encode_plus(_without_surrogates(text), _without_surrogates(text_pair), **kwargs)
        if on_unknown == "raise":
            self._raise_if_unknown(encoded, text, text_pair, kwargs.get("is_split_into_words", False))
        return encoded

    def _raise_if_unknown(self, encoded: BatchEncoding, text, text_pair, is_split_into_words: bool) -> None:
        unknown = TOKEN_IDS["<unk>"]
        for index, encoding in enumerate(encoded.encodings or ()):
            # What truncation cut off is looked at too: whether a text is valid must not depend on max_length.
            for part in (encoding, *encoding.overflowing):
                ids = part.ids
                if unknown not in ids:
                    continue
                rows = encoded.get("overflow_to_sample_mapping")
                row = index if rows is None else int(rows[index])
                for token, sequence, word, (start, end) in zip(
                    ids, part.sequence_ids, part.word_ids, part.offsets, strict=True
                ):
                    if token != unknown or sequence is None:  # no sequence: padding
                        continue
                    source, place = _source(text, text_pair, row, sequence, is_split_into_words)
                    if is_split_into_words:
                        source, place = source[word], f" of word {word}{place}"
                    if source[start:end] != "<unk>":  # written out it is a token like any other
                        raise ValueError(_unknown_message(source, start, place))

    def encode_problems(
        self,
        problems: Iterable[tuple[int, int]],
        digits: tuple[int, int] | None = None,
        chain: bool = False,
        padding: bool | str = True,
        return_tensors: str | None = None,
        **kwargs,
    ) -> BatchEncoding:
        """
        Prompts for products of ordinary integers, ready for `model.generate`.

        Args:
            problems: N pairs `(a, b)` of non-negative integers of any size; an integer array or tensor [N, 2] will do.
            digits: `(n, m)` writes `a` with n and `b` with m digits, zeros in front (a model trained on n x m digits
                needs this for shorter numbers); None writes each number as long as it is.
            chain: False ends the prompt with `%%% ####`, all thinking hidden, and the model goes on with the answer;
                True ends it with `%%%`, and the model goes on with its chain of thought.
            padding, return_tensors: as in `__call__`. Padding goes to the left, where generation wants it.
            **kwargs: further arguments of `__call__`.

        Returns:
            `input_ids` and `attention_mask`, [N, longest prompt], each row
            `a_0 … a_{n-1} * b_0 … b_{m-1} %%% [####]` with the least significant digit first.

        Raises:
            ValueError: no problems, a problem that is not a pair, a negative number, or one longer than `digits`.
            TypeError: a number that is not an integer.
        """
        widths = _checked_digits(digits)
        ending = THINK_TOKEN if chain else THINK_TOKEN + ANSWER_TOKEN
        problems = problems.tolist() if hasattr(problems, "tolist") else problems
        texts = []
        for row, problem in enumerate(problems):
            if not hasattr(problem, "__len__") or isinstance(problem, (str, bytes)) or len(problem) != 2:
                raise ValueError(f"problem {row} is {problem!r}, not a pair; pass a list of pairs, as in [(12, 34)].")
            left, right = (_reversed_digits(number, width, row) for number, width in zip(problem, widths, strict=True))
            texts.append(f"{left}*{right}{ending}")
        if not texts:
            raise ValueError("there are no problems to encode; pass at least one pair, as in [(12, 34)].")
        return self(texts, padding=padding, return_tensors=return_tensors, **{"padding_side": "left", **kwargs})

    def decode_answers(self, ids: Any) -> list[int | None]:
        """
        The integers that rows of token ids end in.

        An answer stands between the first `####` (the start of the row where there is none, as in generated tokens
        without their prompt) and the first `<eos>` or `<pad>` after it, least significant digit first.

        Args:
            ids: [N, L] or [L] as nested lists, an array or a tensor, or an encoding with `input_ids`; rows of a list
                may differ in length.

        Returns:
            N integers (one for a single row); None where the answer is empty or not purely digits.
        """
        if hasattr(ids, "keys"):
            ids = ids["input_ids"]
        rows = _to_list(ids)
        if rows and not hasattr(_to_list(rows[0]), "__len__"):
            rows = [[_to_list(token) for token in rows]]
        return [_answer(_to_list(row)) for row in rows]

    def decode_answer(self, ids: Any) -> int | None:
        """The integer at the end of one row of token ids [L] (or [1, L]), read as by `decode_answers`.

        Raises:
            ValueError: `ids` holds more than one row, or none.
        """
        answers = self.decode_answers(ids)
        if len(answers) != 1:
            raise ValueError(f"decode_answer reads one row, got {len(answers)}; use decode_answers for a batch.")
        return answers[0]


def _checked_on_unknown(value: str) -> str:
    if value not in _ON_UNKNOWN:
        raise ValueError(f"on_unknown={value!r} is not known; choose one of {', '.join(map(repr, _ON_UNKNOWN))}.")
    return value


def _without_surrogates(text):
    if isinstance(text, str):
        return _SURROGATES.sub("\ufffd", text)
    return type(text)(map(_without_surrogates, text)) if isinstance(text, (list, tuple)) else text


def _source(text, text_pair, row: int, sequence: int, is_split_into_words: bool) -> tuple[Any, str]:
    """The text (or its list of words) that sequence 0 or 1 of row `row` was read from, and words for where that is."""
    single = (text[0] if len(text) > 0 else "") if is_split_into_words else text
    place = ""
    if not isinstance(single, str):  # a batch
        text, text_pair = text[row], None if text_pair is None else text_pair[row]
        place = f" of text {row}"
    if text_pair is None and not isinstance(text[0] if is_split_into_words else text, str):
        text, text_pair = text  # the rows of the batch are pairs themselves
    if text_pair is None:
        return text, place
    return (text, text_pair)[sequence], f" of the {('first', 'second')[sequence]} member" + (place or " of the pair")


def _unknown_message(source: str, index: int, place: str) -> str:
    character = source[index]
    hint = " A minus is read only inside a bit, in a word of +1 and -1 alone." if character == "-" else ""
    return (
        f"cannot read {character!r} at index {index}{place}: the tokens are digits, * + ( ) %%% #### +1 -1 and "
        f"<pad> <eos> <unk>.{hint} Remove the character, or pass on_unknown='unk' to read it as <unk>."
    )


def _checked_digits(digits: Sequence[int] | None) -> tuple[int | None, int | None]:
    if digits is None:
        return None, None
    widths = _to_list(digits)
    if not isinstance(widths, (list, tuple)) or len(widths) != 2:
        raise ValueError(f"digits={digits!r} is not a pair; pass (n, m), the digits of the left and right number.")
    for width in widths:
        if isinstance(width, bool) or not hasattr(width, "__index__") or operator.index(width) < 1:
            raise ValueError(f"digits={digits!r} must hold two positive integers, as in (4, 4).")
    return operator.index(widths[0]), operator.index(widths[1])


def _reversed_digits(number: Any, width: int | None, row: int) -> str:
    """Decimal digits, least significant first, with zeros up to `width`."""
    number = _to_list(number)
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"problem {row} holds {number!r} ({type(number).__name__}); numbers must be integers.")
    number = operator.index(number)
    if number < 0:
        raise ValueError(
            f"problem {row} holds {number}; there is no token for a sign, so numbers must not be negative."
        )
    written = str(number)[::-1]
    if width is None:
        return written
    if len(written) > width:
        raise ValueError(f"problem {row} holds {number}, which has more than {width} digits; make digits larger.")
    return written.ljust(width, "0")


def _to_list(values: Any) -> Any:
    """Tensors and arrays (their scalars too) as plain Python values, anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _answer(row: Sequence[int]) -> int | None:
    try:
        symbols = bytes(row)
    except ValueError:  # an id past 255, or a negative one such as the ignored label -100: not a digit either way
        symbols = bytes(token if 0 <= token < 256 else 255 for token in row)
    except TypeError:
        raise TypeError(f"answers are read from token ids, got a row {row!r}.") from None
    symbols = symbols.translate(_ANSWER_BYTES)
    before, found, after = symbols.partition(b"#")
    answer = (after if found else before).partition(b".")[0]
    return int(answer[::-1]) if answer.isdigit() else None
