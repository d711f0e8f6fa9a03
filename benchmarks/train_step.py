"""How near a training step comes to the machine's limit, and what of it is not the model.

    python benchmarks/train_step.py [--widths 128 256 768] [--batch_size 32] [--digits 4 4]

For each width the trainer's own step (full chains, fp32, AdamW) is timed in turn with bare `torch.matmul` calls of the
same shapes: every linear layer and the output weights, forward, gradient of the input and gradient of the weight, and
the two products of attention with theirs. The same multiplications are counted for both, two operations each. Medians
over alternating repetitions.

Then a whole run of the trainer, logging as a run does by default, is timed against the part of it that is spent in
the model's forward and backward pass and the optimiser: the rest is data, curriculum and logging.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch

from hf_icot import ICoTConfig, ICoTForCausalLM
from hf_icot.curriculum import CurriculumArguments
from hf_icot.tasks.multiplication import MultiplicationTask
from hf_icot.trainer import ICoTTrainer, ICoTTrainingArguments


def product_shapes(config, batch: int, length: int) -> list[tuple[int, int, int, int]]:
    """(count, rows, inner, columns) of each product in a training step; count > 1 is a batched product."""
    tokens, d = batch * length, config.n_embd
    linear = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)] * config.n_layer + [(d, config.vocab_size)]
    shapes = []
    for inner, columns in linear:
        shapes += [(1, tokens, inner, columns), (1, tokens, columns, inner), (1, inner, tokens, columns)]
    heads, head_dim = batch * config.n_head, d // config.n_head
    # Scores and weighted values forward; each has two gradients of the same size.
    attention = [(heads, length, head_dim, length), (heads, length, length, head_dim)]
    return shapes + attention * 3 * config.n_layer


def operands(shapes):
    """One pair of random matrices for each distinct shape, laid out in memory as in the step."""
    pairs = {}
    for count, rows, inner, columns in shapes:
        size = (count,) if count > 1 else ()
        pairs[count, rows, inner, columns] = torch.randn(*size, rows, inner), torch.randn(*size, inner, columns)
    return pairs


def timed(function) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def trainer_for(width: int, batch: int, splits, steps: int, folder: str) -> ICoTTrainer:
    args = ICoTTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        max_steps=steps,
        warmup_steps=0,
        eval_steps=steps,
        disable_tqdm=True,
        logging_steps=min(steps, ICoTTrainingArguments.logging_steps),
    )
    model = ICoTForCausalLM(ICoTConfig(n_embd=width, n_positions=splits["train"].max_length))
    return ICoTTrainer(model, args, CurriculumArguments(method="cot"), splits["train"], splits["validation"])


def step_rates(trainer: ICoTTrainer, batch: int, length: int, repetitions: int) -> dict:
    """Floating-point rates of the step and of the bare products, GFLOP/s, measured in turn."""
    shapes = product_shapes(trainer.unwrapped.config, batch, length)
    pairs = operands(shapes)
    operations = sum(2 * count * rows * inner * columns for count, rows, inner, columns in shapes)
    stage = trainer.schedule.stage(0)
    trainer.model.train()
    step_times, product_times = [], []
    for repetition in range(repetitions + 2):
        step_seconds = timed(lambda at=repetition: trainer.training_step(at, stage))
        with torch.no_grad():
            product_seconds = timed(lambda: [torch.matmul(*pairs[shape]) for shape in shapes])
        if repetition >= 2:
            step_times.append(step_seconds)
            product_times.append(product_seconds)
    step, product = statistics.median(step_times), statistics.median(product_times)
    return {
        "step_ms": step * 1e3,
        "tokens_per_second": batch * length / step,
        "step_gflops": operations / step / 1e9,
        "matmul_gflops": operations / product / 1e9,
        "ratio": product / step,
    }


def overhead(trainer: ICoTTrainer) -> float:
    """Fraction of a run's training time that is neither forward and backward pass nor optimiser."""
    in_model = 0.0
    batches, training_step = trainer.batches, trainer.training_step

    def timed_batches(*args):
        nonlocal in_model
        begun = time.perf_counter()
        result = batches(*args)
        in_model -= time.perf_counter() - begun
        return result

    def timed_step(*args):
        nonlocal in_model
        begun = time.perf_counter()
        result = training_step(*args)
        in_model += time.perf_counter() - begun
        return result

    trainer.batches, trainer.training_step = timed_batches, timed_step
    trainer.train()
    return 1 - in_model / trainer.training_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 768])
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--digits", type=int, nargs=2, default=[4, 4])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--overhead_steps", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()

    splits = MultiplicationTask(tuple(options.digits), train_size=20_000, seed=0).splits()
    length = splits["train"].max_length
    results = []
    for width in options.widths:
        with tempfile.TemporaryDirectory() as folder:
            result = {"width": width}
            trainer = trainer_for(width, options.batch_size, splits, 10_000, folder)
            result |= step_rates(trainer, options.batch_size, length, options.repetitions)
            steps = options.overhead_steps if width < 512 else max(50, options.overhead_steps // 4)
            result["overhead"] = overhead(trainer_for(width, options.batch_size, splits, steps, folder))
        results.append(result)
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "batch_size": options.batch_size, "results": results}))
        return
    print(f"{torch.get_num_threads()} threads, batch of {options.batch_size} rows of {length} tokens, fp32")
    print("width  step ms  tokens/s  step GFLOP/s  matmul GFLOP/s  ratio  data, curriculum, logging")
    for r in results:
        print(
            f"{r['width']:5d}  {r['step_ms']:7.1f}  {r['tokens_per_second']:8.0f}  {r['step_gflops']:12.1f}  "
            f"{r['matmul_gflops']:14.1f}  {r['ratio']:5.2f}  {r['overhead']:24.1%}"
        )


if __name__ == "__main__":
    main()
