"""hf_icot: transformers that learn to reason in their head, the Hugging Face way."""

from importlib import import_module

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from .configuration_icot import ICoTConfig
from .modeling_icot import ICoTForCausalLM, ICoTModel
from .tokenization_icot import ArithmeticTokenizer


__version__ = "0.1.0"
__all__ = [
    "ArithmeticTokenizer",
    "CurriculumArguments",
    "ICoTConfig",
    "ICoTForCausalLM",
    "ICoTModel",
    "ICoTTrainer",
    "ICoTTrainingArguments",
    "MultiplicationTask",
    "TextTask",
    "__version__",
]
_LAZY = {
    "CurriculumArguments": ".curriculum",
    "ICoTTrainer": ".trainer",
    "ICoTTrainingArguments": ".trainer",
    "MultiplicationTask": ".tasks.multiplication",
    "TextTask": ".tasks.text",
}

# With hf_icot imported, the Auto classes read its folders without remote code.
AutoConfig.register("icot", ICoTConfig, exist_ok=True)
AutoModel.register(ICoTConfig, ICoTModel, exist_ok=True)
AutoModelForCausalLM.register(ICoTConfig, ICoTForCausalLM, exist_ok=True)
AutoTokenizer.register(ICoTConfig, fast_tokenizer_class=ArithmeticTokenizer, exist_ok=True)


def __getattr__(name: str):
    # What loads a model does not pay for what trains one.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
