"""hf_icot: transformers that learn to reason in their head, the Hugging Face way."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .configuration_icot import ICoTConfig
from .modeling_icot import ICoTForCausalLM
from .tokenization_icot import ArithmeticTokenizer


__version__ = "0.1.0"
__all__ = ["ArithmeticTokenizer", "ICoTConfig", "ICoTForCausalLM", "__version__"]

# With hf_icot imported, the Auto classes read its folders without remote code.
AutoConfig.register("icot", ICoTConfig, exist_ok=True)
AutoModelForCausalLM.register(ICoTConfig, ICoTForCausalLM, exist_ok=True)
AutoTokenizer.register(ICoTConfig, fast_tokenizer_class=ArithmeticTokenizer, exist_ok=True)
