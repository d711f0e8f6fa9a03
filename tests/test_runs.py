"""Reading and drawing run folders: small ones written by hand, and one that the trainer leaves."""

import csv
import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml
from matplotlib.colors import to_rgba
from transformers import set_seed

from hf_icot import ICoTConfig, ICoTForCausalLM
from hf_icot.analysis import plots, runs
from hf_icot.cli import main
from hf_icot.curriculum import CurriculumArguments, Stage, create_schedule
from hf_icot.tasks.multiplication import MultiplicationTask
from hf_icot.trainer import ICoTTrainer, ICoTTrainingArguments


RECIPE = {"task": "multiplication", "digits": [2, 2], "method": "icot", "schedule": "fixed", "max_steps": 60}
RECIPE |= {"per_device_train_batch_size": 10, "gradient_accumulation_steps": 2, "running_sum_head": "none"}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Few dots: drawing takes most of the tests' time."""
    monkeypatch.setitem(plt.rcParams, "figure.dpi", 40)


@pytest.fixture
def figures(monkeypatch):
    """Figures as they were saved."""
    kept, close = [], plt.close
    monkeypatch.setattr(plots.plt, "close", kept.append)
    yield kept
    for figure in kept:
        close(figure)


def line(event, step, stage, hidden, exact=None, digits=None, **more):
    values = {"event": event, "step": step, "stage": stage, "hidden_tokens": hidden}
    values |= {"tokens": 100 * step, "seconds": step / 2}
    if exact is not None:
        values |= {"exact_match": exact, "digit_accuracy": digits or [1.0, exact, 0.5]}
    return values | more


# 2x2 has 8 thinking tokens. The exact match of 0.995 at step 20 is with half of them shown.
LINES = [
    line("train", 5, 0, 0, loss=2.0),
    line("eval", 10, 0, 0, 0.5),
    line("stage", 20, 0, 0, 0.9, generated_exact_match=0.92),
    line("eval", 20, 1, 4, 0.995),
    line("stage", 30, 1, 4, 0.8, reason="exact match 0.9 after 20 steps"),
    line("eval", 40, 2, 8, 0.98),
    line("eval", 50, 2, 8, 0.992),
    line("train", 55, 2, 8, loss=0.1),
    line("stage", 60, 2, 8, 1.0, [1.0, 1.0, 0.9996]),
]


def write_run(folder, lines=LINES, recipe=None, results=None):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    if recipe is not False:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | (recipe or {})))
    if results:
        (folder / "results.json").write_text(json.dumps(results))
    return folder


def results(exact=0.97, steps=60, examples=1200, **totals):
    test = {"exact_match": exact, "digit_accuracy": [1.0, 1.0, exact]}
    return {"test": test, "training": {"steps": steps, "examples": examples, **totals}}


def read_csv(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- lines and stages ----


@pytest.mark.parametrize("tail", ["", "\n", '{"event": "eval", "st', '{"event": "eval", "st\n\n', "\0\0\0"])
def test_a_last_line_that_is_empty_or_cut_is_passed_over(tmp_path, tail):
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(tail)
    assert runs.read_metrics(run) == LINES == plots.read_metrics(str(run))


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"event": "ev\n{"event": "x"}\n', r"line 1 of .*metrics.jsonl is no JSON"),
        ('{"event": "x"}\n[1, 2]\n', r"line 2 of .* is no measurement: \[1, 2\]"),
        (json.dumps(LINES[0]) + '\n{"event": "eval", "step": 1, "stage": 0}\n', "line 2 .* lacks hidden_tokens, tok"),
        (json.dumps(LINES[0] | {"event": "stage"}) + "\n", "line 1 .* lacks exact_match, digit_accuracy"),
    ],
)
def test_other_damage_is_refused_with_its_place(tmp_path, text, message):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        runs.read_metrics(run)


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is no run folder: it holds neither metrics.jsonl nor recipe.yaml"):
        runs.stages(tmp_path / "empty")
    with pytest.raises(ValueError, match="there is no such folder"):
        runs.compare([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="at least one run"):
        runs.compare([])


def test_stages_and_their_csv(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "stages" / "hidden-004").mkdir(parents=True)
    first, second, third = runs.stages(run)
    assert second == {
        "stage": 1,
        "hidden_tokens": 4,
        "step": 30,
        "tokens": 3000,
        "seconds": 15.0,
        "exact_match": 0.8,
        "digit_accuracy": [1.0, 0.8, 0.5],
        "generated_exact_match": None,
        "reason": "exact match 0.9 after 20 steps",
        "path": str(run / "stages" / "hidden-004"),
    }
    assert first["generated_exact_match"] == 0.92 and first["reason"] is third["reason"] is first["path"] is None
    path = runs.write_stages_csv(run)
    assert path == run / "stages.csv"
    rows = read_csv(path)
    assert [(row["hidden_tokens"], row["accuracy_c1"], row["path"]) for row in rows] == [
        ("0", "0.9", ""),
        ("4", "0.8", "stages/hidden-004"),
        ("8", "1.0", ""),
    ]
    assert rows[0]["generated_exact_match"] == "0.92" and rows[1]["reason"] == second["reason"]
    # A run in its first stage has a header alone.
    begun = write_run(tmp_path / "begun", LINES[:2])
    assert runs.stages(begun) == [] and read_csv(runs.write_stages_csv(begun)) == []


# ---- comparing ----


def test_a_finished_run(tmp_path):
    (row,) = runs.compare([write_run(tmp_path / "run", results=results())])
    curves = row.pop("curves")
    assert row == {
        "name": "run",
        "path": str(tmp_path / "run"),
        "finished": True,
        "method": "icot",
        "schedule": "fixed",
        "running_sum_head": "none",
        "max_steps": 60,
        "stages": 3,
        "hidden_tokens": 8,
        "thinking_tokens": 8,
        "steps": 60,
        "examples": 1200,
        "tokens": 6000,
        "seconds": 30.0,
        "exact_match": 1.0,
        "digit_accuracy": [1.0, 1.0, 0.9996],
        "test_exact_match": 0.97,
        "test_digit_accuracy": [1.0, 1.0, 0.97],
        # Not 0.995 at step 20, where half of the chain is shown.
        "reached": {"step": 50, "examples": 1000, "tokens": 5000, "seconds": 25.0},
    }
    assert curves["step"] == [10, 20, 20, 30, 40, 50, 60] and curves["hidden_tokens"] == [0, 0, 4, 4, 8, 8, 8]
    assert curves["exact_match"] == [0.5, 0.9, 0.995, 0.8, 0.98, 0.992, 1.0]
    assert curves["examples"] == [20 * step for step in curves["step"]]
    assert curves["tokens"] == [100 * step for step in curves["step"]] and curves["seconds"][-1] == 30.0


def test_unfinished_runs_are_read_as_far_as_they_are(tmp_path):
    going = write_run(tmp_path / "going", LINES[:5])
    begun = write_run(tmp_path / "begun", [], recipe={"method": "sft"})
    only_trained = write_run(tmp_path / "trained", LINES[:1])
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    rows = runs.compare([going, begun, only_trained, tmp_path / "started"])
    assert [row["finished"] for row in rows] == [False] * 4 and [row["reached"] for row in rows] == [None] * 4
    first = rows[0]
    assert (first["steps"], first["stages"], first["exact_match"], first["hidden_tokens"]) == (30, 2, 0.8, 4)
    assert first["test_exact_match"] is None and first["examples"] == 600
    assert rows[2]["steps"] == 5 and rows[2]["tokens"] == 500 and rows[2]["exact_match"] is None
    for row in (rows[1], rows[3]):
        assert row["steps"] is row["examples"] is row["seconds"] is row["exact_match"] is None and row["stages"] == 0
    assert rows[1]["method"] == "sft" and rows[1]["schedule"] is None and rows[3]["curves"]["tokens"] == []
    text = runs.table(rows)
    assert text.count("(unfinished)") == 4 and "30/60" in text and "never" not in text


def test_the_last_stage_depends_on_the_method(tmp_path):
    """A chain that is always written is never hidden; of one of unknown length nobody knows whether all is."""
    shown = [line("eval", 10, 0, 0, 0.5), line("stage", 20, 0, 0, 1.0)]
    hidden = [line("eval", 10, 0, 7, 0.99), line("stage", 20, 0, 7, 1.0)]
    text = {"task": "text", "digits": [3, 2]}
    rows = runs.compare(
        [
            write_run(tmp_path / "cot", shown, {"method": "cot"}, results()),
            write_run(tmp_path / "sft_text", hidden, text | {"method": "sft"}),
            write_run(tmp_path / "icot_text", LINES, text, results()),
            write_run(tmp_path / "icot_text_going", LINES, text),
            write_run(tmp_path / "recorded", LINES, text, results(thinking_tokens=9)),
            write_run(tmp_path / "mixed", LINES, {"digits": [2, 2, 3, 3]}),
            write_run(tmp_path / "bare", LINES, recipe=False),
        ]
    )
    assert [row["thinking_tokens"] for row in rows] == [8, 7, 8, None, 9, 24, None]
    assert [row["reached"] and row["reached"]["step"] for row in rows] == [20, 10, 50, None, None, None, None]
    assert rows[-1]["method"] is None and rows[-1]["examples"] is None
    assert rows[-1]["curves"]["examples"] == [None] * 7
    assert "sft" in runs.table(rows) and runs.table(rows).count("never") == 2


def test_the_batch_size_counts_all_processes(tmp_path):
    finished = write_run(tmp_path / "finished", results=results(examples=2400))
    going = write_run(tmp_path / "going")
    for step, damaged in ((30, False), (60, True)):
        folder = going / "state" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        body = json.dumps({"values": {"step": step, "examples_seen": 60 * step}})
        (folder / "state.json").write_text("{" if damaged else json.dumps({"body": body}))
    rows = runs.compare([finished, going])
    assert [row["examples"] for row in rows] == [2400, 3600]


def test_names_tell_runs_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/run", "b/run", "other"):
        write_run(tmp_path / name)
    assert [row["name"] for row in runs.compare(["a/run", "b/run/", "other"])] == ["a/run", "b/run", "other"]
    monkeypatch.chdir(tmp_path / "other")
    assert runs.compare(["."])[0]["name"] == "other"
    with pytest.raises(ValueError, match="other is given 2 times"):
        runs.compare([".", "../other"])


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("recipe.yaml", "a: [", "recipe.yaml is no YAML"),
        ("recipe.yaml", "- a", "recipe.yaml is no mapping"),
        ("results.json", '{"test": {', "results.json is no JSON"),
        ("results.json", '{"test": {}}', "results.json lacks the objects test and training"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, text, message):
    run = write_run(tmp_path / "run")
    (run / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        runs.compare([run])


# ---- the table and the command ----


def test_the_table(tmp_path):
    long = [line("stage", 100_000, 0, 8, 0.28, [1.0, 0.25, 0.9999])]
    rows = runs.compare(
        [
            write_run(tmp_path / "icot", results=results()),
            write_run(tmp_path / "a|b", long, {"method": "sft", "running_sum_head": "joint"}, results(0.3, 10, 5120)),
        ]
    )
    lines = runs.table(rows).splitlines()
    assert len(lines) == 3 and lines[0].split()[:5] == ["run", "method", "stages", "hidden", "steps"]
    # Aligned: words at the left, numbers at the right.
    assert lines[1].index("icot, fixed") == lines[2].index("sft + running sums (joint)") == lines[0].index("method")
    end = lines[0].index("steps") + len("steps")
    assert lines[1][:end].endswith(" 60") and lines[2][:end].endswith(" 100,000")
    assert lines[1].split()[-2:] == ["5,000", "0:00:25"] and lines[2].split()[-2:] == ["never", "never"]
    # 0.9996 is not 1.
    assert "c_2 0.999" in lines[1] and "c_1 0.250" in lines[2]
    assert {"51.2M", "10M", "13:53:20", "0.280", "0.749", "0.300"} <= set(lines[2].split())
    markdown = runs.table(rows, markdown=True).splitlines()
    assert len({len(x) for x in markdown}) == 1 and markdown[3].startswith(r"| a\|b ")
    assert set(markdown[1]) == set("|-: ") and markdown[1].count("-:") == 12


def test_the_command(tmp_path, capsys):
    done = write_run(tmp_path / "done", results=results())
    going = write_run(tmp_path / "going", LINES[:5])
    assert main(["compare", str(done), str(going)]) == 0
    printed = capsys.readouterr()
    assert printed.out == runs.table(runs.compare([done, going])) + "\n" and printed.err == ""
    assert {p.name for p in tmp_path.iterdir()} == {"done", "going"}
    assert main(["compare", str(done), "--markdown"]) == 0
    assert capsys.readouterr().out == runs.table(runs.compare([done]), markdown=True) + "\n"
    out = tmp_path / "new" / "folder"
    assert main(["compare", str(done), str(going), "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((out / "compare.json").read_text()) == runs.compare([done, going])
    assert "compare.png" in printed.err and (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_csv(out / "compare.csv")) == 7 + 4
    assert main(["compare", str(done), str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and f"error: {tmp_path} is no run folder" in printed.err
    begun = write_run(tmp_path / "begun", [])
    assert main(["compare", str(begun), "--out", str(tmp_path / "none")]) == 2
    assert "no evaluation to draw yet in" in capsys.readouterr().err and not (tmp_path / "none").exists()


# ---- figures ----


def test_accuracy_by_hidden(tmp_path, figures):
    run = write_run(tmp_path / "run")
    path = plots.accuracy_by_hidden(run, title="two by two")
    assert path == run / "figures" / "accuracy_by_hidden.png" and path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    lines = axes.get_lines()
    digits = np.array([[1.0, 0.9, 0.5], [1.0, 0.8, 0.5], [1.0, 1.0, 0.9996]])
    assert [list(x.get_xdata()) for x in lines] == [[0, 4, 8]] * 5
    drawn = np.array([x.get_ydata() for x in lines])
    assert np.allclose(drawn, [digits.mean(1), [0.9, 0.8, 1.0], *digits.T])
    assert lines[0].get_linewidth() > lines[2].get_linewidth()
    assert len({tuple(to_rgba(x.get_color())) for x in lines}) == 5
    assert axes.get_title() == "two by two" and "hidden" in axes.get_xlabel()
    rows = read_csv(path.with_suffix(".csv"))
    assert [float(row["mean_digit_accuracy"]) for row in rows] == pytest.approx(digits.mean(1))
    assert [row["accuracy_c2"] for row in rows] == ["0.5", "0.5", "0.9996"]
    alone = write_run(tmp_path / "alone", [LINES[-1]])
    plots.accuracy_by_hidden(alone, tmp_path / "alone.png")
    (axes,) = figures[1].axes
    assert all(x.get_marker() in ("o", "_") for x in axes.get_lines()) and set(axes.get_xticks()) <= {6, 7, 8, 9, 10}
    with pytest.raises(ValueError, match="no stage of .*begun has ended yet"):
        plots.accuracy_by_hidden(write_run(tmp_path / "begun", LINES[:2]))


def test_curves_of_several_runs(tmp_path, figures):
    icot = write_run(tmp_path / "icot", results=results())
    bare = write_run(tmp_path / "bare", LINES[:5], recipe=False)
    path = plots.compare([icot, bare], tmp_path / "figures" / "compare.png")
    top, bottom = np.array(figures[0].axes).reshape(2, 3)
    assert [x.get_xlabel() for x in bottom] == ["training examples", "tokens processed", "wall time (seconds)"]
    exact = [0.5, 0.9, 0.995, 0.8, 0.98, 0.992, 1.0]
    for axes, scale in zip(top, (20, 100, 0.5), strict=True):
        thin, heavy = axes.get_lines()[:2]
        assert list(thin.get_xdata()) == [scale * step for step in (10, 20, 20, 30, 40, 50, 60)]
        assert list(thin.get_ydata()) == exact
        # Heavy from where nothing of the chain is left.
        assert list(heavy.get_ydata()) == exact[-3:] and heavy.get_linewidth() > thin.get_linewidth()
    hidden = bottom[0].get_lines()[0]
    assert list(hidden.get_ydata()) == [0, 0, 0, 0.5, 0.5, 1, 1, 1] and hidden.get_xdata()[0] == 0
    # The other run's folder tells neither its batch size nor the length of its chain.
    assert np.isnan(top[0].get_lines()[2].get_xdata()).all() and len(bottom[0].get_lines()) == 1
    assert list(top[1].get_lines()[2].get_xdata()) == [1000, 2000, 2000, 3000]
    first, second = (top[1].get_lines()[k] for k in (0, 2))
    assert first.get_color() != second.get_color() and first.get_linestyle() != second.get_linestyle()
    rows = read_csv(path.with_suffix(".csv"))
    assert [row["run"] for row in rows] == ["icot"] * 7 + ["bare"] * 4
    assert rows[5]["exact_match"] == "0.992" and rows[5]["examples"] == "1000" and rows[-1]["examples"] == ""
    # What was read already is drawn as it is.
    again = plots.compare(runs.compare([icot, bare]), tmp_path / "again.png")
    assert again.with_suffix(".csv").read_text() == path.with_suffix(".csv").read_text()


def test_schedule(tmp_path, figures):
    stages = create_schedule(CurriculumArguments(schedule="log", steps_per_stage=100), 24).stages
    path = plots.schedule(stages, 350, tmp_path / "plans" / "plan.png")
    (axes,) = figures[0].axes
    (drawn,) = axes.get_lines()
    assert list(drawn.get_xdata()) == [0, 100, 200, 300, 350] and list(drawn.get_ydata()) == [0, 12, 18, 21, 21]
    assert "1 more would follow" in axes.get_title() and axes.get_xlim() == (0, 350)
    assert read_csv(path.with_suffix(".csv"))[-1] == {
        "stage": "3",
        "start": "300",
        "end": "350",
        "hidden_tokens": "21",
    }
    plots.schedule([Stage(0, 0, 0)], 10, tmp_path / "cot.png")
    assert list(figures[1].axes[0].get_lines()[0].get_ydata()) == [0, 0]
    with pytest.raises(ValueError, match="none of 0 stages"):
        plots.schedule([], 10, tmp_path / "none.png")


# ---- what the trainer leaves ----


def test_a_run_of_the_trainer(tmp_path):
    splits = MultiplicationTask((2, 2), train_size=300, valid_size=40, test_size=10, seed=0).splits()
    set_seed(0)
    trainer = ICoTTrainer(
        ICoTForCausalLM(ICoTConfig(n_embd=16, n_positions=splits["train"].max_length)),
        ICoTTrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=10,
            per_device_train_batch_size=8,
            warmup_steps=2,
            eval_steps=5,
            logging_steps=3,
            disable_tqdm=True,
        ),
        CurriculumArguments(pretrain_steps=4, remove_per_stage=4, steps_per_stage=2),
        splits["train"],
        splits["validation"],
    )
    totals = trainer.train()
    ended = runs.stages(tmp_path / "run")
    assert [(x["step"], x["hidden_tokens"]) for x in ended] == [(4, 0), (6, 4), (10, 8)]
    for stage in ended:
        kept = json.loads(
            (tmp_path / "run" / "stages" / f"hidden-{stage['hidden_tokens']:03d}/metrics.json").read_text()
        )
        assert stage["path"] and kept["digit_accuracy"] == stage["digit_accuracy"]
    assert len(read_csv(runs.write_stages_csv(tmp_path / "run"))) == 3
    # No recipe, no results: the batch size is known from the state.
    (row,) = runs.compare([tmp_path / "run"])
    assert not row["finished"] and row["examples"] == totals["examples"] == 80
    assert (row["steps"], row["tokens"], row["stages"]) == (10, totals["tokens"], 3)
    assert row["exact_match"] == totals["validation_exact_match"]
    assert row["curves"]["step"] == [4, 5, 6, 10] and row["curves"]["examples"][-1] == 80
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"max_steps": 10}))
    (row,) = runs.compare([tmp_path / "run"])
    assert row["thinking_tokens"] == 8 and "10/10" in runs.table([row])
    assert plots.accuracy_by_hidden(tmp_path / "run").exists()
    assert plots.compare([row], tmp_path / "compare.png").exists()
