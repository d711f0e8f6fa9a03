"""Reading run folders: their measurements, the end of each stage, and several runs side by side."""

import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml


# An exact match that counts as solved.
SOLVED = 0.99
_ALWAYS = ("step", "stage", "hidden_tokens", "tokens", "seconds")
_EVALUATED = (*_ALWAYS, "exact_match", "digit_accuracy")
_FIELDS = {"train": _ALWAYS, "eval": _EVALUATED, "stage": _EVALUATED}


def read_metrics(run: Path | str) -> list[dict]:
    """The lines of a run folder's metrics.jsonl; none where the run has not written any yet.

    A last line that is empty or cut off, as a process that is killed or still writing leaves it, is passed over.

    Raises:
        ValueError: the folder is no run, or another line is damaged or lacks a field.
    """
    run = Path(run)
    path = run / "metrics.jsonl"
    if not path.is_file():
        if (run / "recipe.yaml").is_file():
            return []
        reason = "it holds neither metrics.jsonl nor recipe.yaml" if run.is_dir() else "there is no such folder"
        raise ValueError(f"{run} is no run folder: {reason}")
    texts = [(number, text) for number, text in enumerate(path.read_bytes().split(b"\n"), 1) if text.strip()]
    lines = []
    for number, text in texts:
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == texts[-1][0]:
                break
            raise ValueError(f"line {number} of {path} is no JSON: {error}") from error
        if not isinstance(line, dict) or "event" not in line:
            raise ValueError(f"line {number} of {path} is no measurement: {text[:80].decode(errors='replace')}")
        if missing := [name for name in _FIELDS.get(line["event"], ()) if name not in line]:
            raise ValueError(f"line {number} of {path} lacks {', '.join(missing)}")
        lines.append(line)
    return lines


def stages(run: Path | str) -> list[dict]:
    """What a run had reached at the end of each stage, in order.

    Returns:
        Dicts of `stage` (index), `hidden_tokens`, `step`, `tokens` and `seconds` (of the run, up to the stage's end),
        `exact_match` and `digit_accuracy` (a list, the least significant digit first), both teacher forced on the
        validation problems; `generated_exact_match` (the generated answer is right) and `reason` (why the stage
        began), None where the line has none; `path` of the stage's model folder, None where it is gone.
    """
    found = []
    for line in read_metrics(run):
        if line["event"] == "stage":
            folder = Path(run) / "stages" / f"hidden-{line['hidden_tokens']:03d}"
            values = {name: line[name] for name in _EVALUATED}
            values |= {name: line.get(name) for name in ("generated_exact_match", "reason")}
            found.append(values | {"path": str(folder) if folder.is_dir() else None})
    return found


def write_stages_csv(run: Path | str) -> Path:
    """Write what `stages` returns to `stages.csv` in the run folder.

    There is a row for each stage, with a column `accuracy_c0`, `accuracy_c1`, … for each place of the answer; `path`
    is relative to the run folder.

    Returns:
        The CSV's path.
    """
    rows = stages(run)
    places = max((len(row["digit_accuracy"]) for row in rows), default=0)
    first = ("stage", "hidden_tokens", "step", "tokens", "seconds", "exact_match", "generated_exact_match")
    path = Path(run) / "stages.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*first, *(f"accuracy_c{k}" for k in range(places)), "reason", "path"])
        for row in rows:
            digits = [*row["digit_accuracy"], *[None] * (places - len(row["digit_accuracy"]))]
            folder = Path(row["path"]).relative_to(run).as_posix() if row["path"] else None
            writer.writerow([*(row[name] for name in first), *digits, row["reason"], folder])
    return path


def compare(runs: Sequence[Path | str]) -> list[dict]:
    """What each of several runs was, cost and reached; unfinished ones as far as they are.

    Returns:
        For each run a dict of plain values, None where the folder does not tell:
        `name` (of the folder; its path where two have the same name), `path`;
        `finished`: it has a results.json, otherwise it is still going or was interrupted;
        `method`, `schedule` (icot only), `running_sum_head` and `max_steps` of its recipe;
        `stages`: how many it has been in; `hidden_tokens` now, of `thinking_tokens` in the longest chain;
        `steps`, `examples` (steps times batch size), `tokens` and `seconds` (with evaluations) up to its last line;
        `exact_match` and `digit_accuracy` of the last validation, teacher forced;
        `test_exact_match` and `test_digit_accuracy`, generated, of a finished run;
        `reached`: `step`, `examples`, `tokens` and `seconds` at the first evaluation with an exact match of 0.99 in
        the curriculum's last stage, in which every thinking token is hidden ("cot": none);
        `curves`: lists `step`, `examples`, `tokens`, `seconds`, `exact_match` and `hidden_tokens`, a value for each
        evaluation. Exact match is of what was left to write at that time, chain and answer.

    Raises:
        ValueError: there is no run, one is given twice, or a folder is damaged or no run.
    """
    return [_summary(Path(run), name) for run, name in zip(runs, _names(runs), strict=True)]


def _names(runs: Sequence[Path | str]) -> list[str]:
    if not runs:
        raise ValueError("give at least one run folder")
    folders = [Path(run).resolve() for run in runs]
    for folder, times in Counter(folders).items():
        if times > 1:
            raise ValueError(f"the run {folder} is given {times} times")
    counts = Counter(folder.name for folder in folders)
    return [f.name if counts[f.name] == 1 else str(Path(run)) for f, run in zip(folders, runs, strict=True)]


def _summary(run: Path, name: str) -> dict:
    lines = [line for line in read_metrics(run) if line["event"] in _FIELDS]
    recipe, results = _read_recipe(run), _read_results(run)
    batch, thinking = _batch_size(run, recipe, results), _thinking_tokens(lines, recipe, results)
    evaluated = [line for line in lines if line["event"] != "train"]
    last = lines[-1] if lines else dict.fromkeys(_ALWAYS)
    method = recipe.get("method")

    def examples(step: int | None) -> int | None:
        return None if batch is None or step is None else round(step * batch)

    curves = {key: [line[key] for line in evaluated] for key in ("step", "tokens", "seconds", "exact_match")}
    curves |= {"examples": [examples(line["step"]) for line in evaluated]}
    curves |= {"hidden_tokens": [line["hidden_tokens"] for line in evaluated]}
    final_hidden = 0 if method == "cot" else thinking
    reached = next((x for x in evaluated if x["hidden_tokens"] == final_hidden and x["exact_match"] >= SOLVED), None)
    if reached is not None:
        costs = {key: reached[key] for key in ("step", "tokens", "seconds")}
        reached = costs | {"examples": examples(reached["step"])}
    test = (results or {}).get("test", {})
    return {
        "name": name,
        "path": str(run),
        "finished": results is not None,
        "method": method,
        "schedule": recipe.get("schedule", "fixed") if method == "icot" else None,
        "running_sum_head": recipe.get("running_sum_head", "none") if recipe else None,
        "max_steps": recipe.get("max_steps"),
        "stages": len({line["stage"] for line in lines}),
        "hidden_tokens": last["hidden_tokens"],
        "thinking_tokens": thinking,
        "steps": last["step"],
        "examples": examples(last["step"]),
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "exact_match": evaluated[-1]["exact_match"] if evaluated else None,
        "digit_accuracy": evaluated[-1]["digit_accuracy"] if evaluated else None,
        "test_exact_match": test.get("exact_match"),
        "test_digit_accuracy": test.get("digit_accuracy"),
        "reached": reached,
        "curves": curves,
    }


def _read_recipe(run: Path) -> dict:
    """The run's recipe; empty where the trainer was used without one."""
    path = run / "recipe.yaml"
    if not path.is_file():
        return {}
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is no mapping of settings")
    return recipe


def _read_results(run: Path) -> dict | None:
    path = run / "results.json"
    if not path.is_file():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(results, dict) or not all(isinstance(results.get(key), dict) for key in ("test", "training")):
        raise ValueError(f"{path} lacks the objects test and training")
    return results


def _batch_size(run: Path, recipe: dict, results: dict | None) -> float | None:
    """Problems in a step, over all processes, whose number the recipe alone does not tell."""
    totals = (results or {}).get("training", {})
    if totals.get("steps") and "examples" in totals:
        return totals["examples"] / totals["steps"]
    for path in sorted((run / "state").glob("step-*/state.json"), reverse=True):
        try:
            values = json.loads(json.loads(path.read_text(encoding="utf-8"))["body"])["values"]
            return values["examples_seen"] / values["step"]
        except (ValueError, KeyError, TypeError, ZeroDivisionError, OSError):
            continue  # damaged, or removed by the run since
    if "per_device_train_batch_size" not in recipe:
        return None
    return recipe["per_device_train_batch_size"] * recipe.get("gradient_accumulation_steps", 1)


def _thinking_tokens(lines: list[dict], recipe: dict, results: dict | None) -> int | None:
    """Tokens of the longest chain: as recorded, or else what the task's sizes or the hidden tokens tell."""
    for record in ((results or {}).get("training", {}), *lines[-1:]):
        if "thinking_tokens" in record:
            return record["thinking_tokens"]
    if recipe.get("task") == "multiplication" and recipe.get("digits"):
        # Imported here: what reads a log does not pay for what makes problems.
        from ..tasks.multiplication import thinking_length

        digits = recipe["digits"]
        return max(thinking_length(n, m) for n, m in zip(digits[::2], digits[1::2], strict=True))
    # Other tasks: without a chain at any time all of it is hidden, and a finished curriculum has hidden it.
    method = recipe.get("method")
    known = lines and (method == "sft" or (method == "icot" and results is not None))
    return lines[-1]["hidden_tokens"] if known else None


def table(rows: Sequence[dict], markdown: bool = False) -> str:
    """What `compare` returned as a table with aligned columns, a line for each run; in Markdown if asked for.

    `digits` is the mean of the validation's digit accuracies and `worst` the least of them, with its place.
    """
    header = ["run", "method", "stages", "hidden", "steps", "examples", "tokens", "time", "valid.", "digits", "worst"]
    header += ["test", f"tokens to {SOLVED}", f"time to {SOLVED}"]
    cells = [header, *map(_cells, rows)]
    if markdown:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # Words stand at the left, numbers at the right.
    aligned = [
        [
            cell.ljust(width) if k < 2 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cells
    ]
    if not markdown:
        return "\n".join("  ".join(row).rstrip() for row in aligned)
    rule = ["-" * width if k < 2 else "-" * (width - 1) + ":" for k, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [aligned[0], rule, *aligned[1:]])


def _cells(row: dict) -> list[str]:
    method = row["method"] or "-"
    if row["schedule"]:
        method += f", {row['schedule']}"
    if row["running_sum_head"] not in (None, "none"):
        method += f" + running sums ({row['running_sum_head']})"
    hidden, steps = _number(row["hidden_tokens"]), _number(row["steps"])
    if row["thinking_tokens"] is not None:
        hidden += f"/{row['thinking_tokens']}"
    if not row["finished"] and row["max_steps"]:
        steps += f"/{row['max_steps']:,}"
    digits = row["digit_accuracy"] or []
    worst = min(range(len(digits)), key=digits.__getitem__, default=None)
    never = "never" if row["finished"] else "-"
    return [
        row["name"] + ("" if row["finished"] else " (unfinished)"),
        method,
        str(row["stages"]),
        hidden,
        steps,
        _short(row["examples"]),
        _short(row["tokens"]),
        _duration(row["seconds"]),
        _accuracy(row["exact_match"]),
        _accuracy(sum(digits) / len(digits)) if digits else "-",
        "-" if worst is None else f"c_{worst} {_accuracy(digits[worst])}",
        _accuracy(row["test_exact_match"]),
        _short(row["reached"]["tokens"]) if row["reached"] else never,
        _duration(row["reached"]["seconds"]) if row["reached"] else never,
    ]


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _short(value: float | None) -> str:
    """Four digits at most: 9,999, 512k, 13.95M."""
    if value is None or value < 10_000:
        return _number(value)
    unit, name = next((unit, name) for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= unit)
    return f"{value / unit:.4g}{name}"


def _accuracy(value: float | None) -> str:
    """Cut off, not rounded: 1.000 is said of nothing less."""
    return "-" if value is None else f"{int(value * 1000 + 1e-6) / 1000:.3f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
