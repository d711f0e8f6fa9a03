"""How fast problems are made: rows per second as token tensors, and a whole Parquet repository.

    python benchmarks/data.py [--digits 4 4] [--rows 1000000]

Runs on one core.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hf_icot.tasks.multiplication import encode
from hf_icot.tasks.operands import TRAIN_ROWS, sample_operands


BUILD = Path(__file__).parent.parent / "dataset_scripts" / "build_multiplication.py"


def rate(function, rows: int, repetitions: int = 5) -> float:
    """Median rows per second."""
    seconds = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return rows / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", type=int, nargs=2, default=[4, 4])
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)

    operands = sample_operands(tuple(options.digits), options.rows, 0)
    drawn = rate(lambda: sample_operands(options.digits, options.rows, 0), options.rows)
    encoded = rate(lambda: encode(*operands), options.rows)
    print(f"drawing operands    {drawn:,.0f} rows/s")
    print(f"operands to tokens  {encoded:,.0f} rows/s")
    with tempfile.TemporaryDirectory() as folder:
        digits = [str(d) for d in options.digits]
        command = [sys.executable, str(BUILD), "--digits", *digits, "--train", str(TRAIN_ROWS)]
        begun = time.perf_counter()
        subprocess.run([*command, "--out", f"{folder}/repository"], check=True, capture_output=True)
        seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{TRAIN_ROWS:,}-row repository  {seconds:.1f} s, {peak:.2f} GiB at most")


if __name__ == "__main__":
    main()
