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


def read_metrics(run: Path) -> list[dict]:
    """The lines of a run folder's metrics.jsonl."""
    with open(Path(run) / "metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


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
        max_steps: where the run ends.
        path: the PNG to write; a CSV of the stages stands beside it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = [stage for stage in stages if stage.start < max_steps]
    starts, hidden = [stage.start for stage in shown], [stage.hidden for stage in shown]
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    axes.step([*starts, max_steps], [*hidden, hidden[-1]], where="post", color=VERMILION)
    axes.set(xlabel="training step", ylabel="thinking tokens hidden", ylim=(0, max(1, *hidden) * 1.08))
    _save(figure, path, {"start": starts, "hidden_tokens": hidden})
    return path
