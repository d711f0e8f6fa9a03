"""The training loop, on Accelerate: batch by index, hide by the curriculum, step, evaluate, keep every stage.

The loop knows nothing of digits: it is given problems as token columns and a curriculum. Everything random in a step
follows from the seed and the step's number alone, for the whole batch of all processes, so that the number of
processes changes neither the data nor the loss.
"""

import dataclasses
import json
import math
import os
import shutil
import signal
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from tqdm.auto import tqdm
from transformers import get_scheduler
from transformers.utils import logging

from .curriculum import (
    CurriculumArguments,
    Stage,
    align_with_answer,
    create_schedule,
    hide_thinking_tokens,
    supervised_tokens,
)
from .dynamics import DigitDynamics
from .evaluation import EvaluationResult, evaluate_generation, evaluate_teacher_forced, folded_positions
from .optimization import OPTIMIZERS, create_optimizers
from .state import load_state, pack_optimizer, random_states, save_state, set_random_states, unpack_optimizer
from .tasks import TokenizedProblems


# With several processes they agree every so many steps whether one of them got a signal to stop.
SIGNAL_STEPS = 10
DYNAMICS_PROBE = 256
# Files that grow line by line: cut back to where they were when a state is taken up, since their lines come again.
LINE_FILES = ("metrics.jsonl", "dynamics.jsonl")
STATE_FIELDS = (
    "step",
    "finished",
    "tokens_seen",
    "examples_seen",
    "logged_step",
    "logged_tokens",
    "logged_seconds",
)
# What may differ between a run and its resumption: nothing that a weight depends on.
FREE_ON_RESUME = frozenset(
    "logging_steps eval_steps save_steps dynamics_every per_device_eval_batch_size report_to disable_tqdm num_threads "
    "output_dir stop_at_exact_match resume plan".split()
)
LR_SCHEDULERS = ("constant_with_warmup", "linear", "cosine", "warmup_stable_decay")
PRECISIONS = ("no", "bf16", "fp16")


@dataclass
class ICoTTrainingArguments:
    """How the model is trained; names are transformers' where it has them."""

    output_dir: str | None = field(
        default=None, metadata={"help": "Run folder. Unset: runs/<name of the recipe>, numbered if that exists."}
    )
    resume: str | None = field(
        default=None, metadata={"help": "Run folder to take up at its last state, with its own recipe."}
    )
    plan: bool = field(
        default=False,
        metadata={"help": "Print the stages, their tokens and an estimate of the time, draw them, and train nothing."},
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Delete a run that is in output_dir."})
    max_steps: int = field(default=1000, metadata={"help": "Optimiser steps."})
    per_device_train_batch_size: int = field(default=128, metadata={"help": "Problems a process handles at once."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches whose gradients make one step."})
    per_device_eval_batch_size: int = field(default=500, metadata={"help": "Problems evaluated at once."})
    optim: str = field(
        default="adamw",
        metadata={
            "help": "'adamw', or 'muon': torch.optim.Muon for the blocks' matrices and AdamW for all else.",
            "choices": OPTIMIZERS,
        },
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of AdamW."})
    muon_learning_rate: float = field(
        default=2e-3, metadata={"help": "muon: peak learning rate of the matrices (scaled to AdamW's update size)."}
    )
    weight_decay: float = field(default=0.0, metadata={"help": "Decoupled weight decay of matrices."})
    adam_beta1: float = field(default=0.9, metadata={"help": "AdamW's β1."})
    adam_beta2: float = field(default=0.999, metadata={"help": "AdamW's β2."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip gradients to this norm; 0 for no clipping."})
    lr_scheduler_type: str = field(
        default="constant_with_warmup",
        metadata={"help": "How the learning rate goes on after the warm-up.", "choices": LR_SCHEDULERS},
    )
    warmup_steps: int = field(default=100, metadata={"help": "Steps of linear warm-up."})
    lr_decay_steps: int = field(default=0, metadata={"help": "warmup_stable_decay: steps of decay at the end."})
    running_sum_weight: float = field(
        default=1.0, metadata={"help": "λ of the running-sum head's mean squared error, added to the loss."}
    )
    running_sum_weight_end: float | None = field(
        default=None, metadata={"help": "λ goes linearly to this value at max_steps. Unset: it stays."}
    )
    running_sum_standardize: bool = field(
        default=True, metadata={"help": "The head's targets are reduced by their mean and divided by their deviation."}
    )
    mixed_precision: str = field(
        default="no", metadata={"help": "Automatic mixed precision of the forward pass.", "choices": PRECISIONS}
    )
    torch_compile: bool = field(default=False, metadata={"help": "Compile the training forward and backward pass."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Trade time for memory."})
    seed: int = field(default=0, metadata={"help": "Seed of the weights, the order of data and the smoothing."})
    logging_steps: int = field(default=50, metadata={"help": "Steps between lines of training loss."})
    eval_steps: int = field(default=250, metadata={"help": "Steps between evaluations on the validation problems."})
    dynamics_every: int | None = field(
        default=None,
        metadata={
            "help": "Steps between measurements of each answer digit's loss, accuracy and gradient norm on a fixed "
            "probe of 256 validation problems, written to dynamics.jsonl. Unset: none."
        },
    )
    save_steps: int = field(
        default=500, metadata={"help": "Steps between states to resume from; there is one at each stage's end too."}
    )
    stop_at_exact_match: float | None = field(
        default=None,
        metadata={
            "help": "End the training once an evaluation in the last stage of the curriculum reaches this exact match."
        },
    )
    report_to: list[str] = field(
        default_factory=list, metadata={"help": "Trackers: tensorboard, wandb, trackio (any that accelerate knows)."}
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})
    num_threads: int | None = field(
        default=None,
        metadata={"help": "CPU threads of a process. Unset: the cores shared among this machine's processes."},
    )

    def __post_init__(self):
        positive = "max_steps per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size"
        for name in f"{positive} logging_steps eval_steps save_steps".split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in "weight_decay max_grad_norm warmup_steps lr_decay_steps seed running_sum_weight".split():
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("learning_rate", "muon_learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        for name, allowed in (
            ("optim", OPTIMIZERS),
            ("lr_scheduler_type", LR_SCHEDULERS),
            ("mixed_precision", PRECISIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.warmup_steps + self.lr_decay_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and lr_decay_steps ({self.lr_decay_steps}) must fit into "
                f"max_steps ({self.max_steps})"
            )
        if self.lr_scheduler_type == "warmup_stable_decay" and self.lr_decay_steps == 0:
            raise ValueError("lr_scheduler_type 'warmup_stable_decay' needs lr_decay_steps above 0")
        if self.dynamics_every is not None and self.dynamics_every < 1:
            raise ValueError(f"dynamics_every must be 1 or more, not {self.dynamics_every}")
        if self.stop_at_exact_match is not None and not 0 < self.stop_at_exact_match <= 1:
            raise ValueError(f"stop_at_exact_match must be above 0 and at most 1, not {self.stop_at_exact_match}")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads must be 1 or more, not {self.num_threads}")


class Interrupted(Exception):
    """A signal ended the training after its state was saved."""

    def __init__(self, number: int, step: int):
        super().__init__(f"{signal.Signals(number).name} after step {step}: the state is saved")
        self.number, self.step = number, step


class ICoTTrainer:
    """Trains a causal language model through a curriculum of vanishing thinking tokens.

    Args:
        model: an `ICoTForCausalLM`.
        args: how to train.
        curriculum: what to hide when.
        train_problems: the training problems.
        eval_problems: held-out problems, for the evaluations during training.
        tokenizer: saved with each model folder.
        run_config: the resolved recipe, given to the trackers.

    Raises:
        ValueError: where a batch is larger than the training set, or a row longer than the model's positions.
    """

    def __init__(
        self,
        model,
        args: ICoTTrainingArguments,
        curriculum: CurriculumArguments,
        train_problems: TokenizedProblems,
        eval_problems: TokenizedProblems,
        tokenizer=None,
        run_config: dict | None = None,
    ):
        if args.output_dir is None:
            raise ValueError("output_dir is needed")
        self.args, self.curriculum, self.tokenizer = args, curriculum, tokenizer
        self.output_dir = Path(args.output_dir)
        self.accelerator = Accelerator(
            mixed_precision=args.mixed_precision,
            log_with=args.report_to or None,
            project_dir=str(self.output_dir),
            # Parameters without a gradient (a running-sum head that is not trained) are not waited for.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=hasattr(model, "running_sum_head"))],
        )
        self.is_main = self.accelerator.is_main_process
        world = self.accelerator.num_processes
        self.batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * world
        self.steps_per_epoch = len(train_problems) // self.batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"one step takes {self.batch_size} problems but there are {len(train_problems)} to train on: lower "
                f"per_device_train_batch_size or gradient_accumulation_steps"
            )
        longest = max(train_problems.max_length, eval_problems.max_length)
        if longest > model.config.n_positions:
            raise ValueError(f"the longest row has {longest} tokens, the model n_positions={model.config.n_positions}")
        self.schedule = create_schedule(curriculum, int(train_problems.thinking_length.max()), self.steps_per_epoch)
        self.eval_problems = eval_problems
        # Lengths stay where the loop runs: the sizes of a batch are known without waiting for the device.
        self.lengths = [
            x.long()
            for x in (train_problems.question_length, train_problems.thinking_length, train_problems.answer_length)
        ]
        self.pad_token_id = train_problems.pad_token_id
        self.train_tokens = train_problems.tokens.to(self.accelerator.device)
        self.train_sums = self._running_sum_targets(model, train_problems)
        uniform = all(bool((x == x[0]).all()) for x in self.lengths[:2])
        self.question_length = int(self.lengths[0][0]) if uniform else None

        if args.gradient_checkpointing:
            model.activation_checkpointing_enable()
        optimizers = create_optimizers(model, args)
        self.model, *self.optimizers = self.accelerator.prepare(model, *optimizers)
        decay = {"num_decay_steps": args.lr_decay_steps} if args.lr_scheduler_type == "warmup_stable_decay" else None
        # Not prepared by accelerate, which would step them once for every process.
        self.schedulers = [
            get_scheduler(
                args.lr_scheduler_type,
                optimizer.optimizer,
                num_warmup_steps=args.warmup_steps,
                num_training_steps=args.max_steps,
                scheduler_specific_kwargs=decay,
            )
            for optimizer in self.optimizers
        ]
        # Only training steps run compiled: generation's ever-changing shapes would compile without end.
        self.train_model = torch.compile(self.model) if args.torch_compile else self.model
        self.unwrapped = self.accelerator.unwrap_model(self.model)
        self.run_config = run_config or {}
        # The state of the run: what `save_state` writes.
        self.step, self.stage, self.finished = 0, self.schedule.stage(0), False
        self.tokens_seen, self.examples_seen = 0, 0
        self.logged_step, self.logged_tokens, self.logged_seconds = 0, 0, 0.0
        self.running = torch.zeros(3, device=self.accelerator.device)
        self.observed = torch.zeros(2, dtype=torch.int64, device=self.accelerator.device)
        self._seconds_before = self._training_before = 0.0
        self._status: dict = {}
        self.probe = DigitDynamics(eval_problems.select(slice(DYNAMICS_PROBE)), curriculum)
        self._epoch, self._order = -1, None
        self._begun, self._paused = time.perf_counter(), 0.0

    def _running_sum_targets(self, model, problems: TokenizedProblems) -> torch.Tensor | None:
        """What the running-sum head is to predict, float32 [problems, places], NaN where there is nothing."""
        if not model.config.running_sum_head:
            return None
        if problems.running_sums is None:
            raise ValueError("a model with a running-sum head needs problems with running_sums")
        sums = problems.running_sums.float()
        sums = sums.masked_fill(sums < 0, math.nan)
        if self.args.running_sum_standardize:
            mean = sums.nanmean(0)
            std = (sums - mean).square().nanmean(0).sqrt().clamp(min=1e-6)
            sums = (sums - mean) / std
            model.config.running_sum_mean, model.config.running_sum_std = mean.tolist(), std.tolist()
        return sums.to(self.accelerator.device)

    def running_sum_weight(self, step: int) -> float:
        """λ at a step."""
        start, end = self.args.running_sum_weight, self.args.running_sum_weight_end
        return start if end is None else start + (end - start) * step / self.args.max_steps

    # ---- one step ----

    def _generator(self, *numbers: int) -> torch.Generator:
        """A generator that depends on the seed and `numbers` alone."""
        key = self.args.seed
        for number in numbers:
            # A multiplicative hash keeps neighbouring steps and seeds apart.
            key = (key * 6364136223846793005 + number + 1442695040888963407) % 2**63
        return torch.Generator().manual_seed(key)

    def _indices(self, step: int) -> torch.Tensor:
        """Training problems of the whole batch of `step`, over all processes. Each epoch is one permutation."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, torch.randperm(len(self.lengths[0]), generator=self._generator(0, epoch))
        return self._order[at * self.batch_size : (at + 1) * self.batch_size]

    def batches(self, step: int, stage: Stage) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor], int]:
        """This process's inputs for `step`, one for each accumulation; which of their rows hide just what the stage
        hides; and the loss tokens of the whole batch."""
        index = self._indices(step)
        question, thinking, answer = (x[index] for x in self.lengths)
        hidden = self.schedule.draw_hidden(stage, self.batch_size, self._generator(1, step))
        hidden = torch.minimum(hidden, thinking)
        dropped = hidden if self.curriculum.hidden_as == "drop" else 0
        length = question + thinking + answer + 3 - dropped
        self.tokens_seen += int(length.sum())
        self.examples_seen += self.batch_size
        device, per_device = self.accelerator.device, self.args.per_device_train_batch_size
        inputs, at_stage = [], []
        for accumulation in range(self.args.gradient_accumulation_steps):
            start = (accumulation * self.accelerator.num_processes + self.accelerator.process_index) * per_device
            mine = slice(start, start + per_device)
            rows = index[mine].to(device)
            batch = hide_thinking_tokens(
                self.train_tokens[rows],
                *(x[mine].to(device) for x in (question, thinking, answer, hidden)),
                self.pad_token_id,
                side=self.curriculum.removal_side,
                hidden_as=self.curriculum.hidden_as,
                keep_position=self.curriculum.keep_position,
                max_length=int(length[mine].max()),
            )
            # Trailing pads come after all that carries loss, so causal attention needs no further mask.
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            if self.train_sums is not None:
                gone = dropped[mine].to(device) if torch.is_tensor(dropped) else dropped
                lengths = question[mine].to(device), thinking[mine].to(device)
                batch["running_sum_labels"] = align_with_answer(
                    self.train_sums[rows], *lengths, gone, batch["input_ids"].shape[1]
                )
                batch["running_sum_weight"] = self.running_sum_weight(step)
            inputs.append(batch)
            at_stage.append((hidden[mine] == thinking[mine].clamp(max=stage.hidden)).to(device))
        return inputs, at_stage, supervised_tokens(thinking, answer, hidden)

    def training_step(self, step: int, stage: Stage) -> torch.Tensor:
        """One optimiser step. Returns this process's shares of the loss, of its language-model part (the mean over the
        whole batch's loss tokens), and of the mean squared error of the running sums: [3]."""
        inputs, at_stage, loss_tokens = self.batches(step, stage)
        total = torch.zeros(3, device=self.accelerator.device)
        for number, batch in enumerate(inputs):
            last = number + 1 == len(inputs)
            with self.accelerator.no_sync(self.model) if not last else nullcontext():
                with self.accelerator.autocast():
                    output = self.train_model(**batch, num_items_in_batch=loss_tokens, use_cache=False)
                # Gradients are averaged over processes, while the loss is a mean over the whole batch.
                self.accelerator.backward(output.loss * self.accelerator.num_processes)
            total[0] += output.loss.detach()
            total[1] += output.lm_loss.detach()
            if output.running_sum_loss is not None:
                total[2] += output.running_sum_loss.detach() / (len(inputs) * self.accelerator.num_processes)
            if self.schedule.observe_steps:
                targets = batch["labels"][:, 1:]
                right = ((output.logits[:, :-1].argmax(-1) == targets) | (targets == -100)).all(1)
                self.observed += torch.stack([(right & at_stage[number]).sum(), at_stage[number].sum()])
        if self.args.max_grad_norm > 0:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return total

    # ---- the run ----

    def train(self) -> dict:
        """Run all steps, or those left after `resume`. Returns the last stage's evaluation and the run's totals.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the state was saved.
            FloatingPointError: the loss is not finite.
            OSError: the run folder cannot be written; the last state is whole.
        """
        args = self.args
        if self.is_main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        if args.report_to:
            flat = {k: v for k, v in self.run_config.items() if isinstance(v, (int, float, str, bool))}
            self.accelerator.init_trackers("hf_icot", config=flat)
        self.model.train()
        self._begun = time.perf_counter()
        hide = args.disable_tqdm or not self.is_main
        self._bar = tqdm(
            total=args.max_steps, initial=self.step, desc="training", unit="step", disable=hide, smoothing=0.1
        )
        with stop_on_signal() as signals:
            while self.step < args.max_steps and not self.finished:
                self._enter_stage()
                self._measure_dynamics()
                self.running += self.training_step(self.step, self.stage)
                self.step += 1
                self._bar.update()
                self._observe()
                if self.step % args.logging_steps == 0 or self.step == args.max_steps:
                    self._log_training()
                if self.step % args.eval_steps == 0 and self.step < args.max_steps:
                    result = self.evaluate(self.stage)
                    self._log("eval", result.to_dict())
                    self._show(acc=f"{result.exact_match:.3f}")
                    through = self.schedule.is_last(self.stage)
                    self.finished = through and result.exact_match >= (args.stop_at_exact_match or math.inf)
                if self.step % args.save_steps == 0:
                    self.save_state()
                if self._interrupted(signals):
                    self.save_state()
                    raise Interrupted(signals[0] if signals else signal.SIGTERM, self.step)
        self.finished = True
        self.save_state()
        result = self._end_stage()
        self._bar.close()
        if args.report_to:
            self.accelerator.end_training()
        return {
            "steps": self.step,
            "stage": self.stage.index,
            "hidden_tokens": self.stage.hidden,
            "tokens": self.tokens_seen,
            "examples": self.examples_seen,
            "seconds": self.seconds,
            **{f"validation_{key}": value for key, value in result.items()},
        }

    def _enter_stage(self) -> None:
        """Go over to the stage of the next step, if it is another one, and close the one before."""
        now = self.schedule.stage(self.step)
        if now == self.stage:
            return
        self._end_stage()
        if self.curriculum.reset_optimizer:
            for optimizer in self.optimizers:
                optimizer.optimizer.state.clear()
        self.stage = now
        self.observed.zero_()
        self.save_state()

    def _observe(self) -> None:
        """Tell the schedule what the model can do, where it wants to know."""
        every = self.schedule.observe_steps
        if every and (self.step - self.stage.start) % every == 0:
            right, shown = self.accelerator.reduce(self.observed, reduction="sum").tolist()
            self.observed.zero_()
            if shown:
                self.schedule.observe(self.step - 1, right / shown)

    def _measure_dynamics(self) -> None:
        """How each digit is learned, before step 0 and then every `dynamics_every` steps."""
        every = self.args.dynamics_every
        if not every or self.step % every:
            return
        with self._pause():
            if self.is_main:
                values = self.probe.measure(self.unwrapped, self.stage.hidden)
                line = {"step": self.step, "hidden_tokens": self.stage.hidden, **values}
                with open(self.output_dir / "dynamics.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            self.accelerator.wait_for_everyone()

    def _log_training(self) -> None:
        sums = self.accelerator.reduce(self.running, reduction="sum") / (self.step - self.logged_step)
        loss, lm_loss, running_sum_loss = sums.tolist()
        seconds = self.training_seconds
        rate = (self.tokens_seen - self.logged_tokens) / (seconds - self.logged_seconds)
        parts = {"lm_loss": lm_loss, "running_sum_loss": running_sum_loss} if self.train_sums is not None else {}
        self._log("train", {"loss": loss, **parts, "tokens_per_second": round(rate, 1)})
        self._show(loss=f"{loss:.4f}", hidden=self.stage.hidden, **{"tok/s": f"{rate:.0f}"})
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {self.step}: lower the learning rate")
        self.running.zero_()
        self.logged_step, self.logged_tokens, self.logged_seconds = self.step, self.tokens_seen, seconds

    def _interrupted(self, signals: list) -> bool:
        """Whether to stop here: all processes must at the same step."""
        if self.accelerator.num_processes == 1:
            return bool(signals)
        if self.step % SIGNAL_STEPS:
            return False
        flag = torch.tensor(float(bool(signals)), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def plan(self, timed_steps: int = 6) -> list[dict]:
        """The stages of the run to come, as far as they are known: hidden tokens, steps, tokens, estimated seconds.

        Steps of the first and the last stage are timed, on weights that are put back; in between time is taken to go
        with the tokens. A gated schedule knows its stages only as they come: its plan is the least and the most.
        """
        before = {k: v.clone() for k, v in self.unwrapped.state_dict().items()}
        stages = [stage for stage in self.schedule.stages if stage.start < self.args.max_steps]
        ends = [stage.start for stage in stages[1:]] + [self.args.max_steps]
        mean = sum(float(x.double().mean()) for x in self.lengths) + 3
        rows = []
        for stage, end in zip(stages, ends, strict=True):
            gone = self.lengths[1].clamp(max=stage.hidden).double().mean().item()
            tokens = self.batch_size * (mean - (gone if self.curriculum.hidden_as == "drop" else 0))
            rows.append({"hidden_tokens": stage.hidden, "start": stage.start, "steps": end - stage.start})
            rows[-1] |= {"tokens": round(tokens * (end - stage.start)), "tokens_per_step": tokens}
        self.model.train()
        times = []
        for stage in (stages[0], stages[-1]):
            seconds = []
            for step in range(timed_steps):
                begun = time.perf_counter()
                self._timed_step(step, stage)
                seconds.append(time.perf_counter() - begun)
            times.append(min(seconds))  # the first steps warm up
        self.unwrapped.load_state_dict(before)
        low, high = rows[-1]["tokens_per_step"], rows[0]["tokens_per_step"]
        for row in rows:
            share = (row.pop("tokens_per_step") - low) / (high - low) if high > low else 1.0
            row["seconds"] = round((times[1] + share * (times[0] - times[1])) * row["steps"], 1)
        return rows

    def _timed_step(self, step: int, stage: Stage) -> None:
        self.training_step(step, stage)
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    # ---- states ----

    def save_state(self) -> None:
        """Write all that the next step depends on to `state/`, in the middle of a run."""
        with self._pause():
            # What differs between processes: random generators and the sums since the last report.
            mine = {
                "random": random_states(),
                "running": self.running.tolist(),
                "observed": self.observed.tolist(),
            }
            processes = gather_object([mine])
            if self.is_main:
                tensors = {f"model.{k}": v for k, v in self.unwrapped.state_dict().items()}
                groups = []
                for number, optimizer in enumerate(self.optimizers):
                    moments, group = pack_optimizer(optimizer.optimizer, f"optimizer{number}")
                    tensors |= moments
                    groups.append(group)
                scaler = self.accelerator.scaler
                values = {
                    **{name: getattr(self, name) for name in STATE_FIELDS},
                    "seconds": self.seconds,
                    "training_seconds": self.training_seconds,
                    "stage": list(dataclasses.astuple(self.stage)),
                    "schedule": self.schedule.state_dict(),
                    "lr_schedulers": [
                        {
                            k: v
                            for k, v in scheduler.state_dict().items()
                            if k in ("last_epoch", "_step_count", "_last_lr")
                        }
                        for scheduler in self.schedulers
                    ],
                    "optimizer_groups": groups,
                    "scaler": scaler.state_dict() if scaler is not None else None,
                    "processes": processes,
                    "line_files": {name: _size(self.output_dir / name) for name in LINE_FILES},
                    "run_config": self.run_config,
                }
                save_state(self.output_dir / "state", self.step, tensors, values)
            self.accelerator.wait_for_everyone()

    def resume(self) -> int:
        """Take up the run folder's last whole state. Returns the steps that are done.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it belongs to another recipe or another number of processes.
        """
        _, tensors, values = load_state(self.output_dir / "state")
        check_recipe(values["run_config"], self.run_config)
        processes = values["processes"]
        if len(processes) != self.accelerator.num_processes:
            raise ValueError(
                f"the run had {len(processes)} processes, not {self.accelerator.num_processes}: start as many"
            )
        weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
        self.unwrapped.load_state_dict(weights)
        for number, (optimizer, groups) in enumerate(zip(self.optimizers, values["optimizer_groups"], strict=True)):
            unpack_optimizer(optimizer.optimizer, tensors, groups, f"optimizer{number}")
        for scheduler, state in zip(self.schedulers, values["lr_schedulers"], strict=True):
            scheduler.load_state_dict({**state, "lr_lambdas": [None] * len(scheduler.base_lrs)})
        if values["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(values["scaler"])
        for name in STATE_FIELDS:
            setattr(self, name, values[name])
        self._seconds_before, self._training_before = values["seconds"], values["training_seconds"]
        self.schedule.load_state_dict(values["schedule"])
        self.stage = Stage(*values["stage"])
        mine = processes[self.accelerator.process_index]
        self.running.copy_(torch.tensor(mine["running"]))
        self.observed.copy_(torch.tensor(mine["observed"]))
        set_random_states(mine["random"])
        if self.is_main:
            for name, size in values["line_files"].items():
                if (self.output_dir / name).exists():
                    os.truncate(self.output_dir / name, size)
        return self.step

    def evaluate(self, stage: Stage) -> EvaluationResult:
        """Exact match and per-digit accuracy on the held-out problems, teacher forced, over all processes."""
        with self._pause():
            return evaluate_teacher_forced(
                self.model,
                self.eval_problems,
                stage.hidden,
                side=self.curriculum.removal_side,
                hidden_as=self.curriculum.hidden_as,
                keep_position=self.curriculum.keep_position,
                batch_size=self.args.per_device_eval_batch_size,
                accelerator=self.accelerator,
            )

    def generate(self, problems: TokenizedProblems, hidden: int) -> EvaluationResult:
        """Greedy generation by this process alone, in full precision, as a user of the saved model would."""
        return evaluate_generation(
            self.unwrapped,
            problems,
            hidden,
            side=self.curriculum.removal_side,
            hidden_as=self.curriculum.hidden_as,
            keep_position=self.curriculum.keep_position,
        )

    def _end_stage(self) -> dict:
        """Evaluate, generate for real, log both, and keep the stage's model."""
        stage = self.stage
        forced = self.evaluate(stage)
        values = forced.to_dict()
        with self._pause():
            if self.is_main:
                padded = self.curriculum.hidden_as == "pad" and self.curriculum.removal_side == "right"
                if not padded or stage.hidden in (0, self.schedule.thinking_length):
                    generated = self.generate(self.eval_problems, stage.hidden)
                    values |= {
                        "generated_exact_match": generated.exact_match,
                        "generated_target_match": generated.target_match,
                        "generated_digit_accuracy": generated.digit_accuracy,
                    }
                    gap = abs(generated.target_match - forced.exact_match)
                    if gap > 0.01 and self.args.mixed_precision == "no":
                        self._bar.write(
                            f"warning: {stage.hidden} tokens hidden, {generated.target_match:.4f} of the targets are "
                            f"generated but {forced.exact_match:.4f} right under teacher forcing; these should agree"
                        )
                folder = self.output_dir / "stages" / f"hidden-{stage.hidden:03d}"
                self.save_model(folder, stage.hidden, {"step": self.step, **values})
            self.accelerator.wait_for_everyone()
        self._log("stage", {"reason": stage.reason, **values})
        return values

    def save_model(self, folder: Path, hidden: int, metrics: dict | None = None) -> None:
        """Save a loadable model folder with tokenizer and metrics, all or nothing. Main process only.

        Where every row has the same question length, the position embeddings are re-ordered so that the saved model
        takes ordinary positions although training kept those of the hidden tokens.
        """
        removed = min(hidden, self.schedule.thinking_length)
        kept_positions = self.curriculum.keep_position and self.curriculum.hidden_as == "drop" and removed > 0
        folded = not kept_positions or self.question_length is not None
        start = jump = 0
        if kept_positions and folded:
            jump, start = removed, self.question_length + 1
            if self.curriculum.removal_side == "right":
                start += self.schedule.thinking_length - removed
        config = {
            "hidden_tokens": hidden,
            "hidden_as": self.curriculum.hidden_as,
            "removal_side": self.curriculum.removal_side,
            "keep_position": not folded,
        }
        for name, value in config.items():
            setattr(self.unwrapped.config, name, value)
        with atomic_folder(folder) as temporary:
            with folded_positions(self.unwrapped, start, jump), quiet_transformers():
                self.unwrapped.save_pretrained(temporary)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(temporary)
            if metrics is not None:
                (temporary / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")

    # ---- records ----

    @contextmanager
    def _pause(self):
        """Time spent inside does not count as training time."""
        begun = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begun

    @property
    def seconds(self) -> float:
        """Wall time of the run, over all its sittings."""
        return self._seconds_before + time.perf_counter() - self._begun

    @property
    def training_seconds(self) -> float:
        """Wall time of the run without evaluations and saving."""
        return self._training_before + time.perf_counter() - self._begun - self._paused

    def _log(self, event: str, values: dict) -> None:
        """One line of metrics.jsonl, and the same to the trackers."""
        line = {
            "event": event,
            "step": self.step,
            "stage": self.stage.index,
            "hidden_tokens": self.stage.hidden,
            "thinking_tokens": self.schedule.thinking_length,
            "tokens": self.tokens_seen,
            "seconds": round(self.seconds, 3),
            "learning_rate": self.schedulers[-1].get_last_lr()[0],
            **values,
        }
        if self.is_main:
            with open(self.output_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if self.args.report_to:
            flat = {f"{event}/{k}": v for k, v in line.items() if isinstance(v, (int, float))}
            for name in ("digit_accuracy", "digit_loss"):
                flat |= {f"{event}/{name}_{k}": v for k, v in enumerate(values.get(name, []))}
            self.accelerator.log(flat, step=self.step)

    def _show(self, **values) -> None:
        self._status |= values
        self._bar.set_postfix(self._status)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def check_recipe(before: dict, now: dict) -> None:
    """Say what a resumed run's recipe has changed.

    Raises:
        ValueError: a changed key would make another run of it.
    """
    changed = {k: (before.get(k), now.get(k)) for k in before.keys() | now.keys() if before.get(k) != now.get(k)}
    text = ", ".join(f"{k}: {old!r} -> {new!r}" for k, (old, new) in sorted(changed.items()))
    refused = sorted(changed.keys() - FREE_ON_RESUME)
    if refused:
        raise ValueError(f"the recipe differs from the run's ({text}): {', '.join(refused)} cannot change in a run")
    shown = {k for k in changed if k not in ("resume", "output_dir")}
    if shown:
        warnings.warn(f"resuming with a changed recipe: {text}", stacklevel=2)


@contextmanager
def stop_on_signal():
    """Inside, SIGINT and SIGTERM are put on the list it yields. A later SIGINT ends the process as usual.

    "Later" by two seconds: launchers pass on what the terminal has sent to all already.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    first = 0.0

    def receive(number, frame):
        nonlocal first
        if received and number == signal.SIGINT and time.monotonic() - first > 2:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        first = first or time.monotonic()
        received.append(number)

    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def quiet_transformers():
    """Without transformers' own progress bars, which would break into the training's."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextmanager
def atomic_folder(folder: Path):
    """Write a model folder beside its place and move it there when complete.

    A folder that exists keeps its other files. It has no config.json, and so cannot be loaded, while files move in.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            (folder / "config.json").unlink(missing_ok=True)
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):
                path.replace(folder / path.name)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
