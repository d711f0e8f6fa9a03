"""Which thinking tokens are hidden at a training step, and the one vectorised operation that hides them.

Implicit chain-of-thought (arXiv 2405.14838, section 3) starts from the full chain and removes its tokens one after
the other until only question and answer are left. This module knows neither the task nor the model: a chain is a
segment of a token row, given by its lengths.
"""

import math
from dataclasses import dataclass, field

import torch


METHODS = ("sft", "cot", "icot")
SCHEDULES = ("fixed", "log", "gated")
REMOVAL_SIDES = ("left", "right")
HIDDEN_AS = ("drop", "pad")


@dataclass
class CurriculumArguments:
    """How the chain of thought is shown and taken away."""

    method: str = field(
        default="icot",
        metadata={
            "help": "'sft': no chain at any time; 'cot': the full chain at any time; 'icot': the chain is removed "
            "step by step.",
            "choices": METHODS,
        },
    )
    schedule: str = field(
        default="fixed",
        metadata={
            "help": "icot: 'fixed': so many tokens at a fixed pace; 'log': Log-ICoT, stage t of L hides the first "
            "τ(1 - 2^-(t-1)) of τ tokens and the last stage all; 'gated': the next tokens go once the present stage "
            "is mastered.",
            "choices": SCHEDULES,
        },
    )
    pretrain_steps: int = field(
        default=0, metadata={"help": "icot: steps with the full chain before the first stage begins."}
    )
    remove_per_stage: int = field(
        default=1, metadata={"help": "fixed: thinking tokens removed at each stage; gated: the first stage's."}
    )
    steps_per_stage: int | None = field(
        default=None, metadata={"help": "fixed and log: training steps in each stage. Excludes --remove_per_epoch."}
    )
    remove_per_epoch: float | None = field(
        default=None,
        metadata={
            "help": "fixed: thinking tokens removed per epoch, evenly spread over its steps (the papers: 8). Excludes "
            "--steps_per_stage."
        },
    )
    num_stages: int | None = field(
        default=None, metadata={"help": "log: number L of stages. Unset: log2(τ + 1), rounded up."}
    )
    gate_exact_match: float = field(
        default=0.9,
        metadata={
            "help": "gated: exact match of all that is left to write, chain and answer, over the training problems of "
            "gate_window steps, at which the next tokens go."
        },
    )
    gate_window: int = field(default=20, metadata={"help": "gated: a stage is judged every so many steps."})
    gate_max_steps: int = field(
        default=1000, metadata={"help": "gated: steps after which the next tokens go all the same."}
    )
    gate_max_block: int = field(default=8, metadata={"help": "gated: the most tokens that go at once."})
    stage_mixing: float = field(
        default=0.0,
        metadata={"help": "icot: probability that an example is shown as in a random earlier stage."},
    )
    removal_side: str = field(
        default="left", metadata={"help": "icot: the end of the chain that goes first.", "choices": REMOVAL_SIDES}
    )
    removal_smoothing_lambda: float | None = field(
        default=None,
        metadata={
            "help": "icot: λ of P(o) = (1 - e^-λ) e^-λo, the number o of further tokens hidden in an example. Unset: "
            "no smoothing. The papers use 4."
        },
    )
    keep_position: bool = field(
        default=True, metadata={"help": "icot: tokens that remain keep the position ids they had in the full row."}
    )
    hidden_as: str = field(
        default="drop",
        metadata={
            "help": "'drop': hidden tokens leave the row; 'pad': they become pad tokens, attended to, without loss.",
            "choices": HIDDEN_AS,
        },
    )
    reset_optimizer: bool = field(
        default=False, metadata={"help": "icot: forget the optimiser's moments whenever tokens are removed."}
    )
    remove_all_beyond: int | None = field(
        default=None, metadata={"help": "icot: once more than this many tokens are hidden, hide all at once."}
    )

    def __post_init__(self):
        for name, allowed in (
            ("method", METHODS),
            ("schedule", SCHEDULES),
            ("removal_side", REMOVAL_SIDES),
            ("hidden_as", HIDDEN_AS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.pretrain_steps < 0:
            raise ValueError(f"pretrain_steps must be 0 or more, not {self.pretrain_steps}")
        if self.remove_per_stage < 1:
            raise ValueError(f"remove_per_stage must be 1 or more, not {self.remove_per_stage}")
        if self.remove_all_beyond is not None and self.remove_all_beyond < 0:
            raise ValueError(f"remove_all_beyond must be 0 or more, not {self.remove_all_beyond}")
        if self.removal_smoothing_lambda is not None and not self.removal_smoothing_lambda > 0:
            raise ValueError(
                f"removal_smoothing_lambda must be above 0 (leave it out for no smoothing), not "
                f"{self.removal_smoothing_lambda}"
            )
        for name in ("gate_window", "gate_max_steps", "gate_max_block", "num_stages", "steps_per_stage"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 0 < self.gate_exact_match <= 1:
            raise ValueError(f"gate_exact_match must be above 0 and at most 1, not {self.gate_exact_match}")
        if not 0 <= self.stage_mixing < 1:
            raise ValueError(f"stage_mixing must be at least 0 and below 1, not {self.stage_mixing}")
        if self.remove_per_epoch is not None and not self.remove_per_epoch > 0:
            raise ValueError(f"remove_per_epoch must be above 0, not {self.remove_per_epoch}")
        if self.gate_max_steps < self.gate_window:
            raise ValueError(
                f"gate_max_steps ({self.gate_max_steps}) must not be below gate_window ({self.gate_window})"
            )
        if self.method != "icot":
            return
        if self.schedule == "fixed" and (self.steps_per_stage is None) == (self.remove_per_epoch is None):
            raise ValueError("the fixed schedule needs exactly one of steps_per_stage and remove_per_epoch")
        if self.schedule == "log" and self.steps_per_stage is None:
            raise ValueError("the log schedule needs steps_per_stage")


@dataclass(frozen=True)
class Stage:
    """A stretch of training with one number of hidden tokens, from step `start` on.

    `reason` says why it began.
    """

    index: int
    hidden: int
    start: int
    reason: str = "schedule"


class Schedule:
    """The number of hidden thinking tokens as a function of the training step.

    Args:
        arguments: the curriculum.
        thinking_length: tokens τ of the longest chain in the data. Shorter chains are gone before it.
        steps_per_epoch: needed for `remove_per_epoch`.

    Attributes:
        stages: all stages, known at the start so that a run can be planned and drawn.
    """

    def __init__(self, arguments: CurriculumArguments, thinking_length: int, steps_per_epoch: int | None = None):
        self.arguments = arguments
        self.thinking_length = thinking_length
        if arguments.method == "icot" and arguments.remove_per_epoch is not None and not steps_per_epoch:
            raise ValueError("remove_per_epoch needs the number of steps in an epoch")
        self.stages = self._stages(steps_per_epoch)

    @property
    def final_hidden(self) -> int:
        """Thinking tokens hidden when the curriculum is through."""
        return 0 if self.arguments.method == "cot" else self.thinking_length

    def _stages(self, steps_per_epoch: int | None) -> list[Stage]:
        arguments = self.arguments
        if arguments.method != "icot" or self.thinking_length == 0:
            return [Stage(0, self.final_hidden, 0)]
        if arguments.schedule == "log":
            hidden = log_icot_blocks(self.thinking_length, arguments.num_stages)
            starts = [arguments.pretrain_steps * (t > 0) + t * arguments.steps_per_stage for t in range(len(hidden))]
        else:
            hidden, starts = self._fixed(steps_per_epoch)
        # A stage without a step (no pretraining, or several removals within one step) never happens.
        kept = [i for i in range(len(hidden)) if i + 1 == len(hidden) or starts[i] < starts[i + 1]]
        return [Stage(n, hidden[i], starts[i]) for n, i in enumerate(kept)]

    def _fixed(self, steps_per_epoch: int | None) -> tuple[list[int], list[int]]:
        arguments, hidden, starts, removed = self.arguments, [0], [0], 0
        while hidden[-1] < self.thinking_length:
            removed += arguments.remove_per_stage
            if arguments.steps_per_stage is not None:
                wait = (len(hidden) - 1) * arguments.steps_per_stage
            else:
                # The first step at which the pace, a real number of tokens, has reached this many whole ones.
                wait = math.ceil(removed * steps_per_epoch / arguments.remove_per_epoch)
            hidden.append(self._all_beyond(removed))
            starts.append(arguments.pretrain_steps + wait)
        return hidden, starts

    def _all_beyond(self, removed: int) -> int:
        """`removed`, or the whole chain if that is more than may be hidden without the rest."""
        beyond = self.arguments.remove_all_beyond is not None and removed > self.arguments.remove_all_beyond
        return self.thinking_length if beyond else min(removed, self.thinking_length)

    def stage(self, step: int) -> Stage:
        """The stage that training step `step` (from 0) belongs to."""
        for stage in reversed(self.stages):
            if step >= stage.start:
                return stage
        raise ValueError(f"step must be 0 or more, not {step}")

    def is_last(self, stage: Stage) -> bool:
        """Whether nothing more will be hidden after `stage`."""
        return stage.hidden == self.final_hidden

    def draw_hidden(self, stage: Stage, count: int, generator: torch.Generator) -> torch.Tensor:
        """Hidden tokens for each of `count` examples: those of the stage, or of an earlier one by `stage_mixing`, and
        the smoothing offset. int64 [count].

        P(o) = (1 - e^-λ) e^-λo means P(o >= k) = e^-λk, so o is the floor of an exponential variable of rate λ.
        The result may exceed an example's chain: `hide_thinking_tokens` hides no more than there are.
        """
        hidden = torch.full((count,), stage.hidden, dtype=torch.int64)
        if self.arguments.method != "icot":
            return hidden
        earlier = [other.hidden for other in self.stages[: stage.index]]
        if self.arguments.stage_mixing > 0 and earlier:
            other = torch.tensor(earlier)[torch.randint(len(earlier), (count,), generator=generator)]
            hidden = torch.where(torch.rand(count, generator=generator) < self.arguments.stage_mixing, other, hidden)
        rate = self.arguments.removal_smoothing_lambda
        if rate is not None and not math.isinf(rate):
            hidden += torch.empty(count).exponential_(rate, generator=generator).long()
        return hidden

    # Steps between two calls of `observe`; None where what the model can do has no influence.
    observe_steps: int | None = None

    def observe(self, step: int, exact_match: float) -> None:
        """The exact match over the training problems of the last `observe_steps` steps, the last being `step`."""

    def state_dict(self) -> dict:
        """What `load_state_dict` needs to go on from here, as plain numbers."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Take up the state of another instance with the same arguments."""


class GatedSchedule(Schedule):
    """Hides the next block once the present stage is mastered, or its budget of steps is spent.

    A stage is mastered when the exact match of all that is left to write, chain and answer, over `gate_window` steps
    reaches `gate_exact_match`: teacher forced on the training problems themselves, which costs nothing and is what
    generation would give. (The answer alone misleads: given the true remaining chain it is right long after the
    model has lost the power to write that chain.) A stage that is mastered as soon as it may be doubles the block, one
    that is not within `gate_max_steps` halves it.
    """

    def __init__(self, arguments: CurriculumArguments, thinking_length: int, steps_per_epoch: int | None = None):
        super().__init__(arguments, thinking_length, steps_per_epoch)
        self.block = arguments.remove_per_stage
        self.observe_steps = arguments.gate_window

    def _stages(self, steps_per_epoch: int | None) -> list[Stage]:
        return [Stage(0, 0, 0)]  # the others are added as they come

    def observe(self, step: int, exact_match: float) -> None:
        arguments, stage = self.arguments, self.stages[-1]
        steps = step + 1 - stage.start
        least = max(arguments.gate_window, arguments.pretrain_steps if stage.index == 0 else 0)
        if self.is_last(stage) or steps < least:
            return
        if exact_match >= arguments.gate_exact_match:
            reason = f"exact match {exact_match:.3f} after {steps} steps"
            if steps == arguments.gate_window:
                self.block = min(2 * self.block, arguments.gate_max_block)
                reason += f", at once: block of {self.block}"
        elif steps >= max(least, arguments.gate_max_steps):
            self.block = max(1, self.block // 2)
            reason = f"{steps} steps spent at exact match {exact_match:.3f}: block of {self.block}"
        else:
            return
        self.stages.append(Stage(stage.index + 1, self._all_beyond(stage.hidden + self.block), step + 1, reason))

    def state_dict(self) -> dict:
        return {"block": self.block, "stages": [[s.index, s.hidden, s.start, s.reason] for s in self.stages]}

    def load_state_dict(self, state: dict) -> None:
        self.block = state["block"]
        self.stages = [Stage(*entry) for entry in state["stages"]]


def log_icot_blocks(thinking_length: int, num_stages: int | None = None) -> list[int]:
    """Hidden tokens in each stage of Log-ICoT (arXiv 2605.28600): stage t of L hides the first τ(1 - 2^-(t-1)).

    The last stage hides all τ. A fraction of a token is hidden too: for the τ = k - 1 nodes of a tree over k = 2^L
    leaves this gives whole levels, k/2, 3k/4, ….

    Args:
        thinking_length: τ.
        num_stages: L; log2(τ + 1) rounded up if None, and at least 2 where there is a token to hide.
    """
    count = num_stages or max(2, math.ceil(math.log2(thinking_length + 1)))
    return [math.ceil(thinking_length * (1 - 2.0**-t)) for t in range(count - 1)] + [thinking_length]


def create_schedule(
    arguments: CurriculumArguments, thinking_length: int, steps_per_epoch: int | None = None
) -> Schedule:
    """The schedule that `arguments` name; see `Schedule` for the parameters."""
    gated = arguments.method == "icot" and arguments.schedule == "gated" and thinking_length > 0
    return (GatedSchedule if gated else Schedule)(arguments, thinking_length, steps_per_epoch)


def supervised_tokens(thinking_length: torch.Tensor, answer_length: torch.Tensor, hidden: torch.Tensor) -> int:
    """Tokens that carry loss in a batch: what is left of the chain, `####`, the answer and `<eos>`."""
    return int((thinking_length - hidden).clamp(min=0).sum() + answer_length.sum() + 2 * len(answer_length))


def hide_thinking_tokens(
    tokens: torch.Tensor,
    question_length: torch.Tensor,
    thinking_length: torch.Tensor,
    answer_length: torch.Tensor,
    hidden: torch.Tensor,
    pad_token_id: int,
    side: str = "left",
    hidden_as: str = "drop",
    keep_position: bool = True,
    max_length: int | None = None,
) -> dict[str, torch.Tensor]:
    """Hide `hidden[i]` thinking tokens of row i of a batch, ragged or not.

    Args:
        tokens: [batch, length], rows `question %%% chain #### answer <eos>`, padded on the right.
        question_length, thinking_length, answer_length: [batch], tokens of the three segments.
        hidden: [batch], thinking tokens to hide; all of a row's chain if it has fewer.
        pad_token_id: what stands after a row's end, and in place of a hidden token for `hidden_as="pad"`.
        side: hide from the "left" or the "right" end of the chain.
        hidden_as: "drop" or "pad".
        keep_position: the tokens that remain keep their position ids ("drop" only; padding moves nothing).
        max_length: length of the result. Computed if None, which waits for the device where `tokens` lies on one.

    Returns:
        `input_ids` int64 [batch, new length]; `labels`, the same with -100 at the question, `%%%`, hidden and
        trailing places (unshifted, as transformers' models want them); `position_ids`, or None where these are
        0, 1, 2, … for every row.
    """
    question_length = question_length.long()
    hidden = torch.minimum(hidden, thinking_length.to(hidden.dtype)).long()
    row_length = question_length + thinking_length + answer_length + 3
    first = question_length + 1 if side == "left" else question_length + 1 + thinking_length - hidden

    if hidden_as == "pad":
        new_length = max_length if max_length is not None else int(row_length.max())
        place = torch.arange(new_length, device=tokens.device)
        is_hidden = (place >= first[:, None]) & (place < (first + hidden)[:, None])
        input_ids = tokens[:, :new_length].long().masked_fill(is_hidden, pad_token_id)
        unlabelled = is_hidden | (place <= question_length[:, None]) | (place >= row_length[:, None])
        return {"input_ids": input_ids, "labels": input_ids.masked_fill(unlabelled, -100), "position_ids": None}

    kept = row_length - hidden
    new_length = max_length if max_length is not None else int(kept.max())
    place = torch.arange(new_length, device=tokens.device)
    # Where each place of the new row comes from in the old one; this is also the position it had.
    source = place + hidden[:, None] * (place >= first[:, None])
    source.clamp_(max=tokens.shape[1] - 1)
    after_end = place >= kept[:, None]
    input_ids = tokens.gather(1, source).long().masked_fill_(after_end, pad_token_id)
    labels = input_ids.masked_fill(after_end | (place <= question_length[:, None]), -100)
    return {"input_ids": input_ids, "labels": labels, "position_ids": source if keep_position else None}


def align_with_answer(
    values: torch.Tensor,
    question_length: torch.Tensor,
    thinking_length: torch.Tensor,
    dropped: torch.Tensor | int,
    length: int,
) -> torch.Tensor:
    """Put values that belong to the places of an answer where `hide_thinking_tokens` leaves its tokens.

    Args:
        values: float [batch, places], NaN where there is none.
        question_length, thinking_length: [batch].
        dropped: thinking tokens that have left the row, [batch] or one number.
        length: length of the row.

    Returns:
        float [batch, length], NaN elsewhere: aligned as `labels`, unshifted.
    """
    first = question_length.long() + thinking_length.long() - dropped + 2
    place = first[:, None] + torch.arange(values.shape[1], device=values.device)
    # What has no value goes to a place beyond the row, which is cut off.
    place = place.masked_fill(values.isnan() | (place > length), length)
    empty = torch.full((len(values), length + 1), math.nan, dtype=values.dtype, device=values.device)
    return empty.scatter_(1, place, values)[:, :length]
