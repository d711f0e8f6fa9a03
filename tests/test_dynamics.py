"""Each answer digit's own loss, accuracy and gradient norm, and the figure that is drawn from them."""

import csv
import json
import random

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from transformers import set_seed

from hf_icot import ICoTConfig, ICoTForCausalLM
from hf_icot.analysis import plots
from hf_icot.curriculum import CurriculumArguments, hide_thinking_tokens
from hf_icot.dynamics import DigitDynamics
from hf_icot.evaluation import evaluate_teacher_forced
from hf_icot.tasks.multiplication import MultiplicationTask


CURRICULA = [
    {"removal_side": "left", "keep_position": True},
    {"removal_side": "right", "keep_position": False},
    {"hidden_as": "pad"},
]


def make_model(**config):
    set_seed(0)
    return ICoTForCausalLM(ICoTConfig(n_embd=32, n_positions=48, **config))


@pytest.fixture(scope="module")
def ragged():
    """Answers of 4, 3 and 2 digits after chains of 8, 3 and 2 tokens."""
    task = MultiplicationTask([(2, 2), (2, 1), (1, 1)], train_size=60, valid_size=8, test_size=8, seed=0)
    return task.splits()["validation"]


def curriculum(**changes):
    return CurriculumArguments(**{"steps_per_stage": 1} | changes)


def plain_norms(model, problems, hidden, arguments):
    """The norms by `.backward()` of each digit's mean loss alone, row by row from the labels."""
    lengths = problems.question_length, problems.thinking_length, problems.answer_length
    inputs = hide_thinking_tokens(
        problems.tokens,
        *lengths,
        torch.full((len(problems),), hidden),
        problems.pad_token_id,
        side=arguments.removal_side,
        hidden_as=arguments.hidden_as,
        keep_position=arguments.keep_position,
    )
    labels = inputs.pop("labels")
    norms = []
    for place in range(int(problems.answer_length.max())):
        model.zero_grad()
        log_probabilities = model(**inputs, attention_mask=torch.ones_like(labels)).logits.log_softmax(-1)
        losses = []
        for row, answer in enumerate(problems.answer_length.tolist()):
            if place < answer:
                # <eos> is the last label; the answer ends before it.
                at = int((labels[row] != -100).nonzero()[-1]) - answer + place
                losses.append(-log_probabilities[row, at - 1, labels[row, at]])
        torch.stack(losses).mean().backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        norms.append(torch.cat(gradients).norm().item())
    return norms


@pytest.mark.parametrize("changes", CURRICULA)
@pytest.mark.parametrize("hidden", [0, 3, 99])
def test_norms_are_those_of_each_digit_alone_and_losses_those_of_the_evaluation(ragged, changes, hidden):
    arguments, model = curriculum(**changes), make_model().eval()
    measured = DigitDynamics(ragged, arguments).measure(model, hidden)
    assert measured["grad_norm"] == pytest.approx(plain_norms(model, ragged, hidden, arguments), rel=1e-5)
    assert min(measured["grad_norm"]) > 0.01
    result = evaluate_teacher_forced(
        model,
        ragged,
        hidden,
        side=arguments.removal_side,
        hidden_as=arguments.hidden_as,
        keep_position=arguments.keep_position,
        batch_size=7,
    )
    assert measured["loss"] == pytest.approx(result.digit_loss, rel=1e-6)
    assert measured["accuracy"] == result.digit_accuracy
    assert all(type(value) is float for values in measured.values() for value in values)


def test_a_place_counts_only_the_answers_that_have_it(ragged):
    model = make_model()
    longest = ragged.select(torch.nonzero(ragged.answer_length == 4).flatten())
    assert 0 < len(longest) < len(ragged)
    everything = DigitDynamics(ragged, curriculum()).measure(model, 2)
    alone = DigitDynamics(longest, curriculum()).measure(model, 2)
    for name in ("loss", "accuracy", "grad_norm"):
        assert everything[name][3] == pytest.approx(alone[name][3], rel=1e-5)
    assert everything["loss"][1] != pytest.approx(alone["loss"][1], rel=1e-5)


def test_a_trained_digit_is_seen_as_trained(ragged):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    probe = DigitDynamics(ragged, curriculum())
    before = probe.measure(model, 0)
    rows = ragged.tokens.long()
    labels = rows.masked_fill(torch.arange(rows.shape[1]) != (ragged.lengths - 2)[:, None], -100)  # the last digit
    for _ in range(60):
        model(input_ids=rows, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = probe.measure(model, 0)
    assert after["loss"][3] < 0.3 * before["loss"][3] and after["accuracy"][3] > before["accuracy"][3]
    assert after["loss"][0] > 1.5


def test_training_goes_on_as_if_nothing_was_measured(ragged):
    model = make_model(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, running_sum_head="per_head").train()
    model.transformer.h[0].eval()
    rows = ragged.tokens.long()
    model(input_ids=rows, labels=rows).loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    assert True in modes and False in modes
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    probe = DigitDynamics(ragged, curriculum())
    with torch.no_grad():
        first = probe.measure(model, 2)
    assert first == probe.measure(model, 2)  # no dropout
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[2]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert [module.training for module in model.modules()] == modes
    assert gradients["running_sum_head.weight"] is None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert (parameter.grad is None) == (gradients[name] is None)
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[name])


def test_the_mode_comes_back_after_a_failure(ragged):
    model = make_model().train()
    model.config.n_positions = 8
    with pytest.raises(ValueError, match="n_positions=8"):
        DigitDynamics(ragged, curriculum()).measure(model, 0)
    assert all(module.training for module in model.modules())


def test_frozen_parameters_add_nothing(ragged):
    model = make_model(running_sum_head="joint")
    probe, whole = DigitDynamics(ragged, curriculum()), []
    for trainable in (model.transformer.h, model.transformer.ln_f):
        model.requires_grad_(False)
        trainable.requires_grad_(True)
        whole.append(np.square(probe.measure(model, 1)["grad_norm"]))
    model.transformer.h.requires_grad_(True)
    assert np.square(probe.measure(model, 1)["grad_norm"]) == pytest.approx(whole[0] + whole[1], rel=1e-5)
    # The head for running sums reaches no digit.
    model.requires_grad_(False)
    model.running_sum_head.requires_grad_(True)
    assert probe.measure(model, 1)["grad_norm"] == [0, 0, 0, 0]
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter"):
        probe.measure(model, 1)


def test_a_probe_without_answers_is_refused(ragged):
    with pytest.raises(ValueError, match="0 problems"):
        DigitDynamics(ragged.select([]), curriculum())


# ---- the figure ----


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Few dots: drawing takes most of the tests' time."""
    monkeypatch.setitem(plt.rcParams, "figure.dpi", 40)


def write_run(folder, steps, places=3, seed=0, hidden=None):
    """A dynamics.jsonl as the trainer writes it, and its columns [places, steps]."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    loss, norm = rng.uniform(0, 3, (places, len(steps))), 10.0 ** rng.uniform(-4, 1, (places, len(steps)))
    with open(folder / "dynamics.jsonl", "w") as file:
        for i, step in enumerate(steps):
            line = {
                "step": step,
                "hidden_tokens": hidden[i] if hidden else 0,
                "loss": loss[:, i].tolist(),
                "accuracy": [0.5] * places,
                "grad_norm": norm[:, i].tolist(),
            }
            file.write(json.dumps(line) + "\n")
    return loss, norm


@pytest.fixture
def figures(monkeypatch):
    """Figures as they were saved."""
    kept, close = [], plt.close
    monkeypatch.setattr(plots.plt, "close", kept.append)
    yield kept
    for figure in kept:
        close(figure)


def loss_axis_lines(axis):
    return {line.get_label(): line for line in axis.get_lines()}


def test_figure_and_csv_hold_the_numbers(tmp_path, figures):
    steps = [0, 50, 100, 200, 1000]
    loss, norm = write_run(tmp_path / "sft", steps)
    path = plots.dynamics(tmp_path / "sft", tmp_path / "figures" / "dynamics.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    heat, curves = figures[0].axes[:2]
    mesh = heat.collections[0]
    assert np.array_equal(np.asarray(mesh.get_array()).reshape(norm.shape), norm)
    edges = mesh.get_coordinates()[0, :, 0]
    assert all(edges[i] < step < edges[i + 1] or step == edges[i] == 0 for i, step in enumerate(steps))
    lines = loss_axis_lines(curves)
    for place in range(3):
        x, y = lines[f"$c_{{{place}}}$"].get_data()
        assert list(x) == steps and np.array_equal(y, loss[place])
    assert list(lines["ln 10 = 2.303"].get_ydata()) == pytest.approx([np.log(10)] * 2)
    assert heat.get_title() == "sft" and "nats" in curves.get_ylabel() and "step" in curves.get_xlabel()
    # In print: the norms' colours grow lighter throughout, and no two digits have both shade and style in common.
    luminance = mesh.cmap(np.linspace(0, 1, 50))[:, :3] @ [0.299, 0.587, 0.114]
    assert (np.diff(luminance) > 0).all()
    assert len({(line.get_linestyle(), *to_rgba(line.get_color())) for line in lines.values()}) == 4
    # The CSV is read as the run is, but for the accuracy, which is not drawn.
    again, run = plots.read_dynamics(path.with_suffix(".csv")), plots.read_dynamics(tmp_path / "sft")
    assert again == {name: values for name, values in run.items() if not name.startswith("accuracy")}
    assert again["grad_norm_c2"] == norm[2].tolist() and run["accuracy_c1"] == [0.5] * 5


def test_runs_side_by_side(tmp_path, figures):
    write_run(tmp_path / "icot", [10, 20, 30], places=2, hidden=[0, 4, 8])
    reference = tmp_path / "reference.csv"
    reference.write_text(
        "step,loss_c0,loss_c1,loss_c2,grad_norm_c0,grad_norm_c1,grad_norm_c2\n"
        "0,10.588,10.865,10.742,23.968,10.44,8.3691\n"
        "500,0.00032741,0.095138,2.3023,4.6278e-10,8.1291,4.1853\n"
    )
    path = plots.dynamics([reference, tmp_path / "icot" / "dynamics.jsonl"], tmp_path / "both.png")
    left, right, left_loss, right_loss, left_hidden, right_hidden = figures[0].axes[:6]
    assert (left.get_title(), right.get_title()) == ("reference", "icot")
    assert list(loss_axis_lines(left_loss)["$c_{2}$"].get_ydata()) == [10.742, 2.3023]
    # The same scale, and the same colour for the same digit, in both.
    assert left.collections[0].norm is right.collections[0].norm
    colours = [loss_axis_lines(axis)["$c_{1}$"].get_color() for axis in (left_loss, right_loss)]
    assert np.array_equal(*colours)
    assert list(right_hidden.get_lines()[0].get_ydata()) == [0, 4, 8] and not left_hidden.get_lines()
    with open(path.with_suffix(".csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["step"], row["hidden_tokens"]) for row in rows] == [
        ("reference", "0", ""),
        ("reference", "500", ""),
        ("icot", "10", "0"),
        ("icot", "20", "4"),
        ("icot", "30", "8"),
    ]
    assert rows[1]["grad_norm_c0"] == "4.6278e-10" and rows[2]["loss_c2"] == ""
    with pytest.raises(ValueError, match="several runs"):
        plots.read_dynamics(path.with_suffix(".csv"))
    with pytest.raises(ValueError, match="2 runs and 1 labels"):
        plots.dynamics([reference, reference], tmp_path / "both.png", labels=["one"])


def test_steps_are_ascending_and_the_last_of_a_step_counts(tmp_path):
    loss, _ = write_run(tmp_path / "run", [100, 300, 200, 300])
    columns = plots.read_dynamics(tmp_path / "run")
    assert columns["step"] == [100, 200, 300]
    assert columns["loss_c1"] == [loss[1, 0], loss[1, 2], loss[1, 3]]


@pytest.mark.parametrize("steps", [[0], [5], [0, 5], [5, 6]])
def test_few_measurements_can_be_drawn(tmp_path, steps):
    write_run(tmp_path / "run", steps, places=1)
    assert plots.dynamics(tmp_path / "run", tmp_path / "few.png").exists()


def test_norms_that_are_zero_or_not_finite_can_be_drawn(tmp_path, figures):
    path = tmp_path / "run.csv"
    path.write_text("step,loss_c0,loss_c1,grad_norm_c0,grad_norm_c1\n1,0.0,nan,0.0,nan\n2,0.0,2.5,0.0,2.5\n")
    plots.dynamics(path, tmp_path / "run.png")
    path.write_text("step,loss_c0,grad_norm_c0\n1,0.0,0.0\n2,0.0,0.0\n")
    plots.dynamics(path, tmp_path / "zero.png")
    assert len(figures) == 2
    # Zero is drawn as the lowest colour, not as a hole.
    mesh = figures[0].axes[0].collections[0]
    assert np.array_equal(mesh.to_rgba(np.zeros(1)), mesh.to_rgba(np.array([mesh.norm.vmin])))


@pytest.mark.parametrize(
    "text, message",
    [
        ("step,loss_c0,grad_norm_c0\n", "no measurement"),
        ("step,loss_c0,loss_c1,grad_norm_c0\n0,1,1,1\n", "lacks grad_norm_c1"),
        ("step,loss_c0,grad_norm_c0\n0,1,1\n5,1,\n", "measurement 2 .* lacks grad_norm_c0"),
        ("loss_c0,grad_norm_c0\n1,1\n", "lacks step"),
    ],
)
def test_files_with_gaps_are_refused(tmp_path, text, message):
    path = tmp_path / "run.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        plots.read_dynamics(path)
