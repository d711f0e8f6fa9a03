"""The loop on problems small enough to train in seconds."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, set_seed

from hf_icot import ArithmeticTokenizer, ICoTConfig, ICoTForCausalLM
from hf_icot.curriculum import CurriculumArguments
from hf_icot.evaluation import evaluate_generation, evaluate_teacher_forced
from hf_icot.optimization import create_optimizers
from hf_icot.tasks.multiplication import MultiplicationTask, format_lines
from hf_icot.trainer import ICoTTrainer, ICoTTrainingArguments, atomic_folder


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def splits():
    return MultiplicationTask((2, 2), train_size=2000, valid_size=150, test_size=150, seed=0).splits()


def make_trainer(folder, splits, curriculum=None, task=None, n_embd=32, **args):
    args = {"max_steps": 12, "per_device_train_batch_size": 16, "warmup_steps": 2, "eval_steps": 5} | args
    set_seed(0)
    sizes = task.sizes if task else None
    model = ICoTForCausalLM(ICoTConfig(n_embd=n_embd, n_positions=splits["train"].max_length, operand_digits=sizes))
    return ICoTTrainer(
        model,
        ICoTTrainingArguments(output_dir=str(folder), logging_steps=3, **args),
        curriculum or CurriculumArguments(pretrain_steps=4, remove_per_stage=4, steps_per_stage=2),
        splits["train"],
        splits["validation"],
        tokenizer=ArithmeticTokenizer(),
    )


def weights(trainer):
    return {k: v.clone() for k, v in trainer.unwrapped.state_dict().items()}


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_run_learns_and_leaves_what_it_should(tmp_path, splits, optim):
    trainer = make_trainer(tmp_path, splits, max_steps=40, optim=optim)
    result = trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["event"] == "train"]
    assert [line["step"] for line in train] == [*range(3, 40, 3), 40]
    assert train[0]["loss"] > 2.5 and train[-1]["loss"] < 0.8 * train[0]["loss"]
    stages = [line for line in lines if line["event"] == "stage"]
    assert [(line["step"], line["hidden_tokens"]) for line in stages] == [(4, 0), (6, 4), (40, 8)]
    assert {line["step"] for line in lines if line["event"] == "eval"} == set(range(5, 40, 5))
    assert sorted(p.name for p in (tmp_path / "stages").iterdir()) == [f"hidden-{h:03d}" for h in (0, 4, 8)]
    for line in stages:
        assert line["generated_target_match"] == line["exact_match"]
        assert len(line["digit_accuracy"]) == len(line["digit_loss"]) == 4
    assert result["examples"] == 40 * 16 and result["hidden_tokens"] == 8
    # 40 steps of 16 rows of 5+8+4+3 tokens, less what was hidden.
    assert result["tokens"] == 16 * (40 * 20 - (2 * 4 + 34 * 8))


def test_stages_load_as_ordinary_models_and_score_the_same(tmp_path, splits):
    """Kept positions are folded into the saved weights, so that plain GPT-2 positions are right."""
    for side in ("left", "right"):
        folder = tmp_path / side
        curriculum = CurriculumArguments(pretrain_steps=30, remove_per_stage=5, steps_per_stage=10, removal_side=side)
        trainer = make_trainer(folder, splits, curriculum, max_steps=60, n_embd=64, optim="muon", eval_steps=100)
        trainer.train()
        for hidden in (5, 8):
            path = folder / "stages" / f"hidden-{hidden:03d}"
            saved = json.loads((path / "metrics.json").read_text())
            model = AutoModelForCausalLM.from_pretrained(path)
            assert model.config.hidden_tokens == hidden and model.config.keep_position is False
            forced = evaluate_teacher_forced(model, splits["validation"], hidden, side=side)
            assert forced.loss == pytest.approx(saved["loss"], rel=1e-5)
            assert forced.digit_accuracy == saved["digit_accuracy"]
            plain = GPT2LMHeadModel.from_pretrained(path)
            ids = splits["validation"].tokens[:32].long()
            with torch.no_grad():
                assert torch.equal(model.eval()(ids).logits, plain.eval()(ids).logits)
        assert AutoTokenizer.from_pretrained(path).decode([5, 6]) == "2 3"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("hidden_as", ["drop", "pad"])
@pytest.mark.parametrize("keep_position", [True, False])
def test_teacher_forcing_agrees_with_generation(splits, side, hidden_as, keep_position):
    """A model that has learned by heart: some targets are met and some are not, by both counts the same."""
    problems = splits["train"].select(slice(0, 60))
    set_seed(0)
    model = ICoTForCausalLM(ICoTConfig(n_embd=64, n_positions=problems.max_length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"side": side, "hidden_as": hidden_as, "keep_position": keep_position}
    from hf_icot.curriculum import hide_thinking_tokens

    for hidden in (0, 4, 8):
        for _ in range(60 if hidden == 0 else 25):
            batch = hide_thinking_tokens(
                problems.tokens,
                problems.question_length,
                problems.thinking_length,
                problems.answer_length,
                torch.full((60,), hidden),
                0,
                **options,
            )
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        forced = evaluate_teacher_forced(model, problems, hidden, batch_size=7, **options)
        if hidden_as == "pad" and side == "right" and hidden == 4:
            with pytest.raises(ValueError, match="padded on the right"):
                evaluate_generation(model, problems, hidden, **options)
            continue
        before = model.transformer.wpe.weight.clone()
        generated = evaluate_generation(model, problems, hidden, batch_size=13, **options)
        assert torch.equal(before, model.transformer.wpe.weight)
        assert generated.target_match == forced.exact_match
        if hidden == 8:
            assert generated.exact_match == forced.exact_match
            assert 0 < generated.exact_match < 1 or sum(generated.digit_accuracy) > 1


def test_generation_counts_only_what_ends_where_it_should(splits):
    """Exact match wants the end of the answer too, and ragged problems are each compared with their own answer."""
    problems = MultiplicationTask([(2, 1), (2, 2)], train_size=20, valid_size=10, test_size=0, seed=1).splits()[
        "train"
    ]

    class Oracle(torch.nn.Module):
        """Continues every prompt with its true target, except that it writes one digit too many where told to."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.config = ICoTConfig()
            self.too_long = False

        def generate(self, input_ids, attention_mask, max_new_tokens, do_sample):
            rows = []
            for ids in input_ids.tolist():
                for row, question, thinking, answer in zip(
                    problems.tokens.tolist(),
                    problems.question_length.tolist(),
                    problems.thinking_length.tolist(),
                    problems.answer_length.tolist(),
                    strict=True,
                ):
                    start = question + 2 + thinking
                    if row[: question + 1] == ids[: question + 1]:
                        tail = [5] if self.too_long else [1]
                        rows.append(ids + row[start : start + answer] + tail)
                        break
            return torch.tensor(rows)[:, : input_ids.shape[1] + max_new_tokens]

    oracle = Oracle()
    assert evaluate_generation(oracle, problems).exact_match == 1.0
    oracle.too_long = True
    result = evaluate_generation(oracle, problems)
    assert result.exact_match == 0.0 and set(result.digit_accuracy) == {1.0}


def test_ragged_sizes_keep_their_positions_in_the_saved_model(tmp_path):
    task = MultiplicationTask([(2, 1), (2, 2)], train_size=600, valid_size=50, test_size=50, seed=0)
    splits = task.splits()
    curriculum = CurriculumArguments(pretrain_steps=3, remove_per_stage=8, steps_per_stage=100)
    trainer = make_trainer(tmp_path, splits, curriculum, task, max_steps=60, n_embd=64, optim="muon", eval_steps=100)
    trainer.train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stages" / "hidden-008")
    assert model.config.keep_position is True
    result = evaluate_generation(model, splits["validation"], 8, keep_position=True)
    tokens, tokenizer = splits["validation"].tokens, ArithmeticTokenizer()
    problems, truth = [], []
    for row in tokens.tolist():
        a, b = tokenizer.decode(row).split("%%%")[0].split("*")
        problems.append((int(a.replace(" ", "")[::-1]), int(b.replace(" ", "")[::-1])))
        truth.append(problems[-1][0] * problems[-1][1])
    answers = model.multiply(problems)
    assert sum(x == y for x, y in zip(answers, truth, strict=True)) / len(truth) == pytest.approx(result.exact_match)


def test_accumulation_equals_one_larger_batch(tmp_path, splits):
    curriculum = CurriculumArguments(pretrain_steps=2, steps_per_stage=2, removal_smoothing_lambda=1.0)
    whole = make_trainer(tmp_path / "a", splits, curriculum, max_steps=6)
    whole.train()
    parts = make_trainer(
        tmp_path / "b",
        splits,
        curriculum,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
    )
    parts.train()
    for name, value in weights(whole).items():
        assert torch.allclose(value, weights(parts)[name], atol=2e-5), name


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path, splits):
    runs = []
    for number, seed in enumerate((0, 0, 1)):
        trainer = make_trainer(tmp_path / str(number), splits, seed=seed, max_steps=5)
        trainer.train()
        runs.append(weights(trainer)["transformer.wte.weight"])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_each_epoch_shows_every_problem_once(tmp_path, splits):
    trainer = make_trainer(tmp_path, splits)
    epochs = [torch.cat([trainer._indices(e * 125 + s) for s in range(125)]) for e in range(2)]
    for order in epochs:
        assert torch.equal(order.sort().values, torch.arange(2000))
    assert not torch.equal(*epochs)


def test_optimizer_reset(tmp_path, splits):
    curriculum = CurriculumArguments(pretrain_steps=3, remove_per_stage=8, steps_per_stage=1, reset_optimizer=True)
    trainer = make_trainer(tmp_path, splits, curriculum, max_steps=4, optim="muon")
    trainer.train()
    (state, *_) = trainer.optimizers[-1].optimizer.state.values()
    assert int(state["step"]) == 1


def test_muon_takes_the_matrices_of_the_blocks():
    model = ICoTForCausalLM(ICoTConfig(n_embd=32, n_positions=32))
    args = ICoTTrainingArguments(output_dir="x", optim="muon", weight_decay=0.1)
    muon, adamw = create_optimizers(model, args)
    names = {id(p): n for n, p in model.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert len(matrices) == 8 and all(name.startswith("transformer.h.") for name in matrices)
    assert matrices | rest == set(names.values()) and not matrices & rest
    assert {group["weight_decay"] for group in adamw.param_groups} == {0.0}


def test_what_cannot_work_is_said_before_training(tmp_path, splits):
    with pytest.raises(ValueError, match="one step takes 4096 problems but there are 2000"):
        make_trainer(tmp_path, splits, per_device_train_batch_size=4096)
    model = ICoTForCausalLM(ICoTConfig(n_embd=32, n_positions=16))
    with pytest.raises(ValueError, match="the longest row has 20 tokens, the model n_positions=16"):
        ICoTTrainer(
            model,
            ICoTTrainingArguments(output_dir=str(tmp_path)),
            CurriculumArguments(steps_per_stage=1),
            splits["train"],
            splits["validation"],
        )


def test_stop_at_exact_match_waits_for_the_last_stage(tmp_path, splits):
    trainer = make_trainer(tmp_path, splits, max_steps=100, stop_at_exact_match=1e-9, eval_steps=1)
    trainer.evaluate = lambda stage: evaluate_result(1.0)
    assert trainer.train()["steps"] == 7


def evaluate_result(accuracy):
    from hf_icot.evaluation import EvaluationResult

    return EvaluationResult(exact_match=accuracy, digit_accuracy=[accuracy], problems=1, loss=0.0, digit_loss=[0.0])


def test_atomic_folder_leaves_the_old_one_when_writing_fails(tmp_path):
    folder = tmp_path / "model"
    with atomic_folder(folder) as new:
        (new / "config.json").write_text("1")
    (folder / "metrics.jsonl").write_text("kept")
    with pytest.raises(OSError), atomic_folder(folder) as new:
        (new / "config.json").write_text("2")
        raise OSError("disk full")
    assert (folder / "config.json").read_text() == "1"
    with atomic_folder(folder) as new:
        (new / "config.json").write_text("3")
    assert (folder / "config.json").read_text() == "3" and (folder / "metrics.jsonl").read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_folder_being_overwritten_does_not_load(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    for content in ("1", "2"):
        with pytest.raises(KeyboardInterrupt) if content == "2" else nullcontext(), atomic_folder(folder) as new:
            for name in ("config.json", "model.safetensors"):
                (new / name).write_text(content)
            if content == "2":
                monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert not (folder / "config.json").exists()


def launch(folder, *flags):
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags[: flags.index("--")], "training/train.py"]
    command += ["--output_dir", str(folder), *flags[flags.index("--") + 1 :]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_equal_one(tmp_path):
    """Same loss for 50 steps to 1e-4, same evaluation, each held-out problem counted once."""
    flags = [
        "--n_embd",
        "32",
        "--max_steps",
        "50",
        "--logging_steps",
        "1",
        "--eval_steps",
        "25",
        "--valid_size",
        "333",
    ]
    flags += ["--pretrain_steps", "20", "--steps_per_stage", "5", "--warmup_steps", "5", "--lr_decay_steps", "5"]
    _, one = launch(
        tmp_path / "1", "--cpu", "--num_processes", "1", "--", *flags, "--per_device_train_batch_size", "64"
    )
    _, two = launch(
        tmp_path / "2", "--cpu", "--num_processes", "2", "--", *flags, "--per_device_train_batch_size", "32"
    )
    assert [line["event"] for line in one] == [line["event"] for line in two]
    assert len([line for line in one if line["event"] == "train"]) == 50
    for a, b in zip(one, two, strict=True):
        if a["event"] == "train":
            assert abs(a["loss"] - b["loss"]) < 1e-4, a["step"]
        else:
            assert a["problems"] == b["problems"] == 333
            assert a["digit_accuracy"] == pytest.approx(b["digit_accuracy"], abs=0.02)
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["tokens"] == b["tokens"]


def test_the_script_leaves_a_loadable_run_folder(tmp_path):
    flags = ["--n_embd", "32", "--max_steps", "30", "--pretrain_steps", "10", "--remove_per_stage", "5"]
    flags += ["--steps_per_stage", "5", "--warmup_steps", "5", "--lr_decay_steps", "5", "--train_size", "3000"]
    out, _ = launch(tmp_path / "run", "--cpu", "--num_processes", "1", "--", *flags)
    folder = tmp_path / "run"
    names = {p.name for p in folder.iterdir()}
    assert names >= {"recipe.yaml", "metrics.jsonl", "stages", "stages.csv", "figures", "results.json", "README.md"}
    assert {p.name for p in (folder / "figures").iterdir()} == {
        f"{name}.{ending}" for name in ("learning_curve", "accuracy_by_hidden") for ending in ("png", "csv")
    }
    results = json.loads((folder / "results.json").read_text())
    assert f"exact match         {results['test']['exact_match']:.4f}" in out and "run folder" in out
    model = AutoModelForCausalLM.from_pretrained(folder)
    problems = MultiplicationTask((3, 2), train_size=3000, seed=0).splits()["test"]
    assert evaluate_generation(model, problems).exact_match == results["test"]["exact_match"]
    # The run folder's own recipe starts the same run again.
    again, _ = launch(
        tmp_path / "again", "--cpu", "--num_processes", "1", "--", "--config", str(folder / "recipe.yaml")
    )
    assert json.loads((tmp_path / "again" / "results.json").read_text())["test"]["digit_accuracy"] == pytest.approx(
        results["test"]["digit_accuracy"]
    )
    done = subprocess.run(
        [sys.executable, "training/train.py", "--output_dir", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "is not empty" in done.stderr


def test_text_files_and_datasets_train_through_the_same_path(tmp_path):
    """The same problems as drawn operands, as text files and as a Parquet repository give the same run."""
    shared = [
        "--n_embd",
        "32",
        "--max_steps",
        "8",
        "--logging_steps",
        "1",
        "--pretrain_steps",
        "4",
        "--eval_steps",
        "4",
    ]
    shared += ["--steps_per_stage", "2", "--warmup_steps", "2", "--lr_decay_steps", "2"]
    shared += ["--per_device_train_batch_size", "16", "--disable_tqdm"]
    task = MultiplicationTask((2, 1), train_size=300, valid_size=50, test_size=50, seed=0)
    for split, (operands,) in task.operands.items():
        (tmp_path / f"{split}.txt").write_bytes(format_lines(*operands))
    build = [
        "--digits",
        "2",
        "1",
        "--train",
        "300",
        "--validation",
        "50",
        "--test",
        "50",
        "--out",
        str(tmp_path / "repo"),
    ]
    subprocess.run([sys.executable, "dataset_scripts/build_multiplication.py", *build], cwd=ROOT, check=True)
    sizes = ["--train_size", "300", "--valid_size", "50", "--test_size", "50"]
    runs = {
        "drawn": ["--task", "multiplication", "--digits", "2", "1", *sizes],
        "text": ["--task", "text", "--train_file", f"{tmp_path}/train.txt"]
        + ["--validation_file", f"{tmp_path}/validation.txt", "--test_file", f"{tmp_path}/test.txt"],
        "dataset": ["--task", "dataset", "--dataset_name", f"{tmp_path}/repo", "--dataset_config", "2x1"],
    }
    losses = {}
    for name, flags in runs.items():
        _, lines = launch(tmp_path / name, "--cpu", "--num_processes", "1", "--", *shared, *flags)
        losses[name] = [line["loss"] for line in lines]
    assert losses["text"] == losses["drawn"] and losses["dataset"] == losses["drawn"]


def test_prose_trains_with_a_tokenizer_of_its_own(tmp_path):
    """Chains of all lengths, an int32 vocabulary, and generation that agrees with teacher forcing."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lines = []
    for i in range(120):
        a, b = i % 10, i // 10
        chain = f"<<{a}+{b}={a + b}>> <<{a + b}*2={2 * (a + b)}>>" if i % 3 else f"<<{a}+{b}={a + b}>>"
        lines.append(f"Ann has {a} pears and Bo has {b}, how many twice over?||{chain} #### {2 * (a + b)}")
    path = tmp_path / "prose.txt"
    path.write_text("\n".join(lines) + "\n")
    characters = ["<pad>", "<eos>", "%%%", "####", *sorted(set("".join(lines)))]
    characters += [f"<unused{i}>" for i in range(300 - len(characters))]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["%%%", "####"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    flags = ["--task", "text", "--train_file", str(path), "--validation_file", str(path), "--n_embd", "32"]
    flags += ["--tokenizer_name_or_path", str(tmp_path / "tokenizer"), "--max_steps", "20", "--pretrain_steps", "10"]
    flags += ["--remove_per_stage", "10", "--steps_per_stage", "3", "--per_device_train_batch_size", "16"]
    flags += ["--warmup_steps", "2", "--lr_decay_steps", "2", "--disable_tqdm"]
    out, lines = launch(tmp_path / "run", "--cpu", "--num_processes", "1", "--", *flags)
    assert "note: max_steps ends the curriculum" not in out
    for line in lines:
        if line["event"] == "stage":
            assert line["generated_target_match"] == line["exact_match"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["vocab_size"] == 300 and config["keep_position"] is True and config["operand_digits"] is None


@pytest.mark.slow
def test_compiled_bf16_training_with_a_tracker(tmp_path):
    flags = ["--n_embd", "32", "--max_steps", "12", "--logging_steps", "4", "--pretrain_steps", "4"]
    flags += ["--remove_per_stage", "5", "--steps_per_stage", "4", "--warmup_steps", "2", "--lr_decay_steps", "2"]
    flags += ["--per_device_train_batch_size", "16", "--disable_tqdm", "--train_size", "2000"]
    _, plain = launch(tmp_path / "a", "--cpu", "--num_processes", "1", "--", *flags)
    _, compiled = launch(tmp_path / "b", "--cpu", "--num_processes", "1", "--", *flags, "--torch_compile")
    extra = ["--mixed_precision", "bf16", "--report_to", "tensorboard", "--gradient_checkpointing"]
    _, low = launch(tmp_path / "c", "--cpu", "--num_processes", "1", "--", *flags, *extra)
    for a, b, c in zip(plain, compiled, low, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["loss"] == pytest.approx(c["loss"], abs=2e-2)
    assert list((tmp_path / "c").rglob("events.out.tfevents.*"))


def test_overwriting_deletes_a_run_and_nothing_else(tmp_path):
    def attempt(folder, *flags):
        small = ["--n_embd", "32", "--max_steps", "4", "--warmup_steps", "1", "--lr_decay_steps", "1"]
        small += ["--train_size", "300", "--valid_size", "9", "--test_size", "9", "--disable_tqdm"]
        command = [sys.executable, "training/train.py", *small, "--output_dir", str(folder), "--overwrite_output_dir"]
        return subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=200)

    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("x")
    done = attempt(foreign)
    assert done.returncode == 2 and "thesis.txt" in done.stderr and (foreign / "thesis.txt").exists()
    run = tmp_path / "run"
    assert attempt(run).returncode == 0
    before = (run / "results.json").read_text()
    done = attempt(run, "--per_device_train_batch_size", "301")
    assert done.returncode == 2 and (run / "results.json").read_text() == before
    done = attempt(run, "--resume", str(run))
    assert done.returncode == 2 and "exclude each other" in done.stderr and (run / "results.json").exists()
    (run / "notes.txt").write_text("mine")
    assert attempt(run).returncode == 2 and (run / "results.json").exists()
    (run / "notes.txt").unlink()
    assert attempt(run, "--seed", "1").returncode == 0 and (run / "results.json").read_text() != before
