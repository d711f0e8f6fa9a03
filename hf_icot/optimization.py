"""Optimisers by name: AdamW alone, or Muon for the blocks' matrices with AdamW for all else."""

import torch


OPTIMIZERS = ("adamw", "muon")


def create_optimizers(model, args) -> list[torch.optim.Optimizer]:
    """The optimisers of a run, AdamW last.

    Muon orthogonalises the update of each matrix of the transformer's blocks; embeddings, output weights, biases and
    norms are not linear maps between hidden states and stay with AdamW. Weight decay acts on matrices of the blocks.

    Args:
        model: a GPT-2 shaped model.
        args: `ICoTTrainingArguments`.
    """
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim == 2 and ".h." in name else rest).append(parameter)
    optimizers, groups = [], [{"params": rest, "weight_decay": 0.0}]
    if args.optim == "muon":
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=args.muon_learning_rate,
                weight_decay=args.weight_decay,
                # Scales each update to the size that AdamW's would have, so that the two rates can be compared.
                adjust_lr_fn="match_rms_adamw",
            )
        )
    else:
        groups.insert(0, {"params": matrices, "weight_decay": args.weight_decay})
    optimizers.append(
        torch.optim.AdamW(groups, lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), fused=True)
    )
    return optimizers
