"""What a problem is: tasks turn problems into `TokenizedProblems`, the one form that trainer and evaluation read.

A row of any task is three strings: `question`, `cot` (the chain of thought) and `answer`. As tokens it becomes
`question %%% cot #### answer <eos>` ("From Explicit CoT to Implicit CoT", arXiv 2405.14838, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch


@dataclass
class TokenizedProblems:
    """N problems as compact columns; row i of `tokens` is `question %%% cot #### answer <eos>`, right-padded.

    Args:
        tokens: integer tensor [N, L]; uint8 where the vocabulary fits, else int32.
        question_length: integer tensor [N], the tokens before `%%%`.
        thinking_length: integer tensor [N], the tokens between `%%%` and `####` (0 is allowed).
        answer_length: integer tensor [N], the tokens between `####` and `<eos>`.
        pad_token_id: what stands after `<eos>` in the rows shorter than L.
        running_sums: integer tensor [N, places], the running sum ĉ_k that belongs to place k of the answer, -1 where
            there is none; or None for problems without any.

    Raises:
        ValueError: the shapes disagree.
    """

    tokens: torch.Tensor
    question_length: torch.Tensor
    thinking_length: torch.Tensor
    answer_length: torch.Tensor
    pad_token_id: int
    running_sums: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2:
            raise ValueError(f"tokens must be [N, L], not of shape {list(self.tokens.shape)}")
        for name in ("question_length", "thinking_length", "answer_length"):
            shape = list(getattr(self, name).shape)
            if shape != [len(self)]:
                raise ValueError(f"{name} must have shape [{len(self)}] as there are {len(self)} rows, not {shape}")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row with `%%%`, `####` and `<eos>`, without padding: [N]."""
        return self.question_length + self.thinking_length + self.answer_length + 3

    @property
    def max_length(self) -> int:
        """The longest row's length (0 without rows); at most L."""
        return int(self.lengths.max()) if len(self) else 0

    def select(self, indices: torch.Tensor | Sequence[int] | slice) -> TokenizedProblems:
        """The rows at `indices`, in that order. A slice shares memory, anything else copies. L stays as it is."""
        if not isinstance(indices, slice | torch.Tensor):
            indices = torch.as_tensor(indices, dtype=torch.int64)
        return self._columns(lambda column: column[indices])

    def to(self, device: torch.device | str) -> TokenizedProblems:
        """The same problems with all columns on `device`."""
        return self._columns(lambda column: column.to(device))

    def _columns(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TokenizedProblems:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return TokenizedProblems(**{k: function(v) if isinstance(v, torch.Tensor) else v for k, v in columns.items()})

    @staticmethod
    def concatenate(parts: Sequence[TokenizedProblems]) -> TokenizedProblems:
        """All rows of `parts`, one part after the other, right-padded to the longest: [sum of N, max of L].

        Raises:
            ValueError: there are no parts, or their padding tokens differ.
        """
        if not parts:
            raise ValueError("concatenate needs at least one part")
        pads = {part.pad_token_id for part in parts}
        if len(pads) > 1:
            raise ValueError(f"the parts pad with different tokens: {sorted(pads)}")
        if len(parts) == 1:
            return parts[0]
        (pad,) = pads
        wide = any(part.tokens.dtype != torch.uint8 for part in parts)
        length = max(part.tokens.shape[1] for part in parts)
        tokens = torch.full((sum(map(len, parts)), length), pad, dtype=torch.int32 if wide else torch.uint8)
        row = 0
        for part in parts:
            tokens[row : row + len(part), : part.tokens.shape[1]] = part.tokens
            row += len(part)
        return TokenizedProblems(
            tokens=tokens,
            question_length=torch.cat([part.question_length for part in parts]),
            thinking_length=torch.cat([part.thinking_length for part in parts]),
            answer_length=torch.cat([part.answer_length for part in parts]),
            pad_token_id=pad,
            running_sums=_stack([part.running_sums for part in parts]),
        )


def _stack(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Rows of all parts, -1 to the right of the narrower ones; None if a part has none."""
    if any(part is None for part in parts):
        return None
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts])


class Task(Protocol):
    """What the trainer asks of a task; it knows nothing else about the problems.

    Attributes:
        name: short name for logs and cards, e.g. `multiplication-4x4`.
        sizes: `[[n, m], ...]` where the task has operand sizes, else an empty list.
        example_lines: a few problems of the training split as `question||cot #### answer`.
    """

    name: str
    sizes: list[list[int]]

    @property
    def example_lines(self) -> list[str]: ...

    def splits(self) -> dict[str, TokenizedProblems]:
        """`train`, `validation` and, where the task has one, `test`."""
        ...
