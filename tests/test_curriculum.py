"""The schedule against its closed form, and the vectorised hiding against a plain per-example reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_icot.curriculum import CurriculumArguments, Schedule, hide_thinking_tokens, supervised_tokens


PAD, SEPARATOR, ANSWER, EOS = 0, 17, 18, 1


def hide_one(row, question, thinking, answer, hidden, side, hidden_as, keep_position):
    """One example with Python lists: (tokens, labels, position ids)."""
    hidden = min(hidden, thinking)
    first = question + 1 + (0 if side == "left" else thinking - hidden)
    tokens, labels, positions = [], [], []
    for place in range(question + thinking + answer + 3):
        is_hidden = first <= place < first + hidden
        if is_hidden and hidden_as == "drop":
            continue
        tokens.append(PAD if is_hidden else row[place])
        labels.append(-100 if is_hidden or place <= question else row[place])
        positions.append(place if keep_position and hidden_as == "drop" else len(positions))
    return tokens, labels, positions


@st.composite
def ragged_batches(draw):
    sizes = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=6))
    seed = draw(st.integers(0, 2**32 - 1))
    hidden = [draw(st.integers(0, 12)) for _ in sizes]
    return sizes, hidden, seed


@settings(max_examples=150, deadline=None)
@given(
    ragged_batches(),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["drop", "pad"]),
    st.booleans(),
    st.sampled_from([torch.uint8, torch.int32]),
)
def test_hiding_equals_the_per_example_reference(batch, side, hidden_as, keep_position, dtype):
    sizes, hidden, seed = batch
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for question, thinking, answer in sizes:
        body = torch.randint(3, 17, (question + thinking + answer,), generator=generator).tolist()
        rows.append(
            body[:question]
            + [SEPARATOR]
            + body[question : question + thinking]
            + [ANSWER]
            + body[question + thinking :]
            + [EOS]
        )
    width = max(map(len, rows)) + seed % 3
    tokens = torch.tensor([row + [PAD] * (width - len(row)) for row in rows], dtype=dtype)
    question, thinking, answer = (torch.tensor(x, dtype=torch.int16) for x in zip(*sizes, strict=True))
    result = hide_thinking_tokens(
        tokens, question, thinking, answer, torch.tensor(hidden), PAD, side, hidden_as, keep_position
    )
    expected = [
        hide_one(row, *size, h, side, hidden_as, keep_position)
        for row, size, h in zip(rows, sizes, hidden, strict=True)
    ]
    length = max(len(e[0]) for e in expected)
    assert result["input_ids"].shape == result["labels"].shape == (len(rows), length)
    for i, (ids, labels, positions) in enumerate(expected):
        rest = length - len(ids)
        assert result["input_ids"][i].tolist() == ids + [PAD] * rest
        assert result["labels"][i].tolist() == labels + [-100] * rest
        if result["position_ids"] is None:
            assert positions == list(range(len(ids)))
        else:
            assert result["position_ids"][i, : len(ids)].tolist() == positions
            assert int(result["position_ids"].max()) < width
    expected_count = sum(label != -100 for e in expected for label in e[1])
    assert supervised_tokens(thinking, answer, torch.tensor(hidden)) == expected_count
    assert int((result["labels"] != -100).sum()) == expected_count


def test_kept_positions_are_the_old_places():
    tokens = torch.arange(10, 18)[None]  # question of 2, %%%, chain of 3, ####, no answer, <eos>
    one = torch.tensor
    kept = hide_thinking_tokens(tokens, one([2]), one([3]), one([0]), one([2]), PAD, keep_position=True)
    assert kept["input_ids"].tolist() == [[10, 11, 12, 15, 16, 17]]
    assert kept["position_ids"].tolist() == [[0, 1, 2, 5, 6, 7]]
    right = hide_thinking_tokens(tokens, one([2]), one([3]), one([0]), one([2]), PAD, side="right")
    assert right["input_ids"].tolist() == [[10, 11, 12, 13, 16, 17]]
    assert right["position_ids"].tolist() == [[0, 1, 2, 3, 6, 7]]


def test_fixed_pace_follows_its_closed_form():
    schedule = Schedule(CurriculumArguments(pretrain_steps=30, remove_per_stage=4, steps_per_stage=7), 46)
    for step in range(200):
        expected = 0 if step < 30 else min(46, 4 * (1 + (step - 30) // 7))
        assert schedule.stage(step).hidden == expected
    assert [stage.index for stage in schedule.stages] == list(range(len(schedule.stages)))
    assert schedule.is_last(schedule.stages[-1]) and schedule.stages[-1].hidden == 46


@pytest.mark.parametrize("pace", [8.0, 0.5, 3.0])
def test_pace_by_epoch_follows_its_closed_form(pace):
    arguments = CurriculumArguments(remove_per_epoch=pace, pretrain_steps=5)
    schedule = Schedule(arguments, 11, steps_per_epoch=25)
    for step in range(700):
        expected = 0 if step < 5 else min(11, math.floor((step - 5) * pace / 25 + 1e-9))
        assert schedule.stage(step).hidden == expected


def test_several_tokens_within_one_step_make_one_stage():
    schedule = Schedule(CurriculumArguments(remove_per_epoch=100.0), 46, steps_per_epoch=10)
    assert [stage.hidden for stage in schedule.stages] == [0, 10, 20, 30, 40, 46]


def test_remove_all_beyond():
    schedule = Schedule(CurriculumArguments(remove_per_stage=5, steps_per_stage=10, remove_all_beyond=15), 46)
    assert [stage.hidden for stage in schedule.stages] == [5, 10, 15, 46]


def test_methods_without_removal():
    assert [s.hidden for s in Schedule(CurriculumArguments(method="sft"), 46).stages] == [46]
    assert [s.hidden for s in Schedule(CurriculumArguments(method="cot"), 46).stages] == [0]
    assert [s.hidden for s in Schedule(CurriculumArguments(steps_per_stage=3), 0).stages] == [0]


def test_smoothing_has_the_stated_distribution():
    rate, count = 1.0, 200_000
    schedule = Schedule(CurriculumArguments(steps_per_stage=1, removal_smoothing_lambda=rate), 46)
    stage = schedule.stage(4)
    offset = schedule.draw_hidden(stage, count, torch.Generator().manual_seed(0)) - stage.hidden
    assert int(offset.min()) == 0
    for o in range(6):
        expected = (1 - math.exp(-rate)) * math.exp(-rate * o)
        # Five standard deviations of a binomial.
        tolerance = 5 * math.sqrt(expected * (1 - expected) / count)
        assert abs((offset == o).double().mean().item() - expected) < tolerance
    again = schedule.draw_hidden(stage, count, torch.Generator().manual_seed(0)) - stage.hidden
    assert torch.equal(offset, again)


def test_without_smoothing_all_examples_hide_the_same():
    for method in ("icot", "sft", "cot"):
        smoothing = None if method == "icot" else 1.0
        arguments = CurriculumArguments(method=method, steps_per_stage=1, removal_smoothing_lambda=smoothing)
        stage = Schedule(arguments, 46).stage(3)
        assert set(Schedule(arguments, 46).draw_hidden(stage, 100, torch.Generator()).tolist()) == {stage.hidden}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"method": "ict"}, "method must be one of sft, cot, icot, not 'ict'"),
        ({}, "exactly one of steps_per_stage and remove_per_epoch"),
        ({"steps_per_stage": 3, "remove_per_epoch": 8.0}, "exactly one"),
        ({"steps_per_stage": 0}, "steps_per_stage must be 1 or more, not 0"),
        ({"remove_per_epoch": -1.0}, "remove_per_epoch must be above 0, not -1.0"),
        ({"steps_per_stage": 1, "remove_per_stage": 0}, "remove_per_stage must be 1 or more, not 0"),
        ({"steps_per_stage": 1, "removal_smoothing_lambda": 0.0}, "removal_smoothing_lambda must be above 0"),
        ({"steps_per_stage": 1, "removal_smoothing_lambda": math.nan}, "removal_smoothing_lambda must be above 0"),
        ({"steps_per_stage": 1, "removal_side": "top"}, "removal_side must be one of left, right, not 'top'"),
        ({"steps_per_stage": 1, "pretrain_steps": -1}, "pretrain_steps must be 0 or more"),
        ({"steps_per_stage": 1, "remove_all_beyond": -1}, "remove_all_beyond must be 0 or more"),
    ],
)
def test_impossible_curricula_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        CurriculumArguments(**values)
