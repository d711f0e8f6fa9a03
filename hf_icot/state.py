"""The state a run is taken up from: all it needs, in safetensors and JSON, written beside its place and renamed.

Nothing is unpickled. A state that a killed process or a bad disk left damaged is told by its digest, and the one
before it is used.
"""

import hashlib
import json
import os
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


KEPT_STATES = 2


def save_state(folder: Path, step: int, tensors: dict[str, torch.Tensor], values: dict) -> Path:
    """Write `folder/step-00001234`, all or nothing, and keep the last two.

    Args:
        folder: where the states of a run are.
        step: optimiser steps done.
        tensors: written to `state.safetensors`.
        values: plain numbers, strings, lists and dicts, written to `state.json`.

    Raises:
        OSError: nothing was changed: the states before are as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    target = folder / f"step-{step:08d}"
    temporary = folder / f".{target.name}.{os.getpid()}.partial"
    temporary.mkdir()
    try:
        # A tensor and a view of it must not share memory in a safetensors file.
        save_file(
            {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, temporary / "state.safetensors"
        )
        body = {"step": step, "tensors": _digest(temporary / "state.safetensors"), "values": values}
        text = json.dumps(body)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (temporary / "state.json").write_text(json.dumps({"sha256": digest, "body": text}), encoding="utf-8")
        for path in temporary.iterdir():
            _flush(path)
        if target.exists():  # the same step again, after taking up an earlier state
            shutil.rmtree(target)
        temporary.rename(target)
        _flush(folder)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors reports a full disk as an error of its own.
        raise (
            error if isinstance(error, OSError) else OSError(f"cannot write a state into {folder}: {error}")
        ) from error
    for old in sorted(folder.glob("step-*"))[:-KEPT_STATES]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_state(folder: Path) -> tuple[int, dict[str, torch.Tensor], dict]:
    """The newest whole state of a run: (step, tensors, values).

    Warns of each damaged state that is passed over.

    Raises:
        FileNotFoundError: there is no state, or no whole one.
    """
    found = sorted(Path(folder).glob("step-*"), reverse=True)
    for path in found:
        try:
            outer = json.loads((path / "state.json").read_text(encoding="utf-8"))
            if hashlib.sha256(outer["body"].encode()).hexdigest() != outer["sha256"]:
                raise ValueError("state.json does not have its digest")
            body = json.loads(outer["body"])
            if _digest(path / "state.safetensors") != body["tensors"]:
                raise ValueError("state.safetensors does not have its digest")
            return body["step"], load_file(path / "state.safetensors"), body["values"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            warnings.warn(f"{path} is damaged ({error}): using the state before it", stacklevel=2)
    raise FileNotFoundError(f"there is no {'whole ' if found else ''}state to resume from in {folder}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _flush(path: Path) -> None:
    """Have the disk hold it before a rename says that it is there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def pack_optimizer(optimizer: torch.optim.Optimizer, prefix: str) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """An optimiser's moments as tensors named `prefix.<parameter>.<moment>`, and its groups without parameters."""
    state = optimizer.state_dict()
    tensors = {
        f"{prefix}.{index}.{name}": torch.as_tensor(value)
        for index, moments in state["state"].items()
        for name, value in moments.items()
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    return tensors, groups


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], groups: list[dict], prefix: str
) -> None:
    """Put back what `pack_optimizer` took."""
    state: dict[int, dict] = {}
    for key, value in tensors.items():
        if key.startswith(f"{prefix}."):
            index, name = key[len(prefix) + 1 :].split(".", 1)
            state.setdefault(int(index), {})[name] = value
    now = optimizer.state_dict()["param_groups"]
    whole = [{**group, "params": old["params"]} for group, old in zip(groups, now, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": whole})
    for group in optimizer.param_groups:
        # JSON has no tuples.
        for name, value in group.items():
            if name != "params" and isinstance(value, list):
                group[name] = tuple(value)


def random_states() -> dict:
    """This process's random generators as plain numbers."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def set_random_states(states: dict) -> None:
    """Put back what `random_states` took."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
