"""A run that was stopped, however rudely, ends as one that was not."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import set_seed

from hf_icot import ICoTConfig, ICoTForCausalLM
from hf_icot.curriculum import CurriculumArguments
from hf_icot.state import load_state, save_state
from hf_icot.tasks.multiplication import MultiplicationTask
from hf_icot.trainer import ICoTTrainer, ICoTTrainingArguments, Interrupted


ROOT = Path(__file__).parent.parent
TIMED = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def splits():
    return MultiplicationTask((2, 2), train_size=1000, valid_size=60, test_size=60, seed=0).splits()


CURRICULA = {
    "fixed": CurriculumArguments(pretrain_steps=6, remove_per_stage=3, steps_per_stage=7, reset_optimizer=True),
    "gated": CurriculumArguments(
        schedule="gated",
        pretrain_steps=4,
        gate_window=3,
        gate_max_steps=6,
        gate_exact_match=0.5,
        removal_smoothing_lambda=1.0,
        stage_mixing=0.2,
    ),
}


def make(folder, splits, name, **changes):
    """A trainer with dropout, so that the global random generators matter too."""
    set_seed(1)
    model = ICoTForCausalLM(ICoTConfig(n_embd=32, n_positions=splits["train"].max_length, resid_pdrop=0.1))
    values = {"max_steps": 40, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "warmup_steps": 3}
    values |= {"logging_steps": 4, "eval_steps": 9, "save_steps": 5, "optim": "muon", "disable_tqdm": True}
    values |= {"lr_scheduler_type": "cosine", "dynamics_every": 6} | changes
    args = ICoTTrainingArguments(output_dir=str(folder), **values)
    return ICoTTrainer(
        model, args, CURRICULA[name], splits["train"], splits["validation"], run_config={"name": name, **values}
    )


def lines(folder):
    """metrics.jsonl without what a clock says, and dynamics.jsonl."""
    text = "".join(path.read_text() for path in sorted(Path(folder).glob("*.jsonl")))
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in text.splitlines()]


def weights(trainer):
    return {k: v.clone() for k, v in trainer.unwrapped.state_dict().items()}


@pytest.fixture(scope="module", params=list(CURRICULA))
def undisturbed(request, splits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    trainer = make(folder, splits, request.param)
    result = trainer.train()
    return request.param, folder, weights(trainer), result


class Died(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("dies_at", [1, 5, 8, 20, 33, 39])
def test_a_resumed_run_has_the_weights_and_the_log_of_an_undisturbed_one(undisturbed, splits, tmp_path, dies_at):
    name, folder, expected, result = undisturbed
    trainer = make(tmp_path, splits, name)
    step = trainer.training_step

    def dying(at, stage):
        if at == dies_at:
            raise Died
        return step(at, stage)

    trainer.training_step = dying
    with pytest.raises(Died):
        trainer.train()
    again = make(tmp_path, splits, name)
    if dies_at < 5 and not list((tmp_path / "state").glob("step-*")):
        with pytest.raises(FileNotFoundError, match="no state to resume from"):
            again.resume()
        return
    assert again.resume() <= dies_at
    resumed = again.train()
    assert all(torch.equal(value, weights(again)[key]) for key, value in expected.items())
    assert lines(tmp_path) == lines(folder)
    assert {k: v for k, v in resumed.items() if k != "seconds"} == {k: v for k, v in result.items() if k != "seconds"}
    assert len(list((tmp_path / "state").iterdir())) == 2


def test_dynamics_do_not_disturb_the_training(undisturbed, splits, tmp_path):
    name, _, expected, _ = undisturbed
    trainer = make(tmp_path, splits, name, dynamics_every=None)
    trainer.train()
    assert not (tmp_path / "dynamics.jsonl").exists()
    assert all(torch.equal(value, weights(trainer)[key]) for key, value in expected.items())


def test_a_finished_run_resumes_to_its_end(undisturbed, splits, tmp_path):
    name, folder, expected, _ = undisturbed
    shutil.copytree(folder, tmp_path / "run")
    trainer = make(tmp_path / "run", splits, name)
    assert trainer.resume() == 40
    trainer.train()
    assert lines(tmp_path / "run") == lines(folder)
    assert all(torch.equal(value, weights(trainer)[key]) for key, value in expected.items())


def test_a_signal_saves_and_leaves(undisturbed, splits, tmp_path):
    name, folder, expected, _ = undisturbed
    trainer = make(tmp_path, splits, name)
    step = trainer.training_step

    def signalled(at, stage):
        if at == 16:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(at, stage)

    trainer.training_step = signalled
    with pytest.raises(Interrupted, match="SIGTERM after step 17: the state is saved"):
        trainer.train()
    again = make(tmp_path, splits, name)
    assert again.resume() == 17
    again.train()
    assert all(torch.equal(value, weights(again)[key]) for key, value in expected.items())
    assert lines(tmp_path) == lines(folder)


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_state_is_passed_over(undisturbed, splits, tmp_path, file, damage):
    name, folder, expected, _ = undisturbed
    shutil.copytree(folder, tmp_path / "run")
    newest = max((tmp_path / "run" / "state").glob("step-*")) / file
    data = newest.read_bytes()
    if damage == "gone":
        newest.unlink()
    else:
        middle = len(data) // 2
        newest.write_bytes(data[:middle] if damage == "cut" else data[:middle] + b"\x01" + data[middle + 1 :])
    trainer = make(tmp_path / "run", splits, name)
    with pytest.warns(UserWarning, match="is damaged"):
        assert trainer.resume() < 40
    trainer.train()
    assert all(torch.equal(value, weights(trainer)[key]) for key, value in expected.items())
    assert lines(tmp_path / "run") == lines(folder)


def test_a_changed_recipe_is_refused_where_a_weight_depends_on_it(undisturbed, splits, tmp_path):
    name, folder, *_ = undisturbed
    shutil.copytree(folder, tmp_path / "run")
    with pytest.raises(ValueError, match=r"max_steps: 40 -> 50\): max_steps cannot change in a run"):
        make(tmp_path / "run", splits, name, max_steps=50).resume()
    with pytest.warns(UserWarning, match="changed recipe: eval_steps: 9 -> 3"):
        make(tmp_path / "run", splits, name, eval_steps=3).resume()


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    tensors = {"a": torch.arange(5.0)}
    save_state(tmp_path, 1, tensors, {"x": 1})

    def full(*args, **kwargs):
        Path(args[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_icot.state.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_state(tmp_path, 2, tensors, {"x": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    step, loaded, values = load_state(tmp_path)
    assert step == 1 and torch.equal(loaded["a"], tensors["a"]) and values == {"x": 1}


FLAGS = "--digits 2 2 --train_size 1000 --valid_size 50 --test_size 50 --n_embd 32 --max_steps 120 --disable_tqdm "
FLAGS += (
    "--pretrain_steps 20 --steps_per_stage 12 --warmup_steps 5 --lr_decay_steps 20 --save_steps 7 --eval_steps 15 "
)
FLAGS += "--per_device_train_batch_size 16 --logging_steps 5 --dropout 0.1 --num_threads 1"


def start(*flags, **environment):
    command = [sys.executable, "training/train.py", *flags]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*flags):
    process = start(*flags)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out[-2000:]
    return out


@pytest.mark.slow
def test_twenty_kills_at_random_moments(tmp_path):
    """SIGKILL while it trains, evaluates or writes; each ends with the very weights of the undisturbed run."""
    finish(*FLAGS.split(), "--output_dir", str(tmp_path / "whole"))
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    generator = random.Random(0)
    resumed = 0
    for number in range(20):
        folder = tmp_path / f"killed-{number}"
        process = start(*FLAGS.split(), "--output_dir", str(folder))
        while process.poll() is None and not list(folder.glob("state/step-*")):
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 3))
        process.kill()
        process.communicate()
        resumed += not (folder / "results.json").exists()
        finish("--resume", str(folder))
        actual = load_file(folder / "model.safetensors")
        assert all(torch.equal(expected[key], actual[key]) for key in expected), number
        assert lines(folder) == lines(tmp_path / "whole"), number
    assert resumed >= 10


def test_interrupt_and_resume_from_the_command_line(tmp_path):
    folder = tmp_path / "run"
    process = start(*FLAGS.split(), "--output_dir", str(folder))
    while process.poll() is None and not list(folder.glob("state/step-*")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f"training/train.py --resume {folder}" in out and "Traceback" not in out
    out = finish("--resume", str(folder))
    assert "resuming" in out and "exact match" in out and (folder / "results.json").exists()
    process = start("--resume", str(folder), "--seed", "9")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "seed cannot change in a run" in out
    process = start("--resume", str(tmp_path))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "there is no recipe" in out


def test_no_warning_without_damage(undisturbed, splits, tmp_path):
    name, folder, *_ = undisturbed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_state(folder / "state")
