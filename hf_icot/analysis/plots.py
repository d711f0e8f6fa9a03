"""All drawing. Every figure is written together with the numbers it shows, as CSV beside it."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np


matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import LogNorm  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

from .runs import compare as compare_runs  # noqa: E402
from .runs import read_metrics  # noqa: E402
from .runs import stages as stages_of  # noqa: E402


# Okabe and Ito's palette: told apart without red-green vision; line styles tell them apart in grey print.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
plt.rcParams |= {
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 10,
}


def _save(figure, path: Path, columns: dict[str, list]) -> None:
    figure.savefig(path)
    plt.close(figure)
    with open(path.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def read_dynamics(run: Path) -> dict[str, list]:
    """The columns of what a run measured for each answer digit c_k, by ascending step.

    Args:
        run: a run folder with a dynamics.jsonl, such a file, or a CSV of the columns below. Of several measurements
            at one step (a run that was taken up again) the last counts.

    Returns:
        `step`, `loss_c0`, `loss_c1`, … (nats), `grad_norm_c0`, … and, where the file has them, `hidden_tokens` and
        `accuracy_c0`, ….

    Raises:
        ValueError: the file has no measurement, lacks a column in some line, or holds several runs.
    """
    path = Path(run)
    path = path / "dynamics.jsonl" if path.is_dir() else path
    with open(path, newline="", encoding="utf-8") as file:
        if path.suffix == ".csv":
            rows = list(csv.DictReader(file))
            if rows and "run" in rows[0]:
                raise ValueError(f"{path} holds several runs: give the files that it was drawn from")
            rows = [{name: float(value) for name, value in row.items() if value} for row in rows]
        else:
            lines = [json.loads(line) for line in file]
            rows = [
                {name: line[name] for name in ("step", "hidden_tokens") if name in line}
                | {f"{m}_c{k}": v for m in ("loss", "accuracy", "grad_norm") for k, v in enumerate(line.get(m, []))}
                for line in lines
            ]
    if not rows:
        raise ValueError(f"{path} holds no measurement")
    places = sum(name.startswith("loss_c") for name in rows[0])
    needed = {"step", "loss_c0", *(f"{measure}_c{k}" for measure in ("loss", "grad_norm") for k in range(places))}
    for number, row in enumerate(rows, 1):
        if missing := sorted((needed | rows[0].keys()) - row.keys()):
            raise ValueError(f"measurement {number} of {path} lacks {', '.join(missing)}")
    rows = [row for _, row in sorted({int(row["step"]): row for row in rows}.items())]
    whole = ("step", "hidden_tokens")
    return {name: [int(row[name]) if name in whole else row[name] for row in rows] for name in rows[0]}


def dynamics(runs: Path | Sequence[Path], path: Path, labels: Sequence[str] | None = None) -> Path:
    """Draw which answer digit learns when: gradient norms as a heat map and, below, losses (arXiv 2510.00184).

    Both have the same logarithmic steps, on which step 0 stands at the left edge. Colours reach five decades down
    from the largest norm; losses above 3.5 nats (an untrained model with a large vocabulary) are off the axis. A
    third panel shows the hidden thinking tokens where their number changes in one of the runs.

    Args:
        runs: what `read_dynamics` reads, one run or several to stand side by side.
        path: the PNG to write.
        labels: printed above the runs; by default the names of their folders or files.

    Returns:
        The PNG's path; the CSV with the numbers stands beside it. For a single run `read_dynamics` reads it again,
        for several a column `run` tells them apart.

    Raises:
        ValueError: there are no runs, or another number of labels.
    """
    runs = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    if labels is None:
        labels = [run.parent.resolve().name if run.name == "dynamics.jsonl" else run.resolve().stem for run in runs]
    if not runs or len(labels) != len(runs):
        raise ValueError(f"{len(runs)} runs and {len(labels)} labels: give at least one run, and a label for each")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [read_dynamics(run) for run in runs]
    places = [sum(name.startswith("loss_c") for name in columns) for columns in data]
    norms = [np.array([c[f"grad_norm_c{k}"] for k in range(n)], float) for c, n in zip(data, places, strict=True)]

    finite = np.concatenate([x[np.isfinite(x) & (x > 0)] for x in norms])
    highest = finite.max(initial=1e-30)
    lowest = min(max(finite.min(initial=highest), highest * 1e-5), highest / 10)
    scale = LogNorm(lowest, highest, clip=True)
    most_hidden = max(max(columns.get("hidden_tokens", [0])) for columns in data)
    staged = any(len(set(columns.get("hidden_tokens", [0]))) > 1 for columns in data)
    figure, axes = plt.subplots(
        2 + staged,
        len(runs),
        sharex="col",
        squeeze=False,
        figsize=(1.8 + 4.8 * len(runs), 5.4 + staged),
        height_ratios=(1.2, 1.6, 0.6)[: 2 + staged],
        layout="constrained",
    )
    for column, values in enumerate(data):
        heat, curves = axes[:2, column]
        heat.set_title(labels[column])
        image = _draw_dynamics(heat, curves, values, norms[column], scale, max(places))
        for below in axes[1:, column]:
            below.tick_params(labelleft=column == 0)
        if staged:
            hidden = axes[2, column]
            hidden.set_ylim(-0.04 * most_hidden, 1.08 * most_hidden)
            if "hidden_tokens" in values:
                hidden.step(values["step"], values["hidden_tokens"], where="pre", color=VERMILION)
            else:
                hidden.text(0.5, 0.5, "not recorded", transform=hidden.transAxes, ha="center", va="center")
        axes[-1, column].set_xlabel("training step (log scale)")
    for axis, text in zip(axes[:, 0], ("answer digit", "loss (nats)", "thinking\ntokens hidden"), strict=False):
        axis.set_ylabel(text)
    below = any((x < lowest).any() for x in norms)
    bar = axes[0, -1].inset_axes((1.03, 0, 0.035, 1))
    bar.grid(False)
    figure.colorbar(image, cax=bar, label="gradient norm", extend="min" if below else "neither")
    handles, texts = axes[1, places.index(max(places))].get_legend_handles_labels()
    axes[1, -1].legend(
        handles, texts, loc="upper left", bbox_to_anchor=(1.01, 1.04), handlelength=3.2, fontsize=9, frameon=False
    )
    _save(figure, path, _dynamics_columns(data, labels))
    return path


def _draw_dynamics(heat, curves, columns: dict[str, list], norms: np.ndarray, scale: LogNorm, most_places: int):
    """One run's two panels; digits have the same colours in runs of `most_places` and less. Returns the heat map."""
    steps, places, edges = columns["step"], len(norms), _step_edges(columns["step"])
    image = heat.pcolormesh(edges, np.arange(places + 1) - 0.5, norms, norm=scale, cmap="viridis")
    heat.set(yticks=range(places), yticklabels=[f"$c_{{{k}}}$" for k in range(places)], ylim=(places - 0.5, -0.5))
    heat.grid(False)
    # Darker to lighter, four styles in turn: two digits of one style are far apart in grey print.
    shades, styles = plt.get_cmap("viridis")(np.linspace(0, 0.82, most_places)), ("-", "--", "-.", ":")
    curves.axhline(np.log(10), color=BLACK, linewidth=0.7, label="ln 10 = 2.303")
    for k in range(places):
        style = {"color": shades[k], "linestyle": styles[k % 4], "linewidth": 2.0 if k % 4 == 3 else 1.5}
        curves.plot(steps, columns[f"loss_c{k}"], label=f"$c_{{{k}}}$", **style)
    curves.set_ylim(-0.05, 3.5)
    first = next((step for step in steps if step > 0), 1)
    if steps[0] > 0:
        heat.set_xscale("log")
    else:
        heat.set_xscale("symlog", linthresh=first, linscale=0.4)
        decades = 10.0 ** np.arange(np.ceil(np.log10(first)), np.log10(max(edges[-1], 1)) + 1)
        minor = np.outer(decades / 10, np.arange(2, 10)).ravel()
        heat.set_xticks([0, *decades])
        heat.set_xticks(minor[minor >= first], minor=True)
    heat.set_xlim(edges[0], edges[-1])
    return image


def _step_edges(steps: Sequence[int]) -> np.ndarray:
    """Borders of the cells around ascending steps: halfway between neighbours on a log scale. [len(steps) + 1]"""
    positive = np.array([step for step in steps if step > 0], float)
    if len(positive) == 0:
        return np.array([0.0, 1.0])
    middle = np.sqrt(positive[1:] * positive[:-1])
    last = positive[-1] * (np.sqrt(positive[-1] / positive[-2]) if len(positive) > 1 else 2)
    first = [0.0, positive[0] / 2] if steps[0] <= 0 else [positive[0] ** 2 / (middle[0] if len(middle) else last)]
    return np.array([*first, *middle, last])


def _dynamics_columns(data: list[dict[str, list]], labels: Sequence[str]) -> dict[str, list]:
    """The drawn columns of all runs, one below the other; empty cells where a run has no such column."""
    names = {name: None for columns in data for name in columns if not name.startswith("accuracy")}
    table = {"run": [label for label, c in zip(labels, data, strict=True) for _ in c["step"]]} if len(data) > 1 else {}
    for name in names:
        table[name] = [value for columns in data for value in columns.get(name, [""] * len(columns["step"]))]
    return table


def learning_curve(run: Path, title: str = "", path: Path | None = None) -> Path:
    """Draw held-out accuracy and hidden thinking tokens against steps.

    Args:
        run: a run folder, whose metrics.jsonl is read.
        title: printed above the figure.
        path: the PNG to write; `figures/learning_curve.png` in the run folder if None.

    Returns:
        The PNG's path; the CSV with the numbers stands beside it.
    """
    path = Path(path or Path(run) / "figures" / "learning_curve.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A stage ends where the next begins: its last evaluation and the next one's first steps share a step number.
    lines = [line for line in read_metrics(run) if line["event"] in ("eval", "stage")]
    steps = [line["step"] for line in lines]
    exact = [line["exact_match"] for line in lines]
    digits = [sum(line["digit_accuracy"]) / len(line["digit_accuracy"]) for line in lines]
    hidden = [line["hidden_tokens"] for line in lines]

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 4.6), height_ratios=(3, 1.3), layout="constrained"
    )
    top.plot(steps, exact, color=BLUE, marker="o", markersize=2.5, label="exact match: every target token right")
    top.plot(steps, digits, color=ORANGE, linestyle="--", label="answer digits right")
    top.set(ylim=(-0.02, 1.02), ylabel="held-out accuracy")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    bottom.step([0, *steps], [hidden[0], *hidden], where="pre", color=VERMILION)
    bottom.set(xlabel="training step", ylabel="thinking\ntokens hidden", ylim=(0, max(1, max(hidden)) * 1.08))
    if title:
        top.set_title(title)
    _save(
        figure,
        path,
        {"step": steps, "exact_match": exact, "mean_digit_accuracy": digits, "hidden_tokens": hidden},
    )
    return path


def schedule(stages: Sequence, max_steps: int, path: Path) -> Path:
    """Draw the thinking tokens that a schedule hides against steps.

    Args:
        stages: `hf_icot.curriculum.Stage`s, in order.
        max_steps: where the run ends, and with it the figure.
        path: the PNG to write.

    Returns:
        The PNG's path; a CSV of the stages that come before `max_steps` stands beside it.

    Raises:
        ValueError: no stage begins before `max_steps`.
    """
    shown = [stage for stage in stages if stage.start < max_steps]
    if not shown:
        raise ValueError(f"none of {len(stages)} stages begins before max_steps={max_steps}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    starts, hidden = [stage.start for stage in shown], [stage.hidden for stage in shown]
    most, left_out = max(1, *hidden), len(stages) - len(shown)
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    axes.step([*starts, max_steps], [*hidden, hidden[-1]], where="post", color=VERMILION, linewidth=1.8)
    axes.set(xlim=(0, max_steps), ylim=(-0.04 * most, 1.08 * most))
    axes.set(xlabel="training step", ylabel="thinking\ntokens hidden")
    axes.yaxis.get_major_locator().set_params(integer=True)
    title = (
        f"{len(shown)} stage{'s' * (len(shown) > 1)}, the last from step {starts[-1]:,}: {hidden[-1]} tokens hidden"
    )
    axes.set_title(title + (f"; {left_out} more would follow" if left_out else ""), fontsize=10)
    ends = [*starts[1:], max_steps]
    _save(figure, path, {"stage": [x.index for x in shown], "start": starts, "end": ends, "hidden_tokens": hidden})
    return path


def accuracy_by_hidden(run: Path, path: Path | None = None, title: str = "") -> Path:
    """Draw the validation accuracy at each stage's end against the thinking tokens hidden in it.

    Digit accuracies are teacher forced, as the run logs them: a digit is right given the true tokens before it, so
    that an error at one place does not count at the next.

    Args:
        run: a run folder with at least one stage at its end.
        path: the PNG to write; `figures/accuracy_by_hidden.png` in the run folder if None.
        title: printed above the figure.

    Returns:
        The PNG's path; the CSV with the numbers stands beside it.

    Raises:
        ValueError: the folder is no run, or none of its stages has ended yet.
    """
    ended = stages_of(run)
    if not ended:
        raise ValueError(f"no stage of {run} has ended yet")
    path = Path(path or Path(run) / "figures" / "accuracy_by_hidden.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden, exact = [x["hidden_tokens"] for x in ended], [x["exact_match"] for x in ended]
    digits = np.array([x["digit_accuracy"] for x in ended])
    columns = {"hidden_tokens": hidden, "exact_match": exact, "mean_digit_accuracy": digits.mean(1).tolist()}
    places = {f"accuracy_c{k}": values.tolist() for k, values in enumerate(digits.T)}
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    shades, styles = (
        plt.get_cmap("viridis")(np.linspace(0, 0.82, len(places))),
        ("--", "-.", ":", (0, (6, 1, 1, 1, 1, 1))),
    )
    alone = len(ended) == 1  # no line, but dots and ticks
    heavy = {"linewidth": 2.2, "marker": "o", "markersize": 6 if alone else 3.5, "zorder": 3}
    mean, mean_label = columns["mean_digit_accuracy"], "mean of digits,\ngiven the true\ntokens before"
    axes.plot(hidden, mean, color=ORANGE, **heavy, label=mean_label)
    axes.plot(hidden, exact, color=BLACK, **heavy, label="exact match,\nchain and answer")
    for k, values in enumerate(places.values()):
        style = {"color": shades[k], "linestyle": styles[k % 4], "linewidth": 1.2}
        axes.plot(hidden, values, **style, marker="_" if alone else "", markersize=24, label=f"$c_{{{k}}}$")
    axes.set(ylim=(-0.02, 1.02), xlabel="thinking tokens hidden", ylabel="held-out accuracy at the stage's end")
    axes.set_xlim(*((hidden[0] - 1, hidden[0] + 1) if alone else (None, None)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title)
    figure.legend(loc="outside right upper", handlelength=3.2, fontsize=9, frameon=False)
    _save(figure, path, columns | places)
    return path


def compare(runs: Sequence[Path] | Sequence[dict], path: Path) -> Path:
    """Draw several runs' exact match against examples, tokens and wall time, and what they hid below it.

    Exact match is of what is left to write at that time, chain and answer. Lines are thin as long as some of the
    chain is to be written, and heavy with markers from where all thinking tokens are hidden. A run without these
    (its folder does not tell its batch size, or the length of its chain) is missing in that panel.

    Args:
        runs: run folders, or what `runs.compare` returned for them.
        path: the PNG to write.

    Returns:
        The PNG's path. The CSV beside it has a row for each evaluation, and a column `run`.

    Raises:
        ValueError: a folder is no run, or none of them has been evaluated yet.
    """
    rows = runs if runs and all(isinstance(run, dict) for run in runs) else compare_runs(runs)
    if not any(row["curves"]["step"] for row in rows):
        raise ValueError(f"no evaluation to draw yet in {', '.join(row['path'] for row in rows)}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    longest = max((row["seconds"] or 0 for row in rows), default=0)
    per, unit = next((x for x in ((3600, "hours"), (60, "minutes")) if longest >= 2 * x[0]), (1, "seconds"))
    figure, axes = plt.subplots(
        2, 3, sharex="col", sharey="row", figsize=(11, 4.8), height_ratios=(3, 1), layout="constrained"
    )
    for number, row in enumerate(rows):
        _draw_run(axes, row, number, {"examples": 1, "tokens": 1, "seconds": per})
    for axis in axes[1, :2]:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis, label in zip(axes[1], ("training examples", "tokens processed", f"wall time ({unit})"), strict=True):
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
    axes[0, 0].set(ylim=(-0.02, 1.02), ylabel="held-out exact match")
    axes[1, 0].set(ylim=(-0.06, 1.08), ylabel="chain hidden")
    axes[0, 1].set_title("heavy: every thinking token hidden", fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(rows), 5),
        handlelength=4.5,
        fontsize=9,
        frameon=False,
    )
    curves = ("step", "examples", "tokens", "seconds", "exact_match", "hidden_tokens")
    table = {"run": [row["name"] for row in rows for _ in row["curves"]["step"]]}
    _save(figure, path, table | {name: [x for row in rows for x in row["curves"][name]] for name in curves})
    return path


def _draw_run(axes: np.ndarray, row: dict, number: int, units: dict[str, float]) -> None:
    """One run's lines in the panels [2, len(units)] of `compare`."""
    # As many styles as do not divide the colours: 35 runs differ in one of them.
    color = (BLUE, VERMILION, GREEN, BLACK, ORANGE, PURPLE, SKY)[number % 7]
    style = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))[number % 5]
    marker = "osD^vPX"[number % 7]
    curves, thinking = row["curves"], row["thinking_tokens"]
    exact, hidden = np.array(curves["exact_match"], float), np.array(curves["hidden_tokens"], float)
    bare = np.full(len(hidden), False) if thinking is None else hidden == thinking
    for column, (name, unit) in enumerate(units.items()):
        top, bottom = axes[:, column]
        values = np.array(curves[name], float) / unit  # NaN where unknown, which draws nothing
        top.plot(values, exact, color=color, linestyle=style, linewidth=0.9, alpha=0.8)
        spacing = max(1, bare.sum() // 6)
        heavy = {"linewidth": 2.2, "marker": marker, "markersize": 4.5, "markevery": int(spacing)}
        top.plot(values[bare], exact[bare], color=color, linestyle=style, **heavy, label=row["name"])
        if thinking:
            x, y = np.concatenate([[0], values]), np.concatenate([hidden[:1], hidden]) / thinking
            bottom.step(x, y, where="pre", color=color, linestyle=style, linewidth=1.3)
