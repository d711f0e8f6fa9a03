"""Train a transformer through a curriculum of vanishing thinking tokens.

accelerate launch training/train.py                                       # 3x2 digits, a few minutes on a laptop
accelerate launch training/train.py --config training/recipes/mult_3x3_icot.yaml --seed 1
"""

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import psutil
import torch
import yaml
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env, set_seed
from transformers import AutoTokenizer

from hf_icot import ArithmeticTokenizer, ICoTConfig, ICoTForCausalLM
from hf_icot.analysis.plots import accuracy_by_hidden, dynamics, learning_curve, schedule
from hf_icot.analysis.runs import write_stages_csv
from hf_icot.arguments import ModelArguments, RecipeParser, TaskArguments
from hf_icot.curriculum import CurriculumArguments
from hf_icot.hub import write_model_card
from hf_icot.tasks import TokenizedProblems
from hf_icot.tasks.multiplication import MultiplicationTask
from hf_icot.tasks.text import TextTask
from hf_icot.trainer import ICoTTrainer, ICoTTrainingArguments, Interrupted


DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "mult_3x2_icot.yaml"
ARGUMENTS = (TaskArguments, ModelArguments, CurriculumArguments, ICoTTrainingArguments)


# All that a run writes into its folder; --overwrite_output_dir touches nothing else.
RUN_ENTRIES = frozenset(
    "recipe.yaml metrics.jsonl dynamics.jsonl stages stages.csv state figures results.json README.md config.json "
    "generation_config.json model.safetensors tokenizer.json tokenizer_config.json hf_icot".split()
)


def remove_run(folder: Path) -> None:
    """Delete what a run wrote into a folder, and nothing else."""
    for name in RUN_ENTRIES:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def choose_output_dir(args: ICoTTrainingArguments, recipe: str | None) -> str:
    """The run folder: the one asked for if it is free, else runs/<recipe>, numbered where that is taken."""
    if args.resume is not None:
        if args.overwrite_output_dir:
            raise ValueError("resume and overwrite_output_dir exclude each other: one takes up what the other deletes")
        if not (Path(args.resume) / "recipe.yaml").exists():
            raise ValueError(f"{args.resume} is no run folder: it holds no recipe.yaml")
        return args.resume
    if args.output_dir is not None:
        folder = Path(args.output_dir)
        if folder.is_dir() and any(folder.iterdir()) and not args.overwrite_output_dir:
            raise ValueError(
                f"output_dir {folder} is not empty: give another one, or --overwrite_output_dir to delete it"
            )
        if folder.is_dir() and any(folder.iterdir()):
            foreign = sorted({path.name for path in folder.iterdir()} - RUN_ENTRIES)
            if foreign or not (folder / "recipe.yaml").exists():
                what = ", ".join(foreign[:3]) or "no recipe.yaml"
                raise ValueError(
                    f"output_dir {folder} is not overwritten, since no run has written it ({what}): give another one"
                )
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output_dir {folder} is a file")
        return str(folder)
    name = Path(recipe).stem if recipe else "run"
    number, folder = 1, Path("runs") / name
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return str(folder)


def set_cpu_threads(wanted: int | None, state: PartialState) -> None:
    """Share the cores among this machine's processes: `accelerate launch` leaves each with one thread on a CPU."""
    if wanted is None:
        if state.device.type != "cpu" or int(os.environ.get("OMP_NUM_THREADS", 1)) > 1:
            return
        cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
        wanted = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes)))
    torch.set_num_threads(wanted)


def start_cpu_processes() -> None:
    """Start the processes of `accelerate launch --cpu --num_processes N`, and leave when they are done.

    Accelerate starts several CPU processes through mpirun alone; without it there is one process, with the address of
    a rendezvous in its environment that nobody else will come to. Training on a fraction of the batch that was asked
    for must not happen silently.
    """
    environment = os.environ
    mpi = any(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"))
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if not on_cpu or mpi or "WORLD_SIZE" in environment or "MASTER_PORT" not in environment:
        return
    launcher = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    launcher.add_argument("--num_processes", "--num-processes", type=int)
    launcher.add_argument("--num_machines", "--num-machines", type=int, default=1)
    asked, _ = launcher.parse_known_args(psutil.Process().parent().cmdline())
    if asked.num_processes is None or asked.num_machines > 1:
        sys.exit("error: start several CPU processes with `torchrun --nproc_per_node N training/train.py …`")
    from torch.distributed.run import main as torchrun

    torchrun(["--standalone", "--nproc_per_node", str(asked.num_processes), *sys.argv])
    sys.exit(0)


def load_task(args: TaskArguments, tokenizer):
    """The task that the recipe names."""
    if args.task == "multiplication":
        if len(args.digits) % 2:
            raise ValueError(f"digits must come in pairs, n m of each size, not {args.digits}")
        return MultiplicationTask(
            [tuple(args.digits[i : i + 2]) for i in range(0, len(args.digits), 2)],
            train_size=args.train_size,
            valid_size=args.valid_size,
            test_size=args.test_size,
            seed=args.data_seed,
            exclude=args.exclude_file,
        )
    if args.task == "text":
        for name in ("train_file", "validation_file"):
            if getattr(args, name) is None:
                raise ValueError(f"task 'text' needs {name}")
        return TextTask(args.train_file, args.validation_file, tokenizer, test_file=args.test_file)
    if args.dataset_name is None:
        raise ValueError("task 'dataset' needs dataset_name")
    return TextTask.from_dataset(args.dataset_name, tokenizer, config=args.dataset_config)


def worked_examples(tokenizer, problems: TokenizedProblems, predictions: torch.Tensor) -> list[str]:
    """`question = prediction` lines, with the true answer where it is another."""
    lines = []
    for row, tokens in enumerate(problems.tokens.tolist()):
        question, answer = int(problems.question_length[row]), int(problems.answer_length[row])
        start = question + int(problems.thinking_length[row]) + 2
        written = [token for token in predictions[row, : answer + 1].tolist() if token >= 0]
        said = tokenizer.decode(written, skip_special_tokens=True)
        truth = tokenizer.decode(tokens[start : start + answer])
        remark = "" if said == truth else f"   (should be {truth})"
        lines.append(f"{tokenizer.decode(tokens[:question])} = {said}{remark}")
    return lines


def print_table(name: str, results: dict, totals: dict, folder: str) -> None:
    """What a newcomer wants to see: accuracies, a few worked examples, the time."""
    print(f"\n{name}: {results['problems']} held-out problems, {totals['hidden_tokens']} thinking tokens hidden")
    print(f"  exact match         {results['exact_match']:.4f}")
    print(f"  per-digit accuracy  {'  '.join(f'c_{k} {x:.3f}' for k, x in enumerate(results['digit_accuracy']))}")
    print(f"  training            {totals['seconds']:.0f} s, {totals['steps']} steps, {totals['tokens']:,} tokens")
    print("  worked examples, least significant digit first")
    for line in results["examples"]:
        print(f"    {line}")
    print(f"  run folder          {folder}\n")


def print_plan(name: str, trainer: ICoTTrainer) -> None:
    """The stages to come, as a table and a figure beside the run folder, which is not made."""
    rows, args = trainer.plan(), trainer.args
    if not trainer.is_main:
        return
    print(f"{name}, {trainer.curriculum.method}: {args.max_steps} steps of {trainer.batch_size} problems")
    print("stage  hidden tokens  from step  steps        tokens  about seconds")
    for number, row in enumerate(rows):
        print(
            f"{number:5d}  {row['hidden_tokens']:13d}  {row['start']:9d}  {row['steps']:5d}  {row['tokens']:12,d}  "
            f"{row['seconds']:13.0f}"
        )
    total = sum(row["tokens"] for row in rows)
    print(f"in all {total:,} tokens, about {sum(row['seconds'] for row in rows) / 60:.1f} minutes without evaluations")
    if trainer.schedule.observe_steps:
        print("gated: the stages are decided as the run goes; the table is that of a run that never leaves the first")
    path = schedule(trainer.schedule.stages, args.max_steps, Path(f"{args.output_dir}-plan.png"))
    print(f"drawn in {path}")


def main() -> None:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--resume")
    resumed = finder.parse_known_args()[0].resume
    default = Path(resumed) / "recipe.yaml" if resumed else DEFAULT_RECIPE
    parser = RecipeParser(*ARGUMENTS, default_config=str(default), description=__doc__.split("\n")[0])
    task_args, model_args, curriculum, args, recipe = parser.parse()
    start_cpu_processes()
    if not torch.accelerator.is_available():
        # Accelerate takes several processes without an accelerator for so many lone ones unless it is told.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    try:
        args.output_dir = choose_output_dir(args, recipe)
        set_cpu_threads(args.num_threads, state)
        tokenizer = (
            AutoTokenizer.from_pretrained(task_args.tokenizer_name_or_path)
            if task_args.tokenizer_name_or_path
            else ArithmeticTokenizer()
        )
        task = load_task(task_args, tokenizer)
        with_sums = model_args.running_sum_head != "none"
        if with_sums and task_args.task != "multiplication":
            raise ValueError("running_sum_head needs task 'multiplication', whose operands give the running sums")
        splits = task.splits(running_sums=True) if with_sums else task.splits()
        set_seed(args.seed)
        if model_args.model_name_or_path:
            model = ICoTForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32)
            if model.config.hidden_tokens and curriculum.keep_position and curriculum.hidden_as == "drop":
                raise ValueError(
                    f"{model_args.model_name_or_path} was saved for ordinary positions with "
                    f"{model.config.hidden_tokens} thinking tokens hidden: go on with --no_keep_position"
                )
        else:
            model = ICoTForCausalLM(
                ICoTConfig(
                    vocab_size=len(tokenizer),
                    n_positions=max(problems.max_length for problems in splits.values()),
                    n_layer=model_args.n_layer,
                    n_head=model_args.n_head,
                    n_embd=model_args.n_embd,
                    embd_pdrop=model_args.dropout,
                    attn_pdrop=model_args.dropout,
                    resid_pdrop=model_args.dropout,
                    tie_word_embeddings=model_args.tie_word_embeddings,
                    operand_digits=task.sizes or None,
                    running_sum_head=model_args.running_sum_head if with_sums else False,
                    running_sum_layer=model_args.running_sum_layer,
                    eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                )
            )
        resolved = {k: v for part in (task_args, model_args, curriculum, args) for k, v in vars(part).items()}
        del resolved["overwrite_output_dir"]  # whoever starts from a run's recipe must not delete that run
        trainer = ICoTTrainer(
            model,
            args,
            curriculum,
            splits["train"],
            splits["validation"],
            tokenizer=tokenizer,
            run_config=resolved,
        )
        if args.overwrite_output_dir and not args.plan and state.is_main_process:
            remove_run(Path(args.output_dir))  # only now, when nothing in the new settings can be refused any more
        if args.resume:
            done = trainer.resume()
            if state.is_main_process:
                print(f"resuming {args.resume} after step {done}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.plan:
        print_plan(task.name, trainer)
        return
    folder = Path(args.output_dir)
    if state.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        if not args.resume:
            (folder / "recipe.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")
        stages = trainer.schedule.stages
        print(f"{task.name}: {len(splits['train']):,} training problems, {model.num_parameters():,} parameters,")
        print(f"{len(stages)} stages, {args.max_steps} steps of {trainer.batch_size} problems; run folder {folder}")
        if trainer.schedule.is_last(stages[-1]) and stages[-1].start >= args.max_steps:
            reached = trainer.schedule.stage(args.max_steps - 1).hidden
            print(
                f"note: max_steps ends the curriculum with {reached} of {stages[-1].hidden} thinking tokens hidden: "
                f"its last stage begins at step {stages[-1].start}"
            )
    resume = f"go on with: accelerate launch training/train.py --resume {shlex.quote(str(folder))}"
    try:
        totals = trainer.train()
    except Interrupted as interruption:
        if state.is_main_process:
            print(f"\n{interruption}; {resume}", file=sys.stderr)
        sys.exit(128 + interruption.number)
    except (OSError, FloatingPointError) as error:
        sys.exit(f"\nerror: {error}; the last state in {folder / 'state'} is whole: {resume}")
    if not state.is_main_process:
        return
    test = splits.get("test", splits["validation"])
    generated = trainer.generate(test, totals["hidden_tokens"])
    shown = torch.arange(min(5, len(test)))
    results = generated.to_dict()
    results["examples"] = worked_examples(tokenizer, test.select(shown), generated.predictions[shown])
    trainer.save_model(folder, totals["hidden_tokens"])
    title = f"{task.name}, {curriculum.method}"
    figure = learning_curve(folder, title=title)
    write_stages_csv(folder)
    if curriculum.method == "icot":
        accuracy_by_hidden(folder, title=title)
    if (folder / "dynamics.jsonl").exists():
        dynamics(folder, folder / "figures" / "dynamics.png", [title])
    command = shlex.join(["accelerate", "launch", "training/train.py", *sys.argv[1:]])
    write_model_card(
        folder,
        config=trainer.unwrapped.config,
        task=task.name,
        results=results,
        totals=totals,
        command=command,
        thinking=trainer.schedule.thinking_length,
        figure=str(figure.relative_to(folder)),
    )
    (folder / "results.json").write_text(
        json.dumps({"test": results, "training": totals, "command": command}, indent=2) + "\n", encoding="utf-8"
    )
    print_table(task.name, results, totals, str(folder))


if __name__ == "__main__":
    main()
