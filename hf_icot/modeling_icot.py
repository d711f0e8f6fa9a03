"""The implicit chain-of-thought transformer: GPT-2 with an optional running-sum head and per-head outputs."""

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import DynamicCache, GPT2LMHeadModel, GPT2Model
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, is_flash_attention_requested

from .configuration_icot import ICoTConfig
from .tokenization_icot import TOKEN_IDS


# What the hooks below should keep during the current forward pass: {(name, layer): tensor or None}.
_collected: ContextVar[dict | None] = ContextVar("icot_collected", default=None)


class _CompiledCollection:
    """Stands in for `_collected` in a graph being compiled, which cannot read context variables."""

    current: dict | None = None


def _keep_input(name: str, layer: int, module: nn.Module, args: tuple) -> None:
    """Forward pre-hook: keeps the module's input if the current forward pass asked for it."""
    collected = _CompiledCollection.current if is_torchdynamo_compiling() else _collected.get()
    if collected is not None and (name, layer) in collected:
        collected[name, layer] = args[0]


@dataclass
class ICoTCausalLMOutput(CausalLMOutputWithCrossAttentions):
    """
    GPT-2's output (`loss`, `logits`, `cache`, `hidden_states`, `attentions`, `cross_attentions`) and:

    Args:
        lm_loss (`torch.Tensor`, scalar): the cross entropy alone, if `labels` were given.
        running_sum_loss (`torch.Tensor`, scalar): the unweighted mean squared error of the running sums, if
            `running_sum_labels` were given.
        running_sums (`torch.Tensor` of shape `[batch, seq, readers]`): predictions of the running-sum head in float32,
            if the model has one; `readers` is the number of heads for `"per_head"`, else 1.
        head_outputs (tuple of `torch.Tensor` of shape `[batch, heads, seq, head_dim]`): each head's output before the
            output projection, one tensor for each requested layer, in the order of the request.
        head_contributions (tuple of `torch.Tensor` of shape `[batch, heads, seq, n_embd]`): what each head adds to the
            residual stream, without the bias; the sum over heads plus the bias is the output of the attention.
    """

    lm_loss: torch.Tensor | None = None
    running_sum_loss: torch.Tensor | None = None
    running_sums: torch.Tensor | None = None
    head_outputs: tuple[torch.Tensor, ...] | None = None
    head_contributions: tuple[torch.Tensor, ...] | None = None


class RunningSumHead(nn.Module):
    """
    Linear regression to the running sum ĉ_k (2510.00184, auxiliary loss): one map for each of `readers` inputs.

    `"per_head"` reads the output of each attention head by its own map; `"joint"` and `"residual"` have one reader as
    wide as the model.
    """

    def __init__(self, config: ICoTConfig):
        super().__init__()
        self.readers = config.n_head if config.running_sum_head == "per_head" else 1
        self.weight = nn.Parameter(torch.empty(self.readers, config.n_embd // self.readers))
        self.bias = nn.Parameter(torch.empty(self.readers))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, n_embd]` -> `[batch, seq, readers]`, in float32: sums reach hundreds, bfloat16 steps by 2."""
        read = hidden_states.float().unflatten(-1, (self.readers, -1))  # [batch, seq, readers, width]
        # Not a matrix product, which autocast would round.
        return (read * self.weight.float()).sum(-1) + self.bias.float()


class ICoTModel(GPT2Model):
    """
    GPT-2's transformer, safe for position ids that jump.

    transformers takes a jump in `position_ids` for a boundary between packed sequences, and forbids attention across
    it. Here one sequence jumps where thinking tokens were hidden, so every call without a mask and without a cache is
    given the mask that says the same but leaves nothing to guess.
    """

    config: ICoTConfig

    def warn_if_padding_and_no_attention_mask(self, input_ids, attention_mask):
        """Silent: right-padded batches need no mask in a causal model, and the check waits for the device."""

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *args,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """
        As [`~transformers.GPT2Model`]; `output_attentions=True` gives attentions under every attention implementation.

        Raises:
            ValueError: the input is empty, or a position lies beyond `n_positions`.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        lone_sequence = False
        if inputs is not None:
            lone_sequence = inputs.shape[0] == 1 and inputs.shape[1] > 1
            self._check_positions(inputs, cache, position_ids)
            if attention_mask is None and cache is None:
                attention_mask = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)

        attend = nullcontext()
        if kwargs.get("output_attentions") and self.config._attn_implementation != "eager":
            # The fused kernels never have the attention weights: attend eagerly, for this call alone.
            if is_torchdynamo_compiling():
                raise ValueError(
                    "A compiled model returns attentions only if it attends eagerly: call "
                    "model.set_attn_implementation('eager') before compiling it."
                )
            attend = self.config.attention_override("eager")
        elif lone_sequence and position_ids is not None and is_flash_attention_requested(self.config):
            # The flash kernels look for packed sequences on their own, in batches of one.
            attend = self.config.attention_override("sdpa")
        with attend:
            return super().forward(
                input_ids, cache, attention_mask, token_type_ids, position_ids, inputs_embeds, *args, **kwargs
            )

    def _check_positions(self, inputs: torch.Tensor, cache: Cache | None, position_ids: torch.Tensor | None) -> None:
        """Raises before an index error would, wherever that needs no value from a graph or from an accelerator."""
        if inputs.shape[0] == 0 or inputs.shape[1] == 0:
            raise ValueError(f"The input is empty (shape {list(inputs.shape)}): pass at least one token.")
        if position_ids is not None:
            if is_torchdynamo_compiling() or position_ids.device.type != "cpu":
                return
            last = int(position_ids.max())
        else:
            past = 0 if cache is None or cache.is_compileable else cache.get_seq_length()
            last = past + inputs.shape[1] - 1
        if last >= self.config.n_positions:
            raise ValueError(
                f"The sequence needs {last + 1} positions but the model has n_positions={self.config.n_positions}: "
                "shorten it or train a model with more positions."
            )


class ICoTForCausalLM(GPT2LMHeadModel):
    """
    GPT-2 with language-model head for implicit chain-of-thought (2405.14838, 2510.00184).

    The weights have GPT-2's names, so `GPT2LMHeadModel.from_pretrained` reads every folder this class saves; the
    optional running-sum head stands beside them as `running_sum_head.weight` and `.bias`.
    """

    config: ICoTConfig

    def __init__(self, config: ICoTConfig):
        if config.model_type != ICoTConfig.model_type:
            raise TypeError(
                f"{type(self).__name__} needs an ICoTConfig, got {type(config).__name__}: build one with "
                "ICoTConfig(**config.to_dict()) or load the folder with from_pretrained."
            )
        super(GPT2LMHeadModel, self).__init__(config)  # GPT-2's own __init__ would build a second transformer
        self.transformer = ICoTModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.running_sum_head:
            self.running_sum_head = RunningSumHead(config)
        for layer, block in enumerate(self.transformer.h):
            block.attn.c_proj.register_forward_pre_hook(partial(_keep_input, "heads", layer))
            block.ln_2.register_forward_pre_hook(partial(_keep_input, "residual", layer))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RunningSumHead):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.bias)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        running_sum_labels: torch.Tensor | None = None,
        running_sum_weight: float | None = None,
        output_head_outputs: bool | int | Sequence[int] | None = None,
        output_head_contributions: bool | int | Sequence[int] | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> ICoTCausalLMOutput:
        """
        As [`~transformers.GPT2LMHeadModel`], with these additional arguments:

        Args:
            labels (`[batch, seq]`): next tokens, shifted inside the model, -100 where there is no loss. With labels no
                cache is returned unless `use_cache=True`.
            running_sum_labels (`[batch, seq]`, float): ĉ_k beside the label c_k that it belongs to, NaN or -100 where
                there is none. Aligned as `labels`: the value at t is predicted from position t - 1.
            running_sum_weight: λ of the running-sum loss; `config.running_sum_weight` if `None`.
            output_head_outputs, output_head_contributions: `True` for all layers, a layer, or a list of layers;
                negative values count from the last.
            num_items_in_batch: labelled tokens in all micro-batches of an optimiser step; the loss is a sum divided
                by it. The running-sum loss of a micro-batch then counts by its share of these tokens.

        Raises:
            ValueError: the input is empty or too long, a layer is out of range, labels do not fit the logits, or
                running sums are asked of a model without the head.
        """
        head_layers = self._layers(output_head_outputs, "output_head_outputs")
        contribution_layers = self._layers(output_head_contributions, "output_head_contributions")
        collected = {("heads", layer): None for layer in (*head_layers, *contribution_layers)}
        if self.config.running_sum_head:
            source = "residual" if self.config.running_sum_head == "residual" else "heads"
            sum_key = (source, self.config.running_sum_layer % self.config.n_layer)
            collected[sum_key] = None
        elif running_sum_labels is not None:
            raise ValueError("`running_sum_labels` need a model with a head: set config.running_sum_head='per_head'.")
        if use_cache is None and labels is not None and cache is None:
            use_cache = False

        outputs = self._transform(
            collected,
            input_ids,
            cache=cache,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))

        lm_loss = running_sums = running_sum_loss = None
        if labels is not None:
            if labels.shape != logits.shape[:-1]:
                raise ValueError(
                    f"`labels` of shape {list(labels.shape)} do not fit logits of shape {list(logits.shape)}: labels "
                    "need one entry for each input token, and no `logits_to_keep`."
                )
            lm_loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch, **kwargs
            )
        loss = lm_loss
        if self.config.running_sum_head:
            running_sums = self.running_sum_head(collected[sum_key])
        if running_sum_labels is not None:
            running_sum_loss = self._running_sum_loss(running_sums, running_sum_labels)
            weight = self.config.running_sum_weight if running_sum_weight is None else running_sum_weight
            auxiliary_loss = weight * running_sum_loss
            if labels is not None and num_items_in_batch is not None:
                auxiliary_loss = auxiliary_loss * (labels[:, 1:] != -100).sum() / num_items_in_batch
            loss = auxiliary_loss if loss is None else loss + auxiliary_loss

        head_outputs = tuple(self._split_heads(collected["heads", layer]) for layer in head_layers)
        head_contributions = tuple(
            self._project_heads(collected["heads", layer], layer) for layer in contribution_layers
        )
        return ICoTCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            lm_loss=lm_loss,
            running_sum_loss=running_sum_loss,
            running_sums=running_sums,
            head_outputs=head_outputs or None,
            head_contributions=head_contributions or None,
        )

    def _layers(self, request: bool | int | Sequence[int] | None, name: str) -> list[int]:
        """Resolves a request for layers to non-negative indices."""
        if request is None or request is False:
            return []
        if request is True:
            return list(range(self.config.n_layer))
        layers = [request] if isinstance(request, int) else list(request)
        for layer in layers:
            if not -self.config.n_layer <= layer < self.config.n_layer:
                raise ValueError(f"`{name}` asks for layer {layer} of a model with {self.config.n_layer} layers.")
        return [layer % self.config.n_layer for layer in layers]

    def _transform(self, collected: dict, *args, **kwargs) -> BaseModelOutputWithPastAndCrossAttentions:
        """Runs the transformer while the hooks fill in `collected`."""
        if not collected:
            return self.transformer(*args, **kwargs)
        if is_torchdynamo_compiling():
            _CompiledCollection.current = collected
            outputs = self.transformer(*args, **kwargs)
            _CompiledCollection.current = None
        else:
            token = _collected.set(collected)
            try:
                outputs = self.transformer(*args, **kwargs)
            finally:
                _collected.reset(token)
        for (name, layer), value in collected.items():
            if value is None:
                raise RuntimeError(f"Layer {layer} gave no {name}: compile the whole model, not single blocks of it.")
            checkpointing = self.training and self.transformer.gradient_checkpointing and torch.is_grad_enabled()
            if checkpointing and not value.requires_grad:
                raise RuntimeError(
                    f"The {name} of layer {layer} have no gradient under reentrant checkpointing: call "
                    "activation_checkpointing_enable() without use_reentrant=True."
                )
        return outputs

    def _split_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, n_embd]` -> `[batch, heads, seq, head_dim]`."""
        return heads.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2)

    def _project_heads(self, heads: torch.Tensor, layer: int) -> torch.Tensor:
        """`[batch, seq, n_embd]` -> `[batch, heads, seq, n_embd]`: each head through its rows of W_O."""
        projection = self.transformer.h[layer].attn.c_proj.weight.unflatten(0, (self.config.n_head, -1))
        return torch.einsum("bhsd,hde->bhse", self._split_heads(heads), projection.to(heads.dtype))

    @staticmethod
    def _running_sum_loss(running_sums: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean squared error over labelled entries and readers; 0 without any. Shapes as in `forward`."""
        targets = targets[:, 1:].float()
        valid = targets.isfinite() & (targets != -100)
        errors = running_sums[:, :-1] - torch.where(valid, targets, 0.0).unsqueeze(-1)
        return (errors.square().mean(-1) * valid).sum() / valid.sum().clamp(min=1)

    @torch.no_grad()
    def fold_positions(self, jump: int, start: int) -> torch.Tensor:
        """
        Permutes the position embeddings, in place, so that a model trained with kept positions needs no jump.

        After it, `wpe[start + i]` is the former `wpe[start + jump + i]`; the skipped rows go to the end.

        Args:
            jump: position ids skipped.
            start: index of the first token after them.

        Returns:
            The old row of each new row, `[n_positions]`.

        Raises:
            ValueError: the jump does not fit into the positions.
        """
        count = self.config.n_positions
        if jump < 0 or start < 0 or start + jump > count:
            raise ValueError(f"A jump of {jump} positions before index {start} does not fit into n_positions={count}.")
        rows = torch.arange(count)
        order = torch.cat([rows[:start], rows[start + jump :], rows[start : start + jump]])
        weight = self.transformer.wpe.weight
        weight.copy_(weight[order.to(weight.device)])
        return order

    @torch.no_grad()
    def multiply(
        self, problems: Sequence[tuple[int, int]], tokenizer=None, batch_size: int = 1024
    ) -> list[int | None]:
        """
        Multiplies pairs of non-negative ints: writes the prompt, decodes greedily, reads the answer.

        Operands are padded with zeros to the smallest size in `config.operand_digits` that holds both. Where the
        checkpoint still shows some thinking tokens (`config.hidden_tokens`), the model writes them first.

        Args:
            problems: pairs `(a, b)`.
            tokenizer: only needed if its ids differ from those of `tokenization_icot.VOCABULARY`.
            batch_size: most problems in one forward pass.

        Returns:
            For each problem the product the model wrote, or `None` where it wrote no digits or did not end.

        Raises:
            ValueError: an operand is negative or too long for the model, `batch_size` is below 1, or the model was
                trained with visible thinking tokens before padded ones, which it cannot write from left to right.
        """
        config = self.config
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        ids = TOKEN_IDS if tokenizer is None else {t: tokenizer.convert_tokens_to_ids(t) for t in TOKEN_IDS}
        groups: dict[tuple[int, int, int], list[tuple[int, str]]] = {}
        for index, (a, b) in enumerate(problems):
            a, b = operator.index(a), operator.index(b)
            if a < 0 or b < 0:
                raise ValueError(f"Operands must not be negative, got {a} * {b}.")
            n, m = config.trained_size(len(str(a)), len(str(b)))
            question = f"{a:0{n}d}"[::-1] + "*" + f"{b:0{m}d}"[::-1]
            # Problems of equal length and chain need no padding in one batch.
            groups.setdefault((n + m, *config.thinking_tokens(n, m)), []).append((index, question))

        table = torch.zeros(128, dtype=torch.long)
        characters = "0123456789*"
        table[[ord(c) for c in characters]] = torch.tensor([ids[c] for c in characters])
        written = {ids[c]: c for c in "0123456789"}
        answers: list[int | None] = [None] * len(problems)
        was_training = self.training
        self.eval()
        try:
            for (digits, hidden, thinking), members in groups.items():
                right, padded = config.removal_side == "right", config.hidden_as == "pad"
                if padded and right and hidden and thinking:
                    raise ValueError("a chain whose right end is padded cannot be written from left to right")
                suffix = [ids["%%%"]] + [ids["<pad>"]] * (hidden * padded) + [ids["####"]] * (not thinking)
                jump = hidden if config.keep_position and not padded else 0
                start = digits + 2 + (thinking if right else 0)
                room = thinking + bool(thinking) + digits + 1  # chain, ####, answer, <eos>
                for first in range(0, len(members), batch_size):
                    batch = members[first : first + batch_size]
                    letters = torch.frombuffer(bytearray("".join(q for _, q in batch), "ascii"), dtype=torch.uint8)
                    question = table[letters.long()].view(len(batch), digits + 1)
                    prompt = torch.cat([question, torch.tensor([suffix]).expand(len(batch), -1)], dim=1)
                    output = self._decode(prompt, start, jump, room, ids["<eos>"])
                    for (index, _), row in zip(batch, output, strict=True):
                        answers[index] = _read_answer(row, written, ids["<eos>"], ids["####"] if thinking else None)
        finally:
            self.train(was_training)
        return answers

    def _decode(self, prompt: torch.Tensor, start: int, jump: int, room: int, eos: int) -> list[list[int]]:
        """
        Greedy decoding of `prompt` `[batch, length]`, whose position ids skip `jump` before index `start`.

        `generate` can only continue positions one by one, so it could not jump where a prompt ends at `start`.
        """
        length = prompt.shape[1]
        positions = torch.arange(length + room, device=self.device)
        positions[start:] += jump
        if int(positions[-2]) >= self.config.n_positions:
            raise ValueError(
                f"Problem, thinking tokens and answer need {int(positions[-2]) + 1} positions but the model has "
                f"n_positions={self.config.n_positions}."
            )
        cache = DynamicCache(config=self.config)
        inputs = prompt.to(self.device)
        finished = torch.zeros(len(prompt), dtype=torch.bool, device=self.device)
        tokens = []
        for step in range(room):
            first = 0 if step == 0 else length + step - 1
            position_ids = positions[first : length + step].unsqueeze(0)
            outputs = self(inputs, position_ids=position_ids, cache=cache, use_cache=True, logits_to_keep=1)
            inputs = outputs.logits.argmax(-1)  # [batch, 1]
            tokens.append(inputs)
            finished |= inputs[:, 0] == eos
            if finished.all():
                break
        return torch.cat(tokens, dim=1).tolist()


def _read_answer(tokens: list[int], digits: dict[int, str], eos: int, separator: int | None) -> int | None:
    """The number between `separator` (or the start) and `eos`, written least significant digit first."""
    if eos not in tokens or (separator is not None and separator not in tokens):
        return None
    first = 0 if separator is None else tokens.index(separator) + 1
    answer = tokens[first : tokens.index(eos)]
    if not answer or not all(token in digits for token in answer):
        return None
    return int("".join(digits[token] for token in reversed(answer)))


__all__ = ["ICoTCausalLMOutput", "ICoTForCausalLM", "ICoTModel", "RunningSumHead"]
