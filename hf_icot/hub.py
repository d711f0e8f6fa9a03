"""What goes to the Hub with a model: its card."""

from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from . import __version__


CARD = """---
{{ card_data }}
---

# {{ name }}

A {{ config.n_layer }}-layer, {{ config.n_head }}-head transformer, {{ config.n_embd }} wide, trained on {{ task }}
with hf_icot {{ version }}. Of {{ thinking }} thinking tokens, {{ hidden }} are hidden at this checkpoint.

## Use

```python
import hf_icot  # registers the model with the Auto classes
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{{ path }}")
{% if example %}print(model.multiply([{{ example }}]))
{% endif %}```

Digits are written least significant first, one token each. The weights are GPT-2's by name:
`GPT2LMHeadModel.from_pretrained` reads them too.

## Results

Exact match on {{ results.problems }} held-out problems, by greedy generation:
{{ "%.4f"|format(results.exact_match) }}.

| place of the answer, least significant first | accuracy |
| --- | --- |
{% for accuracy in results.digit_accuracy %}| {{ loop.index0 }} | {{ "%.4f"|format(accuracy) }} |
{% endfor %}
{% if figure %}![held-out accuracy and hidden thinking tokens against steps]({{ figure }})
{% endif %}
## Training

`{{ command }}`

{{ totals.examples }} examples, {{ totals.tokens }} tokens, {{ totals.steps }} steps,
{{ "%.0f"|format(totals.seconds) }} seconds. `recipe.yaml` holds every setting, `metrics.jsonl` every measurement.
"""


def write_model_card(
    folder: Path,
    *,
    config,
    task: str,
    results: dict,
    totals: dict,
    command: str,
    thinking: int = 0,
    figure: str | None = None,
) -> None:
    """Write README.md into a model folder, with the results in model-index form.

    Args:
        folder: the run folder.
        config: the model's config.
        task: what was learned, as `multiplication-3x2`.
        results: `exact_match`, `digit_accuracy` and `problems` of the evaluation by generation.
        totals: `examples`, `tokens`, `steps` and `seconds` of the training.
        command: the command that trained it.
        thinking: thinking tokens of the longest problem.
        figure: path of the learning curve within the folder.
    """
    folder = Path(folder)
    example = None
    if config.operand_digits:
        n, m = config.operand_digits[0]
        digits = "123456789" * 5
        example = f"({digits[:n]}, {digits[n : n + m]})"
    data = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["implicit-chain-of-thought", "arithmetic"],
        model_name=folder.name,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=task,
                dataset_name=f"{task}, held-out operands",
                dataset_split="test",
                metric_type="exact_match",
                metric_value=results["exact_match"],
            )
        ],
    )
    card = ModelCard.from_template(
        data,
        template_str=CARD,
        name=folder.name,
        path=folder.name,
        config=config,
        task=task,
        version=__version__,
        hidden=config.hidden_tokens,
        thinking=thinking,
        example=example,
        results=results,
        figure=figure,
        command=command,
        totals=totals,
    )
    card.save(folder / "README.md")
