"""Loads and saves models as config.json and model.safetensors of `transformers`.

Names and shapes are checked. A tensor or setting that the model would ignore or not find is an
error.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training import ConfigError
from experiments.models.transformer import ACTIVATIONS
from experiments.models.weight_formats import FORMATS, Format


def fields_of(folder: Path, module: type[nn.Module]) -> dict[str, Any]:
    """Returns the fields of `module` that the config.json in `folder` states.

    Raises:
        ConfigError: The file is missing, or its model is of another kind or computes something
            else.
    """
    path, form = folder / "config.json", FORMATS[module]
    if not path.is_file():
        raise ConfigError(
            f"`pretrained` must contain config.json, got {str(folder)!r}. Pass the directory of a "
            "published model, with config.json and model.safetensors."
        )
    try:
        stated = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read: it is not a configuration of a model ({type(error).__name__}: "
            f"{error}). Fetch it again from the page of the model."
        ) from error
    expected = {"model_type": form.model_type, **form.fixed}
    for name, value in expected.items():
        if stated.get(name, value) != value:
            raise ConfigError(
                f"{path} must state {name}={value!r} for this model, got {stated[name]!r}. Pass "
                "--model and --pretrained that match."
            )
    fields: dict[str, Any] = {field: stated.get(name) for field, name in form.fields.items()}
    if fields["hidden"] is None:
        fields["hidden"] = 4 * fields["width"]
    fields = {field: value for field, value in fields.items() if value is not None}
    if fields.get("activation", "gelu") not in ACTIVATIONS:
        raise ConfigError(
            f"{path} must state {form.fields['activation']} as one of {', '.join(ACTIVATIONS)}, "
            f"got {fields['activation']!r}. Use another model."
        )
    return fields


def load_weights(folder: Path, module: nn.Module, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `variables` of `module` with the published weights.

    LoRA's corrections keep their initial values. So does a classification head, if the file has
    none with this number of classes.

    Raises:
        ConfigError: A file is missing, or a tensor is missing, has another shape or is not used.
    """
    form = FORMATS[type(module)]
    tensors = _read(folder)
    used = set()

    def weight(path: tuple[Any, ...], initial: Any) -> Any:
        keys = [entry.key for entry in path]
        if keys[-1].startswith("lora_"):
            return initial
        name = _name(form, keys[1:])
        found = next((n for n in (name, name.removeprefix(form.prefix)) if n in tensors), name)
        is_head = form.head is not None and name.startswith(form.head)
        tensor = tensors.get(found)
        if tensor is None:
            if is_head:
                return initial
            raise ConfigError(
                f"The safetensors files in pretrained={str(folder)!r} must contain the tensor "
                f"{name!r}. Pass the directory of a complete model."
            )
        used.add(found)
        if form.transposed and keys[-1] == "kernel":
            tensor = tensor.T
        if tensor.shape != initial.shape:
            if is_head:
                return initial
            raise ConfigError(
                f"The tensor {found} in pretrained={str(folder)!r} must have shape "
                f"{initial.shape}, got {tensor.shape}. Use config.json and safetensors files of "
                "one model."
            )
        return jnp.asarray(tensor, initial.dtype)

    loaded = jax.tree_util.tree_map_with_path(weight, dict(variables))
    left = [n for n in tensors if n not in used and re.fullmatch(form.unused, n) is None]
    if left:
        raise ConfigError(
            "`pretrained` must contain only tensors of this model, got "
            f"{', '.join(sorted(left)[:5])} in {str(folder)!r}. Use a model of type "
            f"{form.model_type!r} without adapters."
        )
    return loaded


def save_model(folder: Path, module: nn.Module, variables: Mapping[str, Any]) -> None:
    """Writes config.json and model.safetensors as `transformers` reads them.

    LoRA's corrections are added to the weights that they correct, so the files have no adapters.

    Args:
        folder: Folder of the files. A missing folder is created. The tokenizer is not written.
        module: The model.
        variables: Its collections, "params" and, with LoRA, "frozen".
    """
    from safetensors.numpy import save_file

    form, fields = FORMATS[type(module)], vars(module)
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(variables)):
        keys = [entry.key for entry in path]
        if keys[-1] == "lora_b":
            continue
        value = np.asarray(leaf)
        if keys[-1] == "lora_a":
            correction = variables["params"]
            for key in keys[1:-1]:
                correction = correction[key]
            value = fields["lora"].alpha / fields["lora"].rank * (value @ correction["lora_b"])
            keys[-1] = "kernel"
        if form.transposed and keys[-1] == "kernel":
            value = value.T
        name = _name(form, keys[1:])
        tensors[name] = np.ascontiguousarray(tensors[name] + value if name in tensors else value)
    stated = {name: fields[field] for field, name in form.fields.items()}
    if form.head is not None:
        labels = [f"LABEL_{i}" for i in range(fields["num_classes"])]
        stated["id2label"] = {str(i): label for i, label in enumerate(labels)}
        stated["label2id"] = {label: i for i, label in enumerate(labels)}
    config = {
        "model_type": form.model_type,
        "architectures": [form.architecture],
        **form.fixed,
        **stated,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _name(form: Format, keys: list[str]) -> str:
    """Returns the name of the tensor at a path within a collection."""
    *layers, leaf = keys
    if leaf in form.names:
        return form.prefix + form.names[leaf]
    parts = []
    for layer in layers:
        stem, _, number = layer.rpartition("_")
        numbered = number.isdigit()
        parts.append(form.names[stem if numbered else layer].format(number if numbered else ""))
    name = ".".join([*parts, "bias" if leaf == "bias" else "weight"])
    return name if form.head is not None and name.startswith(form.head) else form.prefix + name


def _read(folder: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Published weights need {error.name}, which is not installed. Run `uv sync`."
        ) from error
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise ConfigError(
            f"`pretrained` must contain model.safetensors, got {str(folder)!r}. Pass the directory "
            "of a published model, with config.json and model.safetensors."
        )
    tensors: dict[str, np.ndarray] = {}
    for path in paths:
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} cannot be read: it is not a complete safetensors file ({error}). Fetch it "
                "again from the page of the model."
            ) from error
    return {_current(name): tensor for name, tensor in tensors.items()}


def _current(name: str) -> str:
    """Returns the current form of `name`; old files have gamma and beta for norms."""
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
