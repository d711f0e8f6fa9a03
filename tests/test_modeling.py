"""The model and its config: GPT-2 to the last bit, jumping positions, heads laid open, and multiplication."""

import copy
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from hf_icot.configuration_icot import ICoTConfig
from hf_icot.modeling_icot import ICoTForCausalLM
from hf_icot.tokenization_icot import DIGIT_OFFSET, TOKEN_IDS


torch.set_num_threads(1)
HEADS = ("per_head", "joint", "residual")


def build(model_class=ICoTForCausalLM, **fields):
    """A small model whose biases, layer norms and positions are not at their uninformative initial values."""
    torch.manual_seed(0)
    model = model_class(ICoTConfig(**{"n_embd": 32, "n_positions": 64, **fields})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def digits(batch=3, length=12, seed=0):
    return torch.randint(3, 13, (batch, length), generator=torch.Generator().manual_seed(seed))


def jumping_positions(batch=3, length=12, start=5, jump=17):
    positions = torch.arange(length)
    positions[start:] += jump
    return positions.expand(batch, -1)


# --- configuration -------------------------------------------------------------------------------------------------


def test_config_defaults_are_the_papers():
    config = ICoTConfig()
    assert (config.n_layer, config.n_head, config.n_embd, config.vocab_size) == (2, 4, 768, len(TOKEN_IDS))
    assert (config.pad_token_id, config.eos_token_id) == (TOKEN_IDS["<pad>"], TOKEN_IDS["<eos>"])
    assert config.model_type == "icot" and config.running_sum_head is False


def test_config_survives_json(tmp_path):
    config = ICoTConfig(
        running_sum_head="joint",
        running_sum_layer=0,
        operand_digits=[(4, 4), [5, 3]],
        hidden_tokens="all",
        keep_position=True,
    )
    config.save_pretrained(tmp_path)
    loaded = ICoTConfig.from_pretrained(tmp_path)
    assert loaded.operand_digits == [[4, 4], [5, 3]]
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert json.loads((tmp_path / "config.json").read_text())["keep_position"] is True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 30}, "n_embd=30 and n_head=4"),
        ({"n_positions": 0}, "`n_positions` must be at least 1, got 0"),
        ({"running_sum_head": "heads"}, "per_head, joint, residual, got 'heads'"),
        ({"running_sum_head": True}, "got True"),
        ({"running_sum_layer": 2}, "between -2 and 1 .* got 2"),
        ({"running_sum_layer": -3}, "got -3"),
        ({"running_sum_weight": -0.5}, "got -0.5"),
        ({"operand_digits": [[4, 0]]}, r"got \[4, 0\]"),
        ({"operand_digits": [4]}, "got 4 in it"),
        ({"hidden_tokens": "some"}, "got 'some'"),
        ({"hidden_tokens": -1}, "got -1"),
        ({"hidden_tokens": True}, "True"),
        ({"hidden_as": "mask"}, "one of drop, pad, got 'mask'"),
        ({"removal_side": "top"}, "one of left, right, got 'top'"),
    ],
)
def test_config_rejects_impossible_values(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        ICoTConfig(**fields)


@pytest.mark.parametrize(("n", "m", "length"), [(4, 4, 46), (1, 1, 2), (3, 2, 10), (7, 7, 148)])
def test_length_of_the_chain_of_thought(n, m, length):
    assert ICoTConfig(hidden_tokens=0).thinking_tokens(n, m) == (0, length)
    assert ICoTConfig(hidden_tokens=length - 1).thinking_tokens(n, m) == (length - 1, 1)
    assert ICoTConfig(hidden_tokens=length + 3).thinking_tokens(n, m) == (length, 0)
    assert ICoTConfig(hidden_tokens="all").thinking_tokens(n, m) == (length, 0)
    assert ICoTConfig().thinking_tokens(n, m) == (0, 0)


# --- GPT-2 in both directions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [False, "per_head", "residual"])
def test_gpt2_reads_our_folder(tmp_path, tied, head):
    model = build(tie_word_embeddings=tied, running_sum_head=head)
    model.save_pretrained(tmp_path)
    keys = set(load_file(tmp_path / "model.safetensors"))
    extra = {"running_sum_head.weight", "running_sum_head.bias"} if head else set()
    assert ("lm_head.weight" in keys) != tied
    assert {key for key in keys if not key.startswith(("transformer.", "lm_head."))} == extra

    gpt2, report = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["unexpected_keys"]) == extra and not report["missing_keys"]
    with torch.no_grad():
        assert torch.equal(gpt2.eval()(digits()).logits, model(digits()).logits)
        assert torch.equal(ICoTForCausalLM.from_pretrained(tmp_path).eval()(digits()).logits, model(digits()).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_we_read_gpt2_folders(tmp_path, tied):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, tie_word_embeddings=tied, eos_token_id=1)
    gpt2 = GPT2LMHeadModel(config).eval()
    gpt2.save_pretrained(tmp_path)
    model, report = ICoTForCausalLM.from_pretrained(tmp_path, running_sum_head="per_head", output_loading_info=True)
    assert set(report["missing_keys"]) == {"running_sum_head.weight", "running_sum_head.bias"}
    assert model.config.activation_function == "gelu_new" and model.config.model_type == "icot"
    assert model.config.n_positions == 1024
    assert torch.equal(model.eval()(digits()).logits, gpt2(digits()).logits)
    # the head that was missing has been initialised, not left as it came from the allocator
    assert 0.005 < model.running_sum_head.weight.std() < 0.05
    assert not model.running_sum_head.bias.any()


def test_loss_and_gradients_are_gpt2s():
    model = build()
    gpt2 = GPT2LMHeadModel(model.config)
    gpt2.load_state_dict(model.state_dict())
    inputs, labels = digits(), digits().masked_fill(torch.arange(12) < 6, -100)
    for count in (None, torch.tensor(40)):
        ours, theirs = (m(inputs, labels=labels, num_items_in_batch=count) for m in (model, gpt2))
        assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.lm_loss, ours.loss)
        for m, output in ((model, ours), (gpt2, theirs)):
            m.zero_grad()
            output.loss.backward()
        for (name, a), b in zip(model.named_parameters(), gpt2.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), name
    logits = model(inputs).logits[:, 5:-1].reshape(-1, 21)
    total = F.cross_entropy(logits, inputs[:, 6:].flatten(), reduction="sum")
    torch.testing.assert_close(ours.loss, total / 40)


def test_forward_takes_the_deprecated_cache_argument_and_tuples():
    model, inputs = build(), digits()
    cache = model(inputs[:, :8], use_cache=True).cache
    with pytest.warns(FutureWarning, match="past_key_values"):
        step = model(inputs[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(step, model(inputs).logits[:, 8:])
    as_tuple = model(inputs, labels=inputs, return_dict=False)
    assert isinstance(as_tuple, tuple) and as_tuple[0].ndim == 0 and as_tuple[1].shape == (3, 12, 21)
    assert model(inputs, labels=inputs).cache is None and model(inputs).cache is not None


def test_logits_to_keep():
    model, inputs = build(), digits()
    torch.testing.assert_close(model(inputs, logits_to_keep=2).logits, model(inputs).logits[:, -2:])
    with pytest.raises(ValueError, match="no `logits_to_keep`"):
        model(inputs, labels=inputs, logits_to_keep=2)


def test_resized_embeddings_stay_tied():
    model = build()
    before = model(digits()).logits
    model.resize_token_embeddings(25)
    assert model.lm_head.weight is model.transformer.wte.weight
    output = model(digits(), labels=digits())
    assert torch.equal(output.logits[..., :21], before) and output.loss.isfinite()


# --- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 3])
def test_jumping_positions_do_not_split_the_sequence(implementation, batch):
    model = build()
    model.set_attn_implementation(implementation)
    inputs, positions = digits(batch), jumping_positions(batch)
    reference = copy.deepcopy(model)
    wpe = reference.transformer.wpe.weight.data
    wpe[:12] = wpe[positions[0]].clone()
    expected = reference(inputs).logits
    for kwargs in ({}, {"use_cache": False}, {"labels": inputs}, {"attention_mask": torch.ones_like(inputs)}):
        assert torch.equal(model(inputs, position_ids=positions, **kwargs).logits, expected), kwargs
    assert torch.equal(model(inputs, position_ids=positions[:1], use_cache=False).logits, expected)
    # GPT-2's own forward shows that the jump is a trap, so the test above means something
    gpt2 = GPT2LMHeadModel(model.config).eval()
    gpt2.load_state_dict(model.state_dict())
    assert not torch.allclose(gpt2(inputs, position_ids=positions, use_cache=False).logits, expected, atol=1e-3)


def test_flash_attention_does_not_see_the_jump_of_a_single_sequence():
    model, inputs, positions = build(), digits(1), jumping_positions(1)
    expected = model(inputs, position_ids=positions).logits
    model.config._attn_implementation_internal = "flash_attention_2"
    assert torch.equal(model(inputs, position_ids=positions).logits, expected)
    assert model.config._attn_implementation == "flash_attention_2"


def test_unpadded_calls_build_no_mask_and_warn_of_nothing(monkeypatch):
    model, calls, warnings = build(), [], []
    attend = F.scaled_dot_product_attention

    def record(*args, attn_mask=None, is_causal=False, **kwargs):
        calls.append((attn_mask, is_causal))
        return attend(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    monkeypatch.setattr("transformers.modeling_utils.logger.warning_once", warnings.append)
    inputs = digits()
    inputs[:, -3:] = model.config.pad_token_id
    model(inputs, position_ids=jumping_positions())
    model(inputs, use_cache=False, labels=inputs)
    assert calls == [(None, True)] * 4
    model(inputs[:, -1:], cache=model(inputs[:, :-1]).cache)  # a finished row while others are still generated
    assert not warnings


@pytest.mark.parametrize("jump", [0, 17, 40])
def test_folded_positions_replace_the_jump(jump):
    model, inputs = build(), digits()
    expected = model(inputs, position_ids=jumping_positions(jump=jump)).logits
    before = model.transformer.wpe.weight.clone()
    order = model.fold_positions(jump, start=5)
    assert torch.equal(model(inputs).logits, expected)
    assert torch.equal(order.sort().values, torch.arange(64))
    assert torch.equal(model.transformer.wpe.weight, before[order])


def test_folding_refuses_what_does_not_fit():
    model = build()
    with pytest.raises(ValueError, match="jump of 60 positions before index 5 .* n_positions=64"):
        model.fold_positions(60, 5)


def test_padding_left_and_right():
    model, inputs = build(), digits(2, 9)
    expected = model(inputs).logits
    pad = torch.zeros(2, 4, dtype=torch.long)
    real, blank = torch.ones_like(inputs), torch.zeros_like(pad)
    mask = torch.cat([blank, real], 1)
    left = model(torch.cat([pad, inputs], 1), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    right = model(torch.cat([inputs, pad], 1), attention_mask=torch.cat([real, blank], 1))
    bare = model(torch.cat([inputs, pad], 1))
    for logits in (left.logits[:, 4:], right.logits[:, :9], bare.logits[:, :9]):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model(digits(0)), r"empty \(shape \[0, 12\]\)"),
        (lambda model: model(digits(2, 0)), r"empty \(shape \[2, 0\]\)"),
        (lambda model: model(digits(2, 65)), "needs 65 positions but the model has n_positions=64"),
        (lambda model: model(digits(1, 12), position_ids=jumping_positions(1, jump=60)), "needs 72 positions"),
        (lambda model: model(digits(1, 5), cache=model(digits(1, 60)).cache), "needs 65 positions"),
    ],
)
def test_impossible_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call(build())


# --- attentions -----------------------------------------------------------------------------------------------------


def test_attentions_under_sdpa_are_the_eager_ones():
    model, inputs = build(), digits()
    assert model.config._attn_implementation == "sdpa"
    outputs = model(inputs, output_attentions=True, output_hidden_states=True, position_ids=jumping_positions())
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    expected = eager(inputs, output_attentions=True, position_ids=jumping_positions())
    assert len(outputs.attentions) == 2 and len(outputs.hidden_states) == 3
    for ours, theirs in zip(outputs.attentions, expected.attentions, strict=True):
        assert ours.shape == (3, 4, 12, 12) and torch.equal(ours, theirs)
        torch.testing.assert_close(ours.sum(-1), torch.ones(3, 4, 12))
        assert not ours.triu(1).any()
    assert model.config._attn_implementation == "sdpa"
    step = model(inputs[:, 8:], cache=model(inputs[:, :8]).cache, output_attentions=True)
    torch.testing.assert_close(
        step.attentions[1], model(inputs, output_attentions=True).attentions[1][:, :, 8:], atol=1e-6, rtol=1e-5
    )


def test_attending_eagerly_ends_with_the_call_and_stays_in_its_thread():
    model, seen = build(), []

    def look(*_):
        thread = threading.Thread(target=lambda: seen.append(model.config._attn_implementation))
        thread.start()
        thread.join()
        seen.append(model.config._attn_implementation)
        raise KeyError("stop here")

    model.transformer.h[1].register_forward_pre_hook(look)
    with pytest.raises(KeyError, match="stop here"):
        model(digits(), output_attentions=True)
    assert seen == ["sdpa", "eager"] and model.config._attn_implementation == "sdpa"


# --- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_generation_with_and_without_cache(how):
    model, inputs = build(), digits()
    runs = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        runs.append(model.generate(inputs, max_new_tokens=8, use_cache=use_cache, **how))
    assert torch.equal(*runs) and runs[0].shape[1] > 12


def test_generation_from_left_padding_and_across_a_jump():
    model = build()
    long, short = digits(1, 9), digits(1, 6, seed=1)
    expected = [model.generate(prompt, max_new_tokens=5, min_new_tokens=5)[0, -5:] for prompt in (long, short)]
    padded = torch.cat([long, F.pad(short, (3, 0))])
    mask = (padded != 0).long()
    output = model.generate(padded, attention_mask=mask, max_new_tokens=5, min_new_tokens=5)
    assert torch.equal(output[:, -5:], torch.stack(expected))

    positions = jumping_positions(1, 9)
    output = model.generate(long, position_ids=positions, max_new_tokens=5, min_new_tokens=5)
    model.fold_positions(17, 5)
    assert torch.equal(output, model.generate(long, max_new_tokens=5, min_new_tokens=5))


# --- heads and running sums -----------------------------------------------------------------------------------------


def test_heads_add_up_to_the_attention():
    model, inputs, attention = build(), digits(), []
    for block in model.transformer.h:
        block.attn.register_forward_hook(lambda module, args, output: attention.append(output[0]))
    output = model(inputs, output_head_outputs=True, output_head_contributions=True, output_attentions=True)
    for layer, block in enumerate(model.transformer.h):
        contributions, heads = output.head_contributions[layer], output.head_outputs[layer]
        assert contributions.shape == (3, 4, 12, 32) and heads.shape == (3, 4, 12, 8)
        total = contributions.sum(1) + block.attn.c_proj.bias
        torch.testing.assert_close(total, attention[layer], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(contributions[:, 2], heads[:, 2] @ block.attn.c_proj.weight[16:24])
        values = output.cache.layers[layer].values
        torch.testing.assert_close(heads, output.attentions[layer] @ values)


def test_requests_for_layers():
    model, inputs = build(n_layer=3), digits()
    every = model(inputs, output_head_outputs=True).head_outputs
    assert len(every) == 3
    assert torch.equal(model(inputs, output_head_outputs=-1).head_outputs[0], every[2])
    [last, first] = model(inputs, output_head_outputs=[2, 0]).head_outputs
    assert torch.equal(last, every[2]) and torch.equal(first, every[0])
    plain = model(inputs, output_head_outputs=False, output_head_contributions=[])
    assert plain.head_outputs is None and plain.head_contributions is None and plain.running_sums is None
    with pytest.raises(ValueError, match="`output_head_contributions` asks for layer 3 of a model with 3 layers"):
        model(inputs, output_head_contributions=[0, 3])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layer", [0, -1])
def test_running_sum_head_reads_what_it_says(head, layer):
    model, inputs = build(running_sum_head=head, running_sum_layer=layer), digits()
    weight, bias = model.running_sum_head.weight, model.running_sum_head.bias
    output = model(inputs, output_head_outputs=layer, output_head_contributions=layer, output_hidden_states=True)
    heads = output.head_outputs[0]
    if head == "per_head":
        assert weight.shape == (4, 8) and bias.shape == (4,)
        expected = torch.stack([heads[:, h] @ weight[h] + bias[h] for h in range(4)], dim=-1)
    elif head == "joint":
        expected = heads.transpose(1, 2).flatten(2) @ weight.T + bias
    else:
        attention = output.head_contributions[0].sum(1) + model.transformer.h[layer].attn.c_proj.bias
        before = output.hidden_states[layer % 2]  # the input of the layer
        expected = (before + attention) @ weight.T + bias
    torch.testing.assert_close(output.running_sums, expected, atol=1e-4, rtol=1e-5)


def test_running_sum_loss_is_aligned_with_the_labels():
    model, inputs = build(running_sum_head="per_head"), digits()
    targets = torch.full((3, 12), float("nan"))
    targets[:, 6:9] = torch.rand(3, 3) * 200
    targets[0, 7], targets[1, 0] = -100, 50.0  # neither counts: no label here, and nothing before the first token
    output = model(inputs, labels=inputs, running_sum_labels=targets, running_sum_weight=0.25)
    errors = [
        (output.running_sums[row, t - 1] - targets[row, t]).square().mean()
        for row in range(3)
        for t in range(6, 9)
        if (row, t) != (0, 7)
    ]
    torch.testing.assert_close(output.running_sum_loss, torch.stack(errors).mean())
    torch.testing.assert_close(output.loss, output.lm_loss + 0.25 * output.running_sum_loss)
    model.config.running_sum_weight = 3.0
    alone = model(inputs, running_sum_labels=targets)
    assert alone.lm_loss is None
    torch.testing.assert_close(alone.loss, 3 * output.running_sum_loss)
    nothing = model(inputs, labels=inputs, running_sum_labels=torch.full((3, 12), float("nan")))
    assert nothing.running_sum_loss == 0 and torch.equal(nothing.loss, nothing.lm_loss)
    with pytest.raises(ValueError, match="set config.running_sum_head"):
        build()(inputs, running_sum_labels=targets)


@pytest.mark.parametrize("head", HEADS)
def test_running_sum_loss_trains_what_lies_below(head):
    model = build(running_sum_head=head, running_sum_layer=0)
    model(digits(), running_sum_labels=torch.rand(3, 12) * 100).loss.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"running_sum_head.weight", "running_sum_head.bias", "transformer.h.0.attn.c_attn.weight"} <= moved
    assert not any(name.startswith("transformer.h.1") for name in moved)
    assert ("transformer.h.0.attn.c_proj.weight" in moved) == (head == "residual")


def test_micro_batches_add_up_to_the_batch():
    model, inputs = build(running_sum_head="joint"), digits(4)
    labels, sums = inputs.clone(), torch.rand(4, 12) * 100
    whole = model(inputs, labels=labels, running_sum_labels=sums, num_items_in_batch=44).loss
    halves = [
        model(inputs[i : i + 2], labels=labels[i : i + 2], running_sum_labels=sums[i : i + 2], num_items_in_batch=44)
        for i in (0, 2)
    ]
    torch.testing.assert_close(halves[0].loss + halves[1].loss, whole)


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [False, *HEADS])
def test_gradient_checkpointing_changes_no_gradient(head):
    plain = build(running_sum_head=head, running_sum_layer=0).train()
    saving = copy.deepcopy(plain)
    saving.activation_checkpointing_enable()
    kwargs = {"running_sum_labels": torch.rand(3, 12) * 9} if head else {}
    for model in (plain, saving):
        model(digits(), labels=digits(), position_ids=jumping_positions(), **kwargs).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_reentrant_checkpointing_would_cut_the_running_sums_off():
    model = build(running_sum_head="joint").train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RuntimeError, match="without use_reentrant=True"):
        model(digits(), running_sum_labels=torch.rand(3, 12))


def test_bfloat16_autocast_keeps_the_running_sums_precise():
    model = build(running_sum_head="joint").train()
    model.running_sum_head.weight.data *= 100
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(digits(), labels=digits(), running_sum_labels=torch.rand(3, 12) * 200, output_head_outputs=-1)
    assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    heads = output.head_outputs[0].double().transpose(1, 2).flatten(2)
    expected = heads @ model.running_sum_head.weight.double().T + model.running_sum_head.bias
    torch.testing.assert_close(output.running_sums.double(), expected, atol=1e-3, rtol=1e-5)
    output.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(output.lm_loss, model(digits(), labels=digits()).lm_loss, atol=0.2, rtol=0.05)


def test_copies_keep_their_own_hooks():
    model = build(running_sum_head="per_head")
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(twin.transformer.h[1].attn.c_attn.weight)
    assert not torch.equal(twin(digits()).running_sums, model(digits()).running_sums)


def test_a_plain_gpt2_config_is_refused():
    with pytest.raises(TypeError, match="needs an ICoTConfig, got GPT2Config"):
        ICoTForCausalLM(GPT2Config())


@pytest.mark.slow
@pytest.mark.parametrize("head", [False, *HEADS])
def test_compiles_to_one_graph(head):
    model = build(running_sum_head=head).train()
    kwargs = {"labels": digits(), "position_ids": jumping_positions()}
    if head:
        kwargs["running_sum_labels"] = torch.rand(3, 12) * 9
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(digits(), **kwargs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = model(digits(), **kwargs).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


def test_folder_with_its_code_loads_where_the_package_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(ICoTConfig, "_auto_class", "AutoConfig")
    monkeypatch.setattr(ICoTForCausalLM, "_auto_class", "AutoModelForCausalLM")
    model = build(running_sum_head="per_head", operand_digits=[[2, 2]], hidden_tokens="all")
    model.save_pretrained(tmp_path / "model")
    script = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules.") and "hf_icot" not in sys.modules
inputs = torch.load("inputs.pt")
output = model(inputs, output_attentions=True, output_head_outputs=0)
answers = model.multiply([(12, 34)])
torch.save([output.logits, output.running_sums, output.attentions[1], output.head_outputs[0], answers], "output.pt")
"""
    torch.save(digits(), tmp_path / "inputs.pt")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    output = model(digits(), output_attentions=True, output_head_outputs=0)
    expected = [output.logits, output.running_sums, output.attentions[1], output.head_outputs[0]]
    *tensors, answers = torch.load(tmp_path / "output.pt")
    for theirs, ours in zip(tensors, expected, strict=True):
        assert torch.equal(theirs, ours)
    assert answers == model.multiply([(12, 34)])


# --- multiplication -------------------------------------------------------------------------------------------------


class Oracle(ICoTForCausalLM):
    """Writes the right answer, or what `spoil` makes of its tokens, after `thinking` tokens of chain."""

    thinking = 0
    spoil = staticmethod(lambda a, b, tokens: tokens)

    def forward(self, input_ids, position_ids=None, cache=None, **kwargs):
        if cache.get_seq_length() == 0:
            self.batches.append(tuple(input_ids.shape))
            self.prompts, self.positions, self.step = input_ids.tolist(), [], 0
            self.scripts = [self.script(row) for row in self.prompts]
        self.positions += position_ids[0].tolist()
        output = super().forward(input_ids, position_ids=position_ids, cache=cache, **kwargs)
        tokens = torch.tensor([script[self.step] for script in self.scripts])
        self.step += 1
        output.logits = F.one_hot(tokens, 21).float().unsqueeze(1)
        return output

    def script(self, row):
        star, think = row.index(TOKEN_IDS["*"]), row.index(TOKEN_IDS["%%%"])
        assert row[think + 1 :] == ([] if self.thinking else [TOKEN_IDS["####"]])
        a, b = (
            int("".join(str(t - DIGIT_OFFSET) for t in part[::-1])) for part in (row[:star], row[star + 1 : think])
        )
        answer = [DIGIT_OFFSET + int(c) for c in str(a * b).zfill(think - 1)[::-1]] + [TOKEN_IDS["<eos>"]]
        chain = [TOKEN_IDS["+"]] * self.thinking + [TOKEN_IDS["####"]] if self.thinking else []
        return chain + self.spoil(a, b, answer)


def oracle(**fields):
    model = build(Oracle, hidden_tokens=fields.pop("hidden_tokens", "all"), **fields)
    model.batches = []
    return model


def test_multiply_pads_groups_and_keeps_the_order():
    model = oracle(operand_digits=[[2, 2], [4, 4], [2, 4]])
    problems = [(12, 34), (1234, 5), (7, 1000), (0, 0), (9999, 9999), (3, 99)]
    assert model.multiply(problems, batch_size=2) == [a * b for a, b in problems]
    # 2x2 holds three problems, 4x4 two (the second size that fits 4 digits at the left), 2x4 one
    assert sorted(shape for shape in model.batches if shape[1] > 1) == [(1, 7), (1, 9), (2, 7), (2, 11)]
    assert model.multiply([]) == []
    assert oracle(n_positions=128).multiply([(2**64, 3**50)]) == [2**64 * 3**50]


def test_multiply_uses_the_ids_of_a_tokenizer():
    class Shifted:
        def convert_tokens_to_ids(self, token):
            return 20 - TOKEN_IDS[token]

    model, ids = build(eos_token_id=19), Shifted()
    prompts = []
    model.register_forward_pre_hook(lambda module, args: prompts.append(args[0].tolist()))
    model.multiply([(12, 3)], tokenizer=ids)
    assert prompts[0] == [[20 - TOKEN_IDS[t] for t in ("2", "1", "*", "3", "%%%", "####")]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep_position", [False, True])
@pytest.mark.parametrize("hidden", [None, "all", 46, 30, 0])
def test_multiply_positions_and_visible_thinking(keep_position, hidden, side):
    model = oracle(
        hidden_tokens=hidden,
        n_positions=128,
        operand_digits=[[4, 4]],
        keep_position=keep_position,
        removal_side=side,
    )
    model.thinking = 46 - hidden if hidden in (0, 30) else 0
    assert model.multiply([(1234, 5678), (9, 9)]) == [1234 * 5678, 81]
    expected = torch.arange(len(model.positions))
    # four digits, *, four digits and %%% come before the jump, and what is left of the chain if its end is hidden
    jump = {None: 0, "all": 46}.get(hidden, hidden)
    expected[10 + (model.thinking if side == "right" else 0) :] += jump if keep_position else 0
    assert model.positions == expected.tolist()
    # all tokens but the last one, <eos>, were read: the question, %%%, the chain, #### and eight digits
    assert len(model.positions) == 9 + 1 + model.thinking + 1 + 8


@pytest.mark.parametrize("hidden", [46, 30])
def test_multiply_writes_after_padded_thinking_tokens(hidden):
    model = build(operand_digits=[[4, 4]], hidden_tokens=hidden, hidden_as="pad", n_positions=128)
    seen = []
    model._decode = lambda prompt, *rest: seen.append((prompt.tolist(), rest)) or [[TOKEN_IDS["<eos>"]]]
    model.multiply([(1234, 5678)])
    ((prompt,), (start, jump, room, _)) = seen[0]
    tail = [TOKEN_IDS["####"]] if hidden == 46 else []
    assert prompt[9:] == [TOKEN_IDS["%%%"]] + [TOKEN_IDS["<pad>"]] * hidden + tail
    assert jump == 0 and room == (9 if hidden == 46 else 16 + 1 + 9)


def test_multiply_returns_none_for_what_is_not_a_number():
    spoilt = {
        1: lambda tokens: [*tokens[:3], TOKEN_IDS["+"], TOKEN_IDS["<eos>"]],
        2: lambda tokens: [*tokens[:4], tokens[0]],  # does not end
        3: lambda tokens: [TOKEN_IDS["<eos>"]] * 5,
        4: lambda tokens: [*tokens[:2], TOKEN_IDS["<eos>"], *tokens[:2]],  # what follows the end does not count
    }
    model = oracle()
    model.spoil = lambda a, b, tokens: spoilt.get(a // 10, lambda tokens: tokens)(tokens)
    assert model.multiply([(11, 21), (21, 21), (31, 21), (41, 21), (51, 21)]) == [
        None,
        None,
        None,
        41 * 21 % 100,
        1071,
    ]


def test_multiply_agrees_with_generate():
    model = build(operand_digits=[[4, 4]], hidden_tokens="all", keep_position=True, n_positions=80).train()
    numbers = torch.randint(0, 10**4, (50, 2), generator=torch.Generator().manual_seed(0)).tolist()
    answers, decoded = [], []
    decode = model._decode
    model._decode = lambda *args: decoded.extend(output := decode(*args)) or output
    answers = model.multiply(numbers)
    assert model.training
    prompts = torch.tensor(
        [[TOKEN_IDS[c] for c in (*f"{a:04d}"[::-1], "*", *f"{b:04d}"[::-1], "%%%", "####")] for a, b in numbers]
    )
    positions = jumping_positions(50, 11, start=10, jump=46)
    generated = model.eval().generate(prompts, position_ids=positions, max_new_tokens=9)[:, 11:].tolist()
    for ours, theirs in zip(decoded, generated, strict=True):
        length = theirs.index(1) + 1 if 1 in theirs else len(theirs)
        assert ours[:length] == theirs[:length]
    assert len(answers) == 50


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ((-3, 4), r"-3 \* 4"),
        ((12345, 6), "5 and 1 digits fit none of the sizes the model was trained on: 4x4"),
        ((123, 4), "right end is padded"),
    ],
)
def test_multiply_names_what_it_cannot_do(problem, message):
    model = build(operand_digits=[[4, 4]], hidden_tokens=3, hidden_as="pad", removal_side="right")
    with pytest.raises(ValueError, match=message):
        model.multiply([problem])


def test_multiply_checks_the_positions_and_the_type():
    with pytest.raises(ValueError, match="need 19 positions but the model has n_positions=16"):
        build(n_positions=16).multiply([(1234, 5678)])
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got -1"):
        build().multiply([(1, 2)], batch_size=-1)
    with pytest.raises(TypeError, match="float"):
        build().multiply([(1.5, 2)])


@pytest.mark.slow
def test_a_trained_model_multiplies():
    """Learns the 100 products of single digits by heart, with kept positions, and reads them back."""
    torch.manual_seed(0)
    config = ICoTConfig(n_embd=64, n_positions=32, operand_digits=[[1, 1]], hidden_tokens="all", keep_position=True)
    model = ICoTForCausalLM(config)
    problems = [(a, b) for a in range(10) for b in range(10)]
    rows = [[str(a), "*", str(b), "%%%", "####", *f"{a * b:02d}"[::-1], "<eos>"] for a, b in problems]
    inputs = torch.tensor([[TOKEN_IDS[token] for token in row] for row in rows])
    labels = inputs.masked_fill(torch.arange(8) < 4, -100)
    positions = torch.tensor([[0, 1, 2, 3, 6, 7, 8, 9]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = model(inputs, labels=labels, position_ids=positions).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.multiply(problems) == [a * b for a, b in problems]
    model.fold_positions(2, 4)
    model.config.keep_position = False
    assert model.multiply(problems) == [a * b for a, b in problems]
