"""All drawing. Every figure is written together with the numbers it shows, as CSV beside it."""

import csv
import json
from pathlib import Path

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402


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
    top.legend(loc="lower right", frameon=True)
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
