"""Which digit learns when: loss, accuracy and gradient norm of each answer place alone, on a fixed probe batch.

"Why Can't Transformers Learn Multiplication?" (arXiv 2510.00184, gradient norms and losses per answer digit) reads
from these that standard fine-tuning learns the outer digits and that the gradients of the middle ones lead nowhere.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .curriculum import CurriculumArguments, hide_thinking_tokens
from .tasks import TokenizedProblems


class DigitDynamics:
    """Measures each answer place's own loss, accuracy and gradient on the same problems at every call.

    A measurement is one forward pass and one backward pass for each place. It takes no random number, leaves the
    parameters' `.grad` alone, and needs one process only: give the main process's unwrapped model to `measure`, and
    the numbers do not depend on how many processes train it.

    Args:
        problems: the probe, a fixed few hundred held-out problems (`problems.select(slice(256))`). The activations
            of all of them are in memory at once.
        curriculum: how thinking tokens are hidden (`removal_side`, `hidden_as` and `keep_position` count).

    Raises:
        ValueError: there is no answer to measure.
    """

    def __init__(self, problems: TokenizedProblems, curriculum: CurriculumArguments):
        if len(problems) == 0 or int(problems.answer_length.max()) == 0:
            raise ValueError(f"the probe's {len(problems)} problems have no answer tokens: give it some that have")
        self.problems, self.curriculum = problems, curriculum
        self.places = int(problems.answer_length.max())

    def measure(self, model: nn.Module, hidden: int) -> dict[str, list[float]]:
        """Measure with `hidden` thinking tokens of each problem hidden (all of a shorter chain).

        A place counts over those problems whose answer has it. The model computes in evaluation mode, in whatever
        precision its forward pass has, and goes back to the mode it was in.

        Args:
            model: a causal language model, not wrapped, all of it on one device.
            hidden: thinking tokens hidden in each problem.

        Returns:
            Three lists over the answer's places, the least significant first: `loss`, the mean cross-entropy in
            nats; `accuracy`, the fraction of right tokens; `grad_norm`, the L2 norm over all trainable parameters of
            the gradient of that mean (a parameter that a place does not reach adds nothing).

        Raises:
            ValueError: no parameter of the model is trainable.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("no parameter of the model requires a gradient: there are no gradient norms to measure")
        # Training mode may differ from module to module (a frozen part kept in evaluation mode).
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.enable_grad():
                loss, right, counts = self._forward(model, hidden, parameters[0].device)
                norms = [self._gradient_norm(loss[k], parameters, k + 1 < self.places) for k in range(self.places)]
        finally:
            for module, training in modes:
                module.training = training
        means = torch.stack([loss.detach(), right.double(), torch.stack(norms).double()]) / counts
        return dict(zip(("loss", "accuracy", "grad_norm"), means.tolist(), strict=True))

    def _forward(self, model: nn.Module, hidden: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Sums over the problems at each place: loss (float64, with its graph), right tokens, tokens. [places]"""
        problems = self.problems.to(device)
        inputs = hide_thinking_tokens(
            problems.tokens,
            problems.question_length,
            problems.thinking_length,
            problems.answer_length,
            torch.full((len(problems),), hidden, device=device),
            problems.pad_token_id,
            side=self.curriculum.removal_side,
            hidden_as=self.curriculum.hidden_as,
            keep_position=self.curriculum.keep_position,
        )
        labels = inputs.pop("labels")
        if inputs["position_ids"] is None:
            del inputs["position_ids"]
        output = model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), use_cache=False)
        thinking = problems.thinking_length.long()
        dropped = thinking.clamp(max=hidden) if self.curriculum.hidden_as == "drop" else 0
        place = torch.arange(self.places, device=device)
        counts = place < problems.answer_length[:, None]
        # The token of place k stands 2 + k after question and chain; the logits one place earlier predict it.
        at = (problems.question_length.long() + thinking - dropped + 1)[:, None] + place
        at = at.clamp(max=labels.shape[1] - 2)
        targets = labels.gather(1, at + 1).masked_fill(~counts, -100)
        logits = output.logits.gather(1, at[..., None].expand(-1, -1, output.logits.shape[-1])).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return loss.sum(0, dtype=torch.float64), (logits.argmax(-1) == targets).sum(0), counts.sum(0)

    @staticmethod
    def _gradient_norm(loss: torch.Tensor, parameters: list[nn.Parameter], retain_graph: bool) -> torch.Tensor:
        """L2 norm of the gradient of a sum of losses. (Of the sum, as a mean's may underflow in half precision.)"""
        if not loss.requires_grad:  # every parameter it depends on is frozen
            return torch.zeros((), device=loss.device)
        gradients = torch.autograd.grad(loss, parameters, retain_graph=retain_graph, allow_unused=True)
        return nn.utils.get_total_norm([g for g in gradients if g is not None])
