"""How fast a model answers: 1,000 problems of 4x4 digits without thinking tokens, greedy, with a KV cache.

    python benchmarks/evaluate.py [--width 128] [--problems 1000] [--digits 4 4]

Random weights answer as slowly as trained ones, since every problem is decoded to the length of its answer.
"""

import argparse
import statistics
import time

import torch

from hf_icot import ICoTConfig, ICoTForCausalLM
from hf_icot.evaluation import evaluate_generation
from hf_icot.tasks.multiplication import encode
from hf_icot.tasks.operands import sample_operands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--digits", type=int, nargs=2, default=[4, 4])
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()

    problems = encode(*sample_operands(tuple(options.digits), options.problems, 0))
    torch.manual_seed(0)
    model = ICoTForCausalLM(ICoTConfig(n_embd=options.width, n_positions=problems.max_length))
    # Ending early would flatter: nothing a random model writes may count as the end.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    rates = [evaluate_generation(model, problems).problems_per_second for _ in range(options.repetitions)]
    pairs = [(int("9" * options.digits[0]) - i, int("9" * options.digits[1]) - i) for i in range(options.problems)]
    seconds = []
    for _ in range(options.repetitions):
        begun = time.perf_counter()
        model.multiply(pairs)
        seconds.append(time.perf_counter() - begun)
    n, m = options.digits
    print(f"{torch.get_num_threads()} threads, {options.problems} problems of {n}x{m} digits, {options.width} wide")
    print(f"evaluate_generation  {options.problems / statistics.median(rates):.3f} s")
    print(f"model.multiply       {statistics.median(seconds):.3f} s")


if __name__ == "__main__":
    main()
