"""Which thinking tokens are hidden at a training step, and the one vectorised operation that hides them.

Implicit chain-of-thought (arXiv 2405.14838, section 3) starts from the full chain and removes its tokens one after
the other until only question and answer are left. This module knows neither the task nor the model: a chain is a
segment of a token row, given by its lengths.
"""

import math
from dataclasses import dataclass, field

import torch


METHODS = ("sft", "cot", "icot")
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
    pretrain_steps: int = field(
        default=0, metadata={"help": "icot: steps with the full chain before the first token is removed."}
    )
    remove_per_stage: int = field(default=1, metadata={"help": "icot: thinking tokens removed at each stage."})
    steps_per_stage: int | None = field(
        default=None, metadata={"help": "icot: training steps in each stage. Excludes --remove_per_epoch."}
    )
    remove_per_epoch: float | None = field(
        default=None,
        metadata={
            "help": "icot: thinking tokens removed per epoch, evenly spread over its steps (the papers: 8). Excludes "
            "--steps_per_stage."
        },
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
        for name, allowed in (("method", METHODS), ("removal_side", REMOVAL_SIDES), ("hidden_as", HIDDEN_AS)):
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
        if self.method != "icot":
            return
        if (self.steps_per_stage is None) == (self.remove_per_epoch is None):
            raise ValueError("method 'icot' needs exactly one of steps_per_stage and remove_per_epoch")
        if self.steps_per_stage is not None and self.steps_per_stage < 1:
            raise ValueError(f"steps_per_stage must be 1 or more, not {self.steps_per_stage}")
        if self.remove_per_epoch is not None and not self.remove_per_epoch > 0:
            raise ValueError(f"remove_per_epoch must be above 0, not {self.remove_per_epoch}")


@dataclass(frozen=True)
class Stage:
    """A stretch of training with one number of hidden tokens: steps `start` <= step < `end` (None: to the end)."""

    index: int
    hidden: int
    start: int
    end: int | None


class Schedule:
    """The number of hidden thinking tokens as a function of the training step.

    Args:
        arguments: the curriculum.
        thinking_length: tokens of the longest chain in the data. Shorter chains are gone before it.
        steps_per_epoch: needed for `remove_per_epoch`.

    The stages are listed once, at the start, so that a run can be planned, drawn and taken up again at any step.
    """

    def __init__(self, arguments: CurriculumArguments, thinking_length: int, steps_per_epoch: int | None = None):
        self.arguments = arguments
        self.thinking_length = thinking_length
        if arguments.method == "icot" and arguments.remove_per_epoch is not None and not steps_per_epoch:
            raise ValueError("remove_per_epoch needs the number of steps in an epoch")
        self.stages = self._stages(steps_per_epoch)

    def _stages(self, steps_per_epoch: int | None) -> list[Stage]:
        arguments, total = self.arguments, self.thinking_length
        if arguments.method == "sft" or total == 0:
            return [Stage(0, total, 0, None)]
        if arguments.method == "cot":
            return [Stage(0, 0, 0, None)]

        hidden, removed, start, starts = [0], 0, arguments.pretrain_steps, [0]
        while hidden[-1] < total:
            removed += arguments.remove_per_stage
            if arguments.steps_per_stage is not None:
                start = arguments.pretrain_steps + (len(hidden) - 1) * arguments.steps_per_stage
            else:
                # The first step at which the pace, a real number of tokens, has reached this many whole ones.
                start = arguments.pretrain_steps + math.ceil(removed * steps_per_epoch / arguments.remove_per_epoch)
            beyond = arguments.remove_all_beyond is not None and removed > arguments.remove_all_beyond
            hidden.append(total if beyond else min(removed, total))
            starts.append(start)
        # A stage without a step (no pretraining, or several removals within one step) never happens.
        kept = [i for i in range(len(hidden)) if i + 1 == len(hidden) or starts[i] < starts[i + 1]]
        ends = [starts[i] for i in kept[1:]] + [None]
        return [Stage(n, hidden[i], starts[i], end) for n, (i, end) in enumerate(zip(kept, ends, strict=True))]

    def stage(self, step: int) -> Stage:
        """The stage that training step `step` (from 0) belongs to."""
        for stage in reversed(self.stages):
            if step >= stage.start:
                return stage
        raise ValueError(f"step must be 0 or more, not {step}")

    def draw_hidden(self, stage: Stage, count: int, generator: torch.Generator) -> torch.Tensor:
        """Hidden tokens for each of `count` examples: the stage's number plus the smoothing offset. int64 [count].

        P(o) = (1 - e^-λ) e^-λo means P(o >= k) = e^-λk, so o is the floor of an exponential variable of rate λ.
        The result may exceed an example's chain: `hide_thinking_tokens` hides no more than there are.
        """
        hidden = torch.full((count,), stage.hidden, dtype=torch.int64)
        rate = self.arguments.removal_smoothing_lambda
        if self.arguments.method == "icot" and rate is not None and not math.isinf(rate):
            hidden += torch.empty(count).exponential_(rate, generator=generator).long()
        return hidden


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
