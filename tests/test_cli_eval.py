"""`hf-icot eval` on a checkpoint that this file trains for a few seconds."""

import json

import pytest
import torch

from hf_icot import ArithmeticTokenizer, CurriculumArguments, ICoTConfig, ICoTForCausalLM
from hf_icot.cli import main
from hf_icot.curriculum import hide_thinking_tokens
from hf_icot.tasks.multiplication import MultiplicationTask, encode, format_lines
from hf_icot.tasks.operands import Operands


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model that knows part of 1x1 by heart, and its problems: half of them trained on."""
    folder = tmp_path_factory.mktemp("model")
    (a, b) = MultiplicationTask((1, 1), train_size=98, valid_size=1, test_size=1).operands["train"][0]
    problems = encode(a, b)
    torch.manual_seed(0)
    model = ICoTForCausalLM(ICoTConfig(n_embd=64, n_positions=10, operand_digits=[[1, 1]], hidden_tokens=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    known = problems.select(slice(0, 49))
    lengths = known.question_length, known.thinking_length, known.answer_length
    for _ in range(150):
        batch = hide_thinking_tokens(known.tokens, *lengths, torch.full((49,), 2), 0, keep_position=False)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    ArithmeticTokenizer().save_pretrained(folder)
    text = folder / "problems.txt"
    text.write_bytes(format_lines(a, b))
    answers = model.multiply([(int(x[0]), int(y[0])) for x, y in zip(a, b, strict=True)])
    right = sum(int(x[0]) * int(y[0]) == z for x, y, z in zip(a, b, answers, strict=True))
    assert 49 <= right < 98
    return folder, text, right


def run(capsys, *argv):
    status = main(["eval", *map(str, argv)])
    return status, capsys.readouterr()


def test_json_agrees_with_multiply(checkpoint, capsys):
    folder, text, right = checkpoint
    status, printed = run(capsys, folder, "--data", text, "--json")
    result = json.loads(printed.out)
    assert status == 0 and result["problems"] == 98 and result["exact_match"] == pytest.approx(right / 98)
    assert len(result["digit_accuracy"]) == 2 and result["problems_per_second"] > 0 and result["hidden_tokens"] == 2
    assert min(result["digit_accuracy"]) >= result["exact_match"]


def test_table_and_batches(checkpoint, capsys):
    folder, text, _ = checkpoint
    status, printed = run(capsys, folder, "--data", text, "--limit", 49, "--batch_size", 10)
    assert status == 0
    assert "exact match         1.0000" in printed.out and "c_0 1.0000  c_1 1.0000" in printed.out


def test_datasets_and_ragged_problems(checkpoint, capsys, tmp_path):
    folder, text, right = checkpoint
    rows = [line.replace("||", " #### ").split(" #### ") for line in text.read_text().splitlines()]
    path = tmp_path / "rows.jsonl"
    with open(path, "w") as file:
        for question, cot, answer in rows:
            file.write(json.dumps({"question": question, "cot": cot, "answer": answer}) + "\n")
    result = json.loads(run(capsys, folder, "--data", path, "--json")[1].out)
    assert result["exact_match"] == pytest.approx(right / 98)
    # The chain that remains is written by the model, and other chains make other groups.
    ragged = tmp_path / "ragged.txt"
    ragged.write_text("3 * 4||2 #### 2 1\n3 * 4||2 1 #### 2 1\n3 * 4||#### 2 1\n")
    status, printed = run(capsys, folder, "--data", ragged, "--json")
    assert status == 0 and json.loads(printed.out)["problems"] == 3


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--data", "no/such/file.txt"], "no/such/file.txt"),
        (["--data", "{text}", "--limit", "0"], "--limit must be 1 or more, not 0"),
        (["--data", "{text}", "--batch_size", "-1"], "--batch_size must be 1 or more, not -1"),
        (["--data", "{text}", "--hidden_tokens", "-2"], "--hidden_tokens must be 0 or more, not -2"),
        (["--data", "{text}", "--hidden_tokens", "1"], "this checkpoint was saved for 2"),
        (["--data", "{long}"], "n_positions=10"),
    ],
)
def test_what_cannot_be_evaluated_is_named(checkpoint, capsys, tmp_path, argv, message):
    folder, text, _ = checkpoint
    import numpy as np

    digits = Operands(np.ones((1, 6), np.uint8), np.ones((1, 6), np.uint8))
    long = tmp_path / "long.txt"
    long.write_bytes(format_lines(*digits))
    status, printed = run(capsys, folder, *(a.format(text=text, long=long) for a in argv))
    assert status == 2 and message in printed.err and not printed.out


def test_a_missing_model_is_named(checkpoint, capsys):
    _, text, _ = checkpoint
    status, printed = run(capsys, "./no-such-model", "--data", text)
    assert status == 2 and "no-such-model" in printed.err


def test_the_trainers_classes_are_offered_at_the_top():
    import hf_icot

    assert hf_icot.CurriculumArguments is CurriculumArguments
    for name in hf_icot.__all__:
        assert getattr(hf_icot, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf_icot.nothing
