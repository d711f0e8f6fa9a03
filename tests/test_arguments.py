"""Recipes and flags: what is read, what overrides what, and what is refused with which words."""

from pathlib import Path

import pytest

from hf_icot.arguments import ModelArguments, RecipeParser, TaskArguments
from hf_icot.curriculum import CurriculumArguments
from hf_icot.trainer import ICoTTrainingArguments


DATACLASSES = (TaskArguments, ModelArguments, CurriculumArguments, ICoTTrainingArguments)
RECIPES = sorted((Path(__file__).parent.parent / "training" / "recipes").glob("*.yaml"))


def parse(*argv, default=None):
    return RecipeParser(*DATACLASSES, default_config=default).parse(list(argv))


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_override_the_recipe_and_the_recipe_the_defaults(recipe):
    path = recipe("digits: [4, 3]\nsteps_per_stage: 7\nlearning_rate: 3e-4\nkeep_position: false\nseed: 5\n")
    task, model, curriculum, args, config = parse("--config", path, "--seed", "9", "--n_embd=64")
    assert task.digits == [4, 3] and curriculum.steps_per_stage == 7 and curriculum.keep_position is False
    assert args.learning_rate == 3e-4 and args.seed == 9 and model.n_embd == 64 and model.n_layer == 2
    assert config == path


def test_lists_and_switches_on_the_command_line(recipe):
    path = recipe("steps_per_stage: 7\n")
    task, _, curriculum, args, _ = parse(
        "--config", path, "--digits", "3", "3", "--no_keep_position", "--torch_compile"
    )
    assert task.digits == [3, 3] and curriculum.keep_position is False and args.torch_compile is True
    assert parse("--config", recipe("steps_per_stage: 1\ndigits: [[3, 2], [2, 2]]\n"))[0].digits == [3, 2, 2, 2]


@pytest.mark.parametrize(
    "text, argv, message",
    [
        ("steps_per_stag: 7\n", [], "unknown key 'steps_per_stag'; did you mean 'steps_per_stage'?"),
        ("steps_per_stage: many\n", [], "steps_per_stage must be a whole number, not 'many'"),
        ("steps_per_stage: 2.5\n", [], "steps_per_stage must be a whole number, not 2.5"),
        ("steps_per_stage: 1\nkeep_position: 3\n", [], "keep_position must be true or false, not 3"),
        ("- a\n- b\n", [], "must be a mapping of names to values, not a list"),
        ("a: [1\n", [], "is not valid YAML"),
        (
            "steps_per_stage: 1\n",
            ["--learning_rat", "1"],
            "unknown argument '--learning_rat'; did you mean '--learning_rate'?",
        ),
        ("steps_per_stage: 1\n", ["--learning_rate", "0"], "learning_rate must be above 0, not 0.0"),
        ("steps_per_stage: 1\n", ["--optim", "adam"], "invalid choice: 'adam'"),
        ("steps_per_stage: 1\noptim: adam\n", [], "optim must be one of adamw, muon, not 'adam'"),
        ("steps_per_stage: 1\n", ["--max_steps", "0"], "max_steps must be 1 or more, not 0"),
        ("steps_per_stage: 1\n", ["--warmup_steps", "5000"], r"warmup_steps \(5000\)"),
        ("method: icot\n", [], "exactly one of steps_per_stage and remove_per_epoch"),
    ],
)
def test_what_cannot_be_is_refused_with_status_2(recipe, capsys, text, argv, message):
    with pytest.raises(SystemExit) as left:
        parse("--config", recipe(text), *argv)
    assert left.value.code == 2
    import re

    assert re.search(message, capsys.readouterr().err)


def test_a_missing_recipe_is_named(capsys):
    with pytest.raises(SystemExit):
        parse("--config", "no/such.yaml")
    assert "there is no recipe 'no/such.yaml'" in capsys.readouterr().err


def test_every_flag_is_explained(capsys):
    with pytest.raises(SystemExit) as left:
        parse("--help")
    assert left.value.code == 0
    for dataclass in DATACLASSES:
        for name, spec in dataclass.__dataclass_fields__.items():
            assert spec.metadata["help"], name


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    *_, config = parse("--config", str(path))
    assert config == str(path)
