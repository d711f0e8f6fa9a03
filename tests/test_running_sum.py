"""The running-sum head in training: labels where they belong, both losses reported, errors in units of ĉ_k."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import set_seed

from hf_icot import ICoTConfig, ICoTForCausalLM
from hf_icot.curriculum import CurriculumArguments, align_with_answer, hide_thinking_tokens
from hf_icot.evaluation import evaluate_teacher_forced
from hf_icot.tasks.multiplication import MultiplicationTask, running_sums
from hf_icot.tokenization_icot import DIGIT_OFFSET
from hf_icot.trainer import ICoTTrainer, ICoTTrainingArguments


@pytest.fixture(scope="module")
def splits():
    task = MultiplicationTask([(2, 2), (2, 1)], train_size=700, valid_size=60, test_size=60, seed=0)
    return task.splits(running_sums=True)


def make(folder, splits, curriculum, head="joint", **changes):
    set_seed(0)
    config = ICoTConfig(n_embd=32, n_positions=splits["train"].max_length, running_sum_head=head)
    values = {"max_steps": 40, "per_device_train_batch_size": 32, "warmup_steps": 2, "logging_steps": 10} | changes
    args = ICoTTrainingArguments(output_dir=str(folder), disable_tqdm=True, **values)
    return ICoTTrainer(ICoTForCausalLM(config), args, curriculum, splits["train"], splits["validation"])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.sampled_from(["left", "right"]), st.sampled_from(["drop", "pad"]), st.integers(0, 999))
def test_targets_stand_where_the_digits_are(hidden, side, hidden_as, seed):
    """At each place c_k of a row with anything hidden stands the ĉ_k whose last digit is c_k."""
    problems = MultiplicationTask([(2, 2), (2, 1)], train_size=3, valid_size=1, test_size=1, seed=seed).splits(True)[
        "train"
    ]
    removed = torch.minimum(torch.full((len(problems),), hidden), problems.thinking_length.long())
    lengths = problems.question_length, problems.thinking_length
    row = hide_thinking_tokens(problems.tokens, *lengths, problems.answer_length, removed, 0, side, hidden_as)
    values = problems.running_sums.float()
    values[values < 0] = float("nan")
    dropped = removed if hidden_as == "drop" else 0
    targets = align_with_answer(values, *lengths, dropped, row["input_ids"].shape[1])
    present = ~targets.isnan()
    assert torch.equal(present.sum(1), problems.answer_length.long())
    digits = row["input_ids"][present] - DIGIT_OFFSET
    assert torch.equal(targets[present].long() % 10, digits)
    assert bool((row["labels"][present] != -100).all())


def test_the_columns_are_the_running_sums_of_the_operands():
    task = MultiplicationTask([(3, 2), (1, 1)], train_size=50, valid_size=2, test_size=2)
    sums = task.splits(running_sums=True)["train"].running_sums
    (a, b), (c, d) = task.operands["train"]
    assert torch.equal(sums[:50].long(), torch.from_numpy(running_sums(a, b).c_hat).long())
    assert torch.equal(sums[50:, :2].long(), torch.from_numpy(running_sums(c, d).c_hat).long())
    assert bool((sums[50:, 2:] == -1).all())
    assert task.splits()["train"].running_sums is None


@pytest.mark.parametrize("head", ["per_head", "joint", "residual"])
@pytest.mark.parametrize(
    "curriculum",
    [
        CurriculumArguments(method="sft"),
        CurriculumArguments(pretrain_steps=10, remove_per_stage=4, steps_per_stage=10),
    ],
    ids=["without chain", "icot"],
)
def test_both_losses_fall_and_add_up(tmp_path, splits, head, curriculum):
    trainer = make(
        tmp_path, splits, curriculum, head, running_sum_weight=2.0, optim="muon", max_steps=150, learning_rate=5e-3
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["event"] == "train"]
    for line in train:
        assert line["loss"] == pytest.approx(line["lm_loss"] + 2.0 * line["running_sum_loss"], rel=1e-4)
    assert train[-1]["running_sum_loss"] < train[0]["running_sum_loss"]
    stage = [line for line in lines if line["event"] == "stage"][-1]
    assert len(stage["running_sum_error"]) == 4 and all(0 < e < 100 for e in stage["running_sum_error"])


@pytest.mark.parametrize("standardize", [True, False])
def test_the_reported_error_is_in_units_of_the_sums(tmp_path, splits, standardize):
    curriculum = CurriculumArguments(pretrain_steps=1, remove_per_stage=8, steps_per_stage=1, keep_position=False)
    trainer = make(tmp_path, splits, curriculum, "per_head", running_sum_standardize=standardize, max_steps=10)
    trainer.train()
    model, problems = trainer.unwrapped, splits["validation"]
    result = evaluate_teacher_forced(model, problems, 8, batch_size=17)
    errors = [[] for _ in range(4)]
    model.eval()
    for row in range(len(problems)):
        question, thinking, answer = (
            int(x[row]) for x in (problems.question_length, problems.thinking_length, problems.answer_length)
        )
        tokens = problems.tokens[row].long()
        ids = torch.cat([tokens[: question + 1], tokens[question + 1 + thinking :]])[None]
        with torch.no_grad():
            said = model(ids).running_sums[0]
        for k in range(answer):
            value = said[question + 1 + k]
            if standardize:
                value = value * model.config.running_sum_std[k] + model.config.running_sum_mean[k]
            errors[k].append((value - problems.running_sums[row, k]).abs().mean().item())
    assert result.running_sum_error == pytest.approx([sum(e) / len(e) for e in errors], rel=1e-4)


def test_the_weight_goes_where_it_is_told(tmp_path, splits):
    curriculum = CurriculumArguments(method="sft")
    trainer = make(tmp_path, splits, curriculum, running_sum_weight=4.0, running_sum_weight_end=0.0)
    assert [trainer.running_sum_weight(step) for step in (0, 10, 40)] == [4.0, 3.0, 0.0]
    assert make(tmp_path, splits, curriculum, running_sum_weight=4.0).running_sum_weight(40) == 4.0
    inputs, _, _ = trainer.batches(10, trainer.schedule.stage(10))
    assert inputs[0]["running_sum_weight"] == 3.0


def test_accumulation_equals_one_larger_batch(tmp_path, splits):
    whole = make(tmp_path / "a", splits, CurriculumArguments(method="sft"), max_steps=4)
    whole.train()
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    same_sized = {k: v for k, v in splits.items()}
    parts = make(tmp_path / "b", same_sized, CurriculumArguments(method="sft"), max_steps=4, **sizes)
    parts.train()
    # The micro-batches hold different numbers of places, so the mean squared errors are weighted a little otherwise.
    for name, value in whole.unwrapped.state_dict().items():
        assert torch.allclose(value, parts.unwrapped.state_dict()[name], atol=2e-3), name


def test_problems_without_sums_are_refused(tmp_path):
    splits = MultiplicationTask((2, 2), train_size=200, valid_size=10, test_size=10).splits()
    with pytest.raises(ValueError, match="needs problems with running_sums"):
        make(tmp_path, splits, CurriculumArguments(method="sft"))
