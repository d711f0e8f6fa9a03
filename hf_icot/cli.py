"""The command line: `hf-icot data` writes problems as text, `eval` scores a model on them, `compare` compares runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hf-icot` with `argv` (by default the command line's) and return its exit status.

    Wrong arguments and malformed input end it with status 2 and a message, before anything is printed.
    """
    parser = argparse.ArgumentParser(prog="hf-icot", description="Implicit chain-of-thought with Hugging Face.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_data_command(commands)
    _add_eval_command(commands)
    _add_compare_command(commands)
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (`head`, say) has had enough. Python would complain once more on flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except (ValueError, OSError) as error:
        print(f"hf-icot: error: {error}", file=sys.stderr)
        return 2


def _add_data_command(commands: argparse._SubParsersAction) -> None:
    data = commands.add_parser("data", help="write problems as text", description="Write problems as text.")
    tasks = data.add_subparsers(title="tasks", required=True, metavar="TASK")
    parser = tasks.add_parser(
        "multiplication",
        help="products worked out digit by digit",
        description="Print multiplications as lines `question||cot #### answer`, digits least significant first.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--operands",
        metavar="FILE",
        help="two ordinary integers a line, highest digit first; '-' for standard input. A number has as many digits "
        "as are written: '0012 34' is 4x2",
    )
    source.add_argument("--random", type=int, metavar="N", help="N different problems of each size of --digits")
    parser.add_argument(
        "--digits",
        type=int,
        nargs=2,
        action="append",
        metavar=("N", "M"),
        help="with --random: digits of the operands (default 4 4); give it again for further sizes",
    )
    parser.add_argument("--seed", type=int, help="with --random: default 0")
    parser.set_defaults(run=_write_multiplication)


def _write_multiplication(args: argparse.Namespace) -> int:
    # Imported here, so that help and wrong arguments are answered at once.
    from .tasks.multiplication import format_lines
    from .tasks.operands import parse_integers, sample_operands

    if args.operands is None:
        sizes = args.digits or [[4, 4]]
        drawn = [sample_operands(size, args.random, args.seed or 0) for size in sizes]
        texts = [format_lines(*operands) for operands in drawn]
    else:
        for name in ("digits", "seed"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} goes with --random; --operands has its sizes from the numbers")
        standard = args.operands == "-"
        data = sys.stdin.buffer.read() if standard else Path(args.operands).read_bytes()
        groups = parse_integers(data, "standard input" if standard else args.operands)
        texts = [format_lines(group.a, group.b) for group in groups.values()]
        if len(groups) > 1:
            lines: list[bytes] = [b""] * sum(len(group.rows) for group in groups.values())
            for group, text in zip(groups.values(), texts, strict=True):
                for row, line in zip(group.rows.tolist(), text.splitlines(keepends=True), strict=True):
                    lines[row] = line
            texts = [b"".join(lines)]
    for text in texts:
        view = memoryview(text)
        while view:  # where standard output has no buffer, a write may take a part only
            view = view[sys.stdout.buffer.write(view) :]
    return 0


def _add_eval_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "eval",
        help="score a model by greedy generation",
        description="Let a model answer problems by greedy generation with a KV cache, and count what is right.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder or Hub name")
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE_OR_DATASET",
        help="problems: a .txt file of `question||cot #### answer`, a .jsonl or .parquet file with these columns, or "
        "the folder or Hub name of a dataset",
    )
    parser.add_argument("--config", help="configuration of the dataset, e.g. 4x4")
    parser.add_argument("--split", default="test", help="split of the dataset (default test)")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N problems only")
    parser.add_argument(
        "--hidden_tokens",
        type=int,
        metavar="N",
        help="hide the first N thinking tokens and let the model write the others (default: as in its training, or "
        "else all)",
    )
    parser.add_argument("--batch_size", type=int, default=1000, help="problems decoded together (default 1000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_evaluate)


def _evaluate(args: argparse.Namespace) -> int:
    for name in ("limit", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be 1 or more, not {getattr(args, name)}")
    if args.hidden_tokens is not None and args.hidden_tokens < 0:
        raise ValueError(f"--hidden_tokens must be 0 or more, not {args.hidden_tokens}")
    import torch
    from transformers import AutoTokenizer

    from .evaluation import evaluate_generation
    from .modeling_icot import ICoTForCausalLM
    from .tasks.text import load_rows, tokenize_rows

    rows = load_rows(args.data, config=args.config, split=args.split)
    rows = rows.slice(0, args.limit) if args.limit else rows
    if not len(rows):
        raise ValueError(f"there is no problem in {args.data}")
    model = ICoTForCausalLM.from_pretrained(args.model)
    problems = tokenize_rows(rows, AutoTokenizer.from_pretrained(args.model))
    if problems.max_length > model.config.n_positions and model.config.hidden_tokens == 0:
        raise ValueError(
            f"the longest problem has {problems.max_length} tokens, the model n_positions={model.config.n_positions}"
        )
    trained = model.config.hidden_tokens
    if args.hidden_tokens is not None and trained is not None and args.hidden_tokens != trained:
        # Its position embeddings were re-ordered for that number alone when it was saved.
        raise ValueError(
            f"--hidden_tokens {args.hidden_tokens}: this checkpoint was saved for {trained}: use that stage's"
        )
    model.to(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    hidden = model.config.hidden_tokens if args.hidden_tokens is None else args.hidden_tokens
    result = evaluate_generation(
        model,
        problems,
        None if hidden == "all" else hidden,
        side=model.config.removal_side,
        hidden_as=model.config.hidden_as,
        keep_position=model.config.keep_position,
        batch_size=args.batch_size,
        progress=not args.json,
    ).to_dict()
    if args.json:
        print(json.dumps({"model": args.model, "data": args.data, "hidden_tokens": hidden, **result}))
        return 0
    print(f"{args.model} on {result['problems']} problems of {args.data}")
    print(f"  exact match         {result['exact_match']:.4f}")
    print(f"  per-digit accuracy  {'  '.join(f'c_{k} {x:.4f}' for k, x in enumerate(result['digit_accuracy']))}")
    print(f"  problems per second {result['problems_per_second']:.0f}")
    return 0


def _add_compare_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="what several training runs cost and reached",
        description="Print a table of run folders, finished or not: steps, examples, tokens, time, accuracies, and "
        "what it took to reach an exact match of 0.99 in the last stage.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folder")
    parser.add_argument(
        "--out", metavar="DIR", help="write compare.png, compare.csv (the curves) and compare.json there"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    form.add_argument("--json", action="store_true", help="print everything, the curves too, as a JSON list")
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    from .analysis.runs import compare, table

    rows = compare(args.runs)
    text = json.dumps(rows, indent=2)
    if args.out is not None:
        from .analysis.plots import compare as draw

        folder = Path(args.out)
        draw(rows, folder / "compare.png")
        (folder / "compare.json").write_text(text + "\n", encoding="utf-8")
        print(f"written: compare.png, compare.csv and compare.json in {folder}", file=sys.stderr)
    print(text if args.json else table(rows, markdown=args.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
