"""Recipes: dataclass flags, read from a YAML file and overridden on the command line.

A recipe is one flat mapping from the names of the dataclasses' fields to values, as in TRL. What is not known, or
cannot be, is refused before any work is done, with the nearest valid name.
"""

import argparse
import dataclasses
import difflib
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser


@dataclass
class TaskArguments:
    """Which problems the model learns."""

    task: str = field(
        default="multiplication",
        metadata={
            "help": "'multiplication': generated operands; 'text': files of `question||cot #### answer`; 'dataset': "
            "columns question, cot, answer of a dataset on disk or on the Hub.",
            "choices": ("multiplication", "text", "dataset"),
        },
    )
    digits: list[int] = field(
        default_factory=lambda: [3, 2],
        metadata={"help": "multiplication: digits of the two operands, as in `4 4`; further pairs mix further sizes."},
    )
    train_size: int | None = field(
        default=None,
        metadata={"help": "multiplication: training problems of each size. Unset: all that exist, 808,000 at most."},
    )
    valid_size: int = field(default=1000, metadata={"help": "multiplication: validation problems of each size."})
    test_size: int = field(default=1000, metadata={"help": "multiplication: test problems of each size."})
    data_seed: int = field(default=0, metadata={"help": "multiplication: seed of the operands and their splits."})
    exclude_file: str | None = field(
        default=None,
        metadata={"help": "multiplication: text file of problems whose operands may not stand in any split."},
    )
    train_file: str | None = field(default=None, metadata={"help": "text: training file."})
    validation_file: str | None = field(default=None, metadata={"help": "text: validation file."})
    test_file: str | None = field(default=None, metadata={"help": "text: test file. Unset: the validation file."})
    dataset_name: str | None = field(default=None, metadata={"help": "dataset: folder or Hub repository."})
    dataset_config: str | None = field(default=None, metadata={"help": "dataset: configuration, as `4x4`."})
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "text and dataset: tokenizer to use. Unset: the arithmetic tokenizer."}
    )


@dataclass
class ModelArguments:
    """The transformer: a new one of the given size, or one to start from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Start from this checkpoint instead of random weights."}
    )
    n_layer: int = field(default=2, metadata={"help": "Layers."})
    n_head: int = field(default=4, metadata={"help": "Attention heads in a layer."})
    n_embd: int = field(default=768, metadata={"help": "Width of the residual stream."})
    dropout: float = field(default=0.0, metadata={"help": "Dropout of embeddings, attention and residual stream."})
    tie_word_embeddings: bool = field(
        default=True, metadata={"help": "Use the token embeddings as output weights too."}
    )

    running_sum_head: str = field(
        default="none",
        metadata={
            "help": "Auxiliary regression of the running sum ĉ_k where c_k is predicted: 'per_head', one map from "
            "each attention head's output (2510.00184); 'joint', one from all heads; 'residual', from the stream.",
            "choices": ("none", "per_head", "joint", "residual"),
        },
    )
    running_sum_layer: int = field(default=-1, metadata={"help": "Layer that the head reads; -1 is the last."})

    def __post_init__(self):
        if not -self.n_layer <= self.running_sum_layer < self.n_layer:
            raise ValueError(f"running_sum_layer must be a layer of {self.n_layer}, not {self.running_sum_layer}")
        for name in ("n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")


def _read_recipe(path: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no recipe {path!r}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"recipe {path} must be a mapping of names to values, not a {type(values).__name__}")
    return values


def _nearest(name: str, known) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _convert(name: str, value: Any, hint: Any) -> Any:
    """The value of a recipe's key as its field's type wants it. YAML 1.1 reads 1e-3 as a string, so strings are
    parsed for numbers."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        flat = [y for x in value for y in (x if isinstance(x, list) else [x])] if isinstance(value, list) else [value]
        return [_convert(name, x, item) for x in flat]
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]
    good = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        str: isinstance(value, str),
    }[hint]
    if not good and hint is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    if not good:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return hint(value)


class RecipeParser(HfArgumentParser):
    """HfArgumentParser that also takes `--config recipe.yaml`, whose values the command line overrides."""

    def __init__(self, *dataclass_types, default_config: str | None = None, description: str | None = None):
        super().__init__(
            list(dataclass_types),
            description=description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--config", default=default_config, help="Recipe (YAML) whose values the flags override.")

    def parse(self, argv: list[str] | None = None):
        """Parse into one instance of each dataclass. Leaves with a message and status 2 for anything not valid.

        Returns:
            The instances, then the recipe's path.
        """
        argv = list(sys.argv[1:] if argv is None else argv)
        hints = {}
        for dataclass_type in self.dataclass_types:
            hints |= get_type_hints(dataclass_type)
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", default=self.get_default("config"))
        config = finder.parse_known_args(argv)[0].config
        try:
            recipe = _read_recipe(config) if config else {}
            for name in recipe:
                if name not in hints:
                    raise ValueError(f"recipe {config}: unknown key {name!r}{_nearest(name, hints)}")
            self.set_defaults(**{name: _convert(name, value, hints[name]) for name, value in recipe.items()})
        except ValueError as error:
            self.error(str(error))
        namespace, rest = self.parse_known_args(argv)
        for argument in rest:
            name = argument.split("=")[0]
            self.error(
                f"unknown argument {argument!r}{_nearest(name, [f'--{known}' for known in hints])}"
                if name.startswith("--")
                else f"{argument!r} belongs to no flag"
            )
        instances = []
        try:
            for dataclass_type in self.dataclass_types:
                names = [f.name for f in dataclasses.fields(dataclass_type) if f.init]
                instances.append(dataclass_type(**{name: getattr(namespace, name) for name in names}))
        except ValueError as error:
            self.error(str(error))
        return *instances, config
