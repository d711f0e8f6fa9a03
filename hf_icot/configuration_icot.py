"""Configuration of the implicit chain-of-thought transformer: GPT-2's own, plus what the training left behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from transformers import GPT2Config
from transformers.configuration_utils import strict
from transformers.utils import is_torchdynamo_compiling


RUNNING_SUM_HEADS = ("per_head", "joint", "residual")

_attention_override: ContextVar[str | None] = ContextVar("icot_attention_override", default=None)


@strict
class ICoTConfig(GPT2Config):
    r"""
    GPT-2 with the sizes of "Why Can't Transformers Learn Multiplication?" (2510.00184) and a 21-token vocabulary.

    All fields of [`~transformers.GPT2Config`] are kept, with other defaults. The additional fields:

    running_sum_head (`str` or `False`, *optional*, defaults to `False`):
        Which linear regression reads the running sum ĉ_k (2510.00184, auxiliary loss). `"per_head"`: one map for each
        attention head's output, `"joint"`: one map for the outputs of all heads side by side, `"residual"`: one map
        for the residual stream after the attention. `False` (or `None`) builds no head.
    running_sum_layer (`int`, *optional*, defaults to -1):
        The layer that the head reads; negative values count from the last layer.
    running_sum_weight (`float`, *optional*, defaults to 1.0):
        λ in `loss = lm_loss + λ * running_sum_loss`; an argument of the same name to `forward` overrides it.
    running_sum_mean, running_sum_std (`list[float]`, *optional*):
        What each place's ĉ_k is reduced by and divided by in the head's targets; `None` if they are as they are.
    operand_digits (`list[list[int]]`, *optional*):
        Sizes `[n, m]` of the multiplications that the model was trained on. `None` if it was not trained on any.
    hidden_tokens (`int` or `"all"`, *optional*):
        Thinking tokens hidden at this checkpoint. `None` if the model never saw a chain of thought.
    hidden_as (`"drop"` or `"pad"`, defaults to `"drop"`):
        Whether hidden thinking tokens left the row, or became pad tokens that are attended to.
    removal_side (`"left"` or `"right"`, defaults to `"left"`):
        The end of the chain that was hidden first.
    keep_position (`bool`, defaults to `False`):
        The model skips the position ids of dropped thinking tokens. Checkpoints of one size of problem are saved with
        their position embeddings re-ordered (see `ICoTForCausalLM.fold_positions`) and have `False` here.

    Raises:
        StrictDataclassFieldValidationError: a value has the wrong type.
        StrictDataclassClassValidationError: a value is impossible (it wraps a `ValueError` that names it).
    """

    model_type = "icot"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "lm_loss", "running_sum_loss", "running_sums"]

    vocab_size: int = 21
    n_positions: int = 128
    n_embd: int = 768
    n_layer: int = 2
    n_head: int = 4
    # The same function as GPT-2's `gelu_new`, in one fused kernel.
    activation_function: str = "gelu_pytorch_tanh"
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    attn_pdrop: float | int = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    running_sum_head: bool | str | None = False
    running_sum_layer: int = -1
    running_sum_weight: float | int = 1.0
    running_sum_mean: list | None = None
    running_sum_std: list | None = None
    operand_digits: list | tuple | None = None
    hidden_tokens: int | str | None = None
    hidden_as: str = "drop"
    removal_side: str = "left"
    keep_position: bool = False

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # "gpt2" when its folder is read; an instance would keep it
        # One spelling of each, so that a config equals the one read back from JSON.
        self.running_sum_head = self.running_sum_head or False
        if self.operand_digits is not None:
            self.operand_digits = [list(size) if isinstance(size, tuple) else size for size in self.operand_digits]
        super().__post_init__(**kwargs)

    def validate_sizes(self):
        """Checks the transformer's own dimensions."""
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"`n_embd` must be a multiple of `n_head`, got n_embd={self.n_embd} and n_head={self.n_head}: "
                f"use n_embd={self.n_head * max(1, round(self.n_embd / self.n_head))} or another number of heads."
            )

    def validate_running_sum(self):
        """Checks the running-sum head."""
        if self.running_sum_head is not False and self.running_sum_head not in RUNNING_SUM_HEADS:
            raise ValueError(
                f"`running_sum_head` must be False or one of {', '.join(RUNNING_SUM_HEADS)}, "
                f"got {self.running_sum_head!r}."
            )
        if not -self.n_layer <= self.running_sum_layer < self.n_layer:
            raise ValueError(
                f"`running_sum_layer` must lie between {-self.n_layer} and {self.n_layer - 1} for a model of "
                f"{self.n_layer} layers, got {self.running_sum_layer}."
            )
        if self.running_sum_weight < 0:
            raise ValueError(f"`running_sum_weight` must not be negative, got {self.running_sum_weight}.")

    def validate_training_record(self):
        """Checks what the config says about the problems and the curriculum."""
        for size in self.operand_digits or []:
            if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
                raise ValueError(
                    f"`operand_digits` must list pairs of positive ints such as [[4, 4]], got {size!r} in it."
                )
        hidden = self.hidden_tokens
        if isinstance(hidden, bool) or (isinstance(hidden, str) and hidden != "all"):
            raise ValueError(f"`hidden_tokens` must be an int, 'all' or None, got {hidden!r}.")
        if isinstance(hidden, int) and hidden < 0:
            raise ValueError(f"`hidden_tokens` must not be negative, got {hidden}.")
        for name, allowed in (("hidden_as", ("drop", "pad")), ("removal_side", ("left", "right"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")

    def trained_size(self, n: int, m: int) -> tuple[int, int]:
        """The smallest trained size that holds operands of `n` and `m` digits; `(n, m)` if no sizes are recorded."""
        if self.operand_digits is None:
            return n, m
        fitting = [(a + b, a, b) for a, b in self.operand_digits if a >= n and b >= m]
        if not fitting:
            raise ValueError(
                f"Operands of {n} and {m} digits fit none of the sizes the model was trained on: "
                f"{', '.join(f'{a}x{b}' for a, b in self.operand_digits)}."
            )
        return min(fitting)[1:]

    def thinking_tokens(self, n: int, m: int) -> tuple[int, int]:
        """Hidden and visible thinking tokens of an `n` x `m` problem at this checkpoint; none if it saw no chain."""
        if self.hidden_tokens is None:
            return 0, 0
        partial_products = sum(n + 1 + j for j in range(m)) + m - 1  # with a + between each two
        sums = sum(n + 3 + j for j in range(1, m - 1))  # in parentheses
        total = partial_products + sums
        hidden = total if self.hidden_tokens == "all" else min(self.hidden_tokens, total)
        return hidden, total - hidden

    @property
    def _attn_implementation(self) -> str | None:
        # Attention modules and mask builders all ask here, so an override reaches them for the length of one call and
        # in one thread only. A compiled graph cannot read a context variable.
        override = None if is_torchdynamo_compiling() else _attention_override.get()
        return override or self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | dict | None):
        GPT2Config._attn_implementation.fset(self, value)

    @contextmanager
    def attention_override(self, implementation: str) -> Iterator[None]:
        """Within the block, and in this thread alone, models with this config attend by `implementation`."""
        token = _attention_override.set(implementation)
        try:
            yield
        finally:
            _attention_override.reset(token)


__all__ = ["ICoTConfig"]
