"""Build a dataset repository of multi-digit multiplication, one configuration for each operand size.

python dataset_scripts/build_multiplication.py --digits 4 4 --digits 5 5 --out data/multiplication
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from datasets import Features, Value
from huggingface_hub import DatasetCard

from hf_icot.tasks.multiplication import columns, format_lines, parse_lines
from hf_icot.tasks.operands import TRAIN_ROWS, Operands, check_digits, check_sizes, from_integers, split_operands
from hf_icot.tasks.repository import DatasetRepository


ROW_GROUP = 1 << 16
FEATURES = Features({name: Value("string") for name in ("question", "cot", "answer")})
BODY = """\
# Multi-digit multiplication with a chain of thought

Products of two numbers worked out in writing, to train transformers that learn to do without the writing (implicit
chain of thought).

```python
from datasets import load_dataset

dataset = load_dataset("<this repository>", "{first}")
```

## Format

Digits are written least significant first, one token each, separated by spaces. A row of n times m digits is

* `question`: `a_0 … a_{{n-1}} * b_0 … b_{{m-1}}`
* `cot`: the partial products p_j = a·b_j·10^j, each of n+1+j digits, joined by ` + `; after each p_j with
  0 < j < m-1 stands the sum so far in parentheses
* `answer`: a·b with n+m digits

For example, from `{first}`, written as `question||cot #### answer`:

```
{example}
```

The highest digit of a number is not zero, unless it has one digit. No pair of operands stands twice, in one split or
in two. Where both have as many digits, the mirror (b, a) of a validation or test pair stands in no other split.

## Configurations

{table}

Made by

```
{commands}
```

`metadata.json` holds seeds, versions and the SHA-256 of each file.

## Citation

The format is that of the first paper, its use for studying how transformers multiply that of the second.

```bibtex
@article{{deng2024explicit,
  title={{From Explicit CoT to Implicit CoT: Learning to Internalize CoT Step by Step}},
  author={{Deng, Yuntian and Choi, Yejin and Shieber, Stuart}},
  journal={{arXiv preprint arXiv:2405.14838}},
  year={{2024}}
}}
@article{{arxiv251000184,
  title={{Why Can't Transformers Learn Multiplication? Reverse-Engineering Reveals Long-Range Dependency Pitfalls}},
  journal={{arXiv preprint arXiv:2510.00184}},
  year={{2025}}
}}
```
"""


def _tables(operands: Operands) -> Iterator[pa.Table]:
    for start in range(0, len(operands.a), ROW_GROUP):
        yield columns(*(digits[start : start + ROW_GROUP] for digits in operands))


def _card(repository: DatasetRepository) -> str:
    configs = repository.configs
    splits = list(dict.fromkeys(split for config in configs.values() for split in config["splits"]))
    rows = [f"| configuration | {' | '.join(splits)} | seed |", f"|---|{'---:|' * (len(splits) + 1)}"]
    for name, config in configs.items():
        counts = [f"{config['splits'][s]['num_examples']:,}" if s in config["splits"] else "" for s in splits]
        rows.append(f"| {name} | {' | '.join(counts)} | {config['seed']} |")
    first = next(iter(configs))
    data = repository.card_data(
        pretty_name="Multi-digit multiplication with a chain of thought",
        license="apache-2.0",
        task_categories=["text-generation"],
        tags=["arithmetic", "multiplication", "chain-of-thought", "implicit-chain-of-thought"],
    )
    body = BODY.format(
        first=first,
        example=configs[first]["example"],
        table="\n".join(rows),
        commands="\n".join(dict.fromkeys(config["command"] for config in configs.values())),
    )
    return str(DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


def _rows_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)


def parse_args(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--digits", type=int, nargs=2, action="append", required=True, metavar=("N", "M"),
        help="digits of the two operands; give it again for further sizes",
    )  # fmt: skip
    parser.add_argument(
        "--train", type=_rows_or_all, default=TRAIN_ROWS, metavar="ROWS",
        help="training rows of each size (default %(default)s); 'all' for as many as exist, 808,000 at most",
    )  # fmt: skip
    parser.add_argument("--validation", type=int, default=1000, metavar="ROWS", help="default %(default)s")
    parser.add_argument("--test", type=int, default=1000, metavar="ROWS", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--exclude", type=Path, metavar="FILE",
        help="never draw the operands in this file of 'question||cot #### answer' lines (nor, for n = m, mirrored)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR",
        help="new folder, or a repository made by this script to add sizes to (a size it has is replaced)",
    )  # fmt: skip
    return parser, parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    parser, args = parse_args(argv)
    sizes = {"train": args.train, "validation": args.validation, "test": args.test}
    sizes = {split: rows for split, rows in sizes.items() if rows != 0}
    try:
        excluded = parse_lines(args.exclude.read_bytes(), str(args.exclude)) if args.exclude else {}
        plan = {}
        for digits in args.digits:
            n, m = check_digits(digits)
            plan[n, m] = excluded[n, m][1:] if (n, m) in excluded else from_integers([], (n, m))
            check_sizes((n, m), sizes, args.seed, plan[n, m])
        if not sizes:
            raise ValueError("at least one of --train, --validation and --test must be above 0")
        with DatasetRepository(args.out, "multiplication") as repository:
            for (n, m), exclude in plan.items():
                drawn = split_operands((n, m), sizes, args.seed, exclude)
                a, b = next(iter(drawn.values()))
                info = {
                    "digits": [n, m],
                    "seed": args.seed,
                    "excluded": len(exclude[0]),
                    "example": format_lines(a[:1], b[:1]).decode().strip(),
                    "command": _command(args, n, m),
                }
                splits = {split: (len(pairs.a), _tables(pairs)) for split, pairs in drawn.items()}
                repository.write(f"{n}x{m}", FEATURES, splits, info)
            repository.publish(_card)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{args.out}: {', '.join(repository.configs)}")
    return 0


def _command(args: argparse.Namespace, n: int, m: int) -> str:
    train = "all" if args.train is None else args.train
    command = f"python dataset_scripts/build_multiplication.py --digits {n} {m} --train {train}"
    command += f" --validation {args.validation} --test {args.test} --seed {args.seed}"
    if args.exclude:
        command += f" --exclude {shlex.quote(args.exclude.name)}"
    return f"{command} --out DIR"


if __name__ == "__main__":
    sys.exit(main())
