"""Exact match and per-digit accuracy: in one forward pass under teacher forcing, or by generating for real."""

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from .curriculum import hide_thinking_tokens
from .tasks import TokenizedProblems


@dataclass
class EvaluationResult:
    """What a model does on held-out problems.

    Attributes:
        exact_match: fraction of problems with every token right: under teacher forcing the whole target (remaining
            chain, `####`, answer, `<eos>`), in generation the answer alone.
        digit_accuracy: fraction of right tokens at each place of the answer, the least significant digit first.
        problems: how many problems were evaluated.
        loss: mean cross-entropy over target tokens, in nats (teacher forcing only).
        digit_loss: mean cross-entropy at each place of the answer, in nats (teacher forcing only).
        running_sum_error: mean absolute error of ĉ_k at each place of the answer, over the readers of the running-sum
            head (teacher forcing only, models with the head).
        target_match: fraction of problems whose whole target was generated (generation only).
        problems_per_second: wall-clock rate (generation only).
        predictions: the generated answers' tokens, [problems, longest answer + 1], -1 where there is none (generation
            only; not part of `to_dict`).
    """

    exact_match: float
    digit_accuracy: list[float]
    problems: int
    loss: float | None = None
    digit_loss: list[float] = field(default_factory=list)
    running_sum_error: list[float] = field(default_factory=list)
    target_match: float | None = None
    problems_per_second: float | None = None
    predictions: torch.Tensor | None = None

    def to_dict(self) -> dict:
        """The fields that were measured, as plain numbers."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "predictions"}
        return {key: value for key, value in values.items() if value is not None and value != []}


def digit_accuracy(
    predicted: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right tokens and all tokens at each place of the answers, for sums over batches and processes.

    Args:
        predicted, reference: [problems, places], the least significant digit at place 0.
        lengths: [problems], places that count in each row.

    Returns:
        Two int64 tensors [places].
    """
    counts = torch.arange(reference.shape[1], device=reference.device) < lengths[:, None]
    return ((predicted == reference) & counts).sum(0), counts.sum(0)


def _tokens_from(tokens: torch.Tensor, start: torch.Tensor, count: int, fill: int) -> torch.Tensor:
    """`count` tokens of each row from place `start[i]` on, `fill` beyond the row. int64 [rows, count]."""
    padded = F.pad(tokens, (0, 1), value=fill)
    place = start[:, None] + torch.arange(count, device=tokens.device)
    return padded.gather(1, place.clamp_(max=tokens.shape[1])).long()


@torch.no_grad()
def evaluate_teacher_forced(
    model,
    problems: TokenizedProblems,
    hidden: int,
    *,
    side: str = "left",
    hidden_as: str = "drop",
    keep_position: bool = False,
    batch_size: int = 500,
    accelerator=None,
) -> EvaluationResult:
    """Evaluate in one forward pass per batch, with `hidden` thinking tokens of each problem hidden.

    Greedy decoding writes the whole target exactly when every target token is the argmax given the true tokens
    before it, so `exact_match` is what generation would give. With several processes each takes its share, and
    every problem counts once.

    Args:
        model: a causal language model, wrapped or not.
        problems: what to evaluate on.
        hidden: thinking tokens hidden in each problem (all of a shorter chain).
        side, hidden_as, keep_position: see `hide_thinking_tokens`.
        batch_size: problems in a forward pass.
        accelerator: an `accelerate.Accelerator` to share the work between processes, in its precision.
    """
    device = accelerator.device if accelerator is not None else next(model.parameters()).device
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    places = int(problems.answer_length.max())
    # Sums in float64, so that they do not depend on how the problems are shared out.
    sums = torch.zeros(4 + 5 * places, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    mine = torch.arange(rank, len(problems), world)
    for index in mine.split(batch_size):
        batch = problems.select(index).to(device)
        inputs = hide_thinking_tokens(
            batch.tokens,
            batch.question_length,
            batch.thinking_length,
            batch.answer_length,
            torch.full((len(index),), hidden, device=device),
            batch.pad_token_id,
            side=side,
            hidden_as=hidden_as,
            keep_position=keep_position,
        )
        labels = inputs.pop("labels")
        if inputs["position_ids"] is None:
            del inputs["position_ids"]
        with accelerator.autocast() if accelerator is not None else nullcontext():
            output = model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), use_cache=False)
        targets = labels[:, 1:]
        logits = output.logits[:, :-1].float()
        token_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        right = logits.argmax(-1) == targets
        supervised = targets != -100
        gone = batch.thinking_length.long().clamp(max=hidden) if hidden_as == "drop" else 0
        # Places of the answer in `targets`, which is shifted by one.
        start = batch.question_length.long() + batch.thinking_length.long() - gone + 1
        place = torch.arange(places, device=device)
        at = (start[:, None] + place).clamp_(max=targets.shape[1] - 1)
        counts = place < batch.answer_length[:, None]
        sum_error, sum_counts = _running_sum_errors(model, output, batch, at)
        sums += torch.cat(
            [
                torch.stack(
                    [
                        (right | ~supervised).all(1).sum(),
                        torch.tensor(len(index), device=device),
                        (token_loss * supervised).sum(dtype=torch.float64),
                        supervised.sum(),
                    ]
                ).double(),
                (right.gather(1, at) & counts).sum(0).double(),
                (token_loss.gather(1, at) * counts).sum(0, dtype=torch.float64),
                counts.sum(0).double(),
                sum_error,
                sum_counts,
            ]
        )
    model.train(was_training)
    if accelerator is not None:
        sums = accelerator.reduce(sums, reduction="sum")
    exact, count, loss, targets = sums[:4].tolist()
    right, digit_loss, counts, sum_error, sum_counts = sums[4:].view(5, places)
    return EvaluationResult(
        exact_match=exact / count,
        digit_accuracy=(right / counts).tolist(),
        problems=int(count),
        loss=loss / targets,
        digit_loss=(digit_loss / counts).tolist(),
        running_sum_error=(sum_error / sum_counts).tolist() if bool((sum_counts > 0).all()) else [],
    )


def _running_sum_errors(
    model, output, batch: TokenizedProblems, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the absolute errors of ĉ_k at each place, and their number; both 0 without head or targets."""
    predicted = getattr(output, "running_sums", None)
    if predicted is None or batch.running_sums is None:
        return at.new_zeros(2, at.shape[1], dtype=torch.float64).unbind()
    config = getattr(model, "module", model).config
    truth = batch.running_sums[:, : at.shape[1]].double()
    predicted = predicted.double().gather(1, at[..., None].expand(-1, -1, predicted.shape[-1]))
    if config.running_sum_mean is not None:
        mean, std = (truth.new_tensor(x)[: at.shape[1]] for x in (config.running_sum_mean, config.running_sum_std))
        predicted = predicted * std[:, None] + mean[:, None]
    counts = truth >= 0
    return ((predicted - truth[..., None]).abs().mean(-1) * counts).sum(0), counts.sum(0).double()


@contextmanager
def folded_positions(model, start: int, jump: int):
    """Inside, ordinary position ids mean what ids with `jump` left out from place `start` on meant in training."""
    if jump == 0:
        yield
        return
    weight = model.transformer.wpe.weight
    before = weight.detach().clone()
    model.fold_positions(jump, start)
    try:
        yield
    finally:
        weight.data.copy_(before)


@torch.no_grad()
def evaluate_generation(
    model,
    problems: TokenizedProblems,
    hidden: int | None = None,
    *,
    side: str = "left",
    hidden_as: str = "drop",
    keep_position: bool = False,
    batch_size: int = 1000,
    progress: bool = False,
) -> EvaluationResult:
    """Evaluate by greedy generation with a KV cache: the model writes what is not hidden, then the answer.

    Problems are grouped by the lengths of prompt and chain, so that no batch needs padding.

    Args:
        model: an `ICoTForCausalLM`, not wrapped.
        problems: what to evaluate on.
        hidden: thinking tokens hidden in each problem; None for all of them.
        side, hidden_as, keep_position: how the model was trained, see `hide_thinking_tokens`.
        batch_size: problems decoded together.
        progress: show a progress bar.

    Raises:
        ValueError: for a chain padded on the right and partly visible, which no left-to-right model can go on from.
    """
    device = next(model.parameters()).device
    thinking = problems.thinking_length.long()
    gone = thinking if hidden is None else thinking.clamp(max=hidden)
    if hidden_as == "pad" and side == "right" and bool(((gone > 0) & (gone < thinking)).any()):
        raise ValueError("cannot generate with thinking tokens padded on the right: hide all of them, or drop them")
    places = int(problems.answer_length.max())
    reference = _tokens_from(
        problems.tokens, (problems.question_length + problems.thinking_length + 2).long(), places + 1, 0
    )
    predicted = torch.empty_like(reference)
    target_right = torch.zeros(len(problems), dtype=torch.bool)
    # In a group every problem has the same prompt length, chain left to write, and places or pads of hidden tokens.
    hidden_places = gone if keep_position or hidden_as == "pad" else torch.zeros_like(gone)
    groups, member = torch.stack([problems.question_length.long(), thinking - gone, hidden_places], 1).unique(
        dim=0, return_inverse=True
    )
    was_training = model.training
    model.eval()
    begun = time.perf_counter()
    with tqdm(total=len(problems), desc="evaluating", unit="problem", disable=not progress) as bar:
        for group, (question, visible, places_hidden) in enumerate(groups.tolist()):
            first_kept = question + 1 + (visible if side == "right" else 0)
            jump = places_hidden if hidden_as == "drop" else 0
            # The prompt ends where the model writes for itself: after %%%, or after #### if no chain is left.
            prompt = question + 1 + (places_hidden if hidden_as == "pad" else 0) + (visible == 0)
            with folded_positions(model, first_kept, jump):
                for index in (member == group).nonzero().flatten().split(batch_size):
                    batch = problems.select(index)
                    rows = hide_thinking_tokens(
                        batch.tokens,
                        batch.question_length,
                        batch.thinking_length,
                        batch.answer_length,
                        gone[index],
                        batch.pad_token_id,
                        side=side,
                        hidden_as=hidden_as,
                    )["input_ids"]
                    ids = rows[:, :prompt].to(device)
                    output = model.generate(
                        input_ids=ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=rows.shape[1] - prompt,
                        do_sample=False,
                    ).cpu()
                    output = F.pad(output, (0, rows.shape[1] - output.shape[1]), value=batch.pad_token_id)
                    target_right[index] = (output == rows).all(1)
                    # The answer is what follows the first #### (after which nothing follows if there is none).
                    separator = batch.tokens[0, question + 1 + int(batch.thinking_length[0])]
                    is_separator = output[:, question + 1 :] == separator
                    start = (
                        question + 2 + torch.where(is_separator.any(1), is_separator.int().argmax(1), output.shape[1])
                    )
                    predicted[index] = _tokens_from(output, start, places + 1, -1)
                    bar.update(len(index))
    seconds = time.perf_counter() - begun
    model.train(was_training)
    # <eos> counts as one more place for exact match: 123 is not right where 12 is.
    counts = torch.arange(places + 1) <= problems.answer_length[:, None]
    right, total = digit_accuracy(predicted[:, :places], reference[:, :places], problems.answer_length.long())
    return EvaluationResult(
        exact_match=((predicted == reference) | ~counts).all(1).double().mean().item(),
        digit_accuracy=(right.double() / total).tolist(),
        problems=len(problems),
        target_match=target_right.double().mean().item(),
        problems_per_second=len(problems) / seconds,
        predictions=predicted,
    )
