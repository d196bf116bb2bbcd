"""The class of transformers that computes a checkpoint, made without the memory of its parameters.

Promises: the class is one that transformers itself ships: `auto_map` stays unread and nothing is fetched.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.checkpoint import open_checkpoint
from quire_engine.execution.models.options import Options, read_json_object
from quire_engine.execution.models.quantisation import Quantisation, quantisation_of

OURS = "quire"  # our attention and our experts, as transformers' registries name them
IMPLEMENTATION = f"transformers {transformers.__version__}"
_DTYPES = {"bfloat16", "float16", "float32"}

# Its warnings are for people who call it; what matters here is checked and told by us.
transformers.logging.set_verbosity(logging.ERROR)
logging.getLogger("transformers").setLevel(logging.ERROR)


@contextmanager
def in_steps(made: ModelClass) -> Iterator[None]:
    """Turn whatever the model's code raises in step-by-step computation into a ModelLoadError with the class."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        raise ModelLoadError(
            f"{made.name} of {IMPLEMENTATION} cannot be computed step by step: {type(error).__name__}: {line}"
        ) from error


class ModelClass:
    """A class of transformers and a configuration for it."""

    def __init__(self, kind: Any, config: Any, quantisation: Quantisation | None = None) -> None:
        """`quantisation`: of the checkpoint's matrices."""
        self.kind, self.config, self.quantisation = kind, config, quantisation

    @property
    def name(self) -> str:
        return str(self.kind.__name__)

    @property
    def text_config(self) -> Any:
        """The part of the configuration that describes the decoder."""
        return self.config.get_text_config(decoder=True)

    @property
    def dtype(self) -> str:
        """The type in which the checkpoint was saved, as our own models name it."""
        for config in (self.config, self.text_config):
            name = str(config.dtype).removeprefix("torch.")
            if name in _DTYPES:
                return name
        return "float32"

    def on_meta(self, dtype: torch.dtype) -> Any:
        """The model without any memory: for the shapes of what it computes."""
        return self._make(dtype, [torch.device("meta")])

    def without_parameters(self, dtype: torch.dtype) -> Any:
        """The model with its buffers, such as angles, and parameters that are still to be loaded."""
        return self._make(dtype, [_parameters_on_meta()])

    def with_random_parameters(self, dtype: torch.dtype) -> Any:
        return self._make(dtype, [])

    def _make(self, dtype: torch.dtype, contexts: list[Any]) -> Any:
        config = copy.deepcopy(self.config)
        for each in (config, config.get_text_config(decoder=True)):
            each.use_cache = False
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            model = self.kind._from_config(
                config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            )
        return model.eval()


def model_class(path: Path) -> ModelClass:
    """The class that config.json names. Raises ModelLoadError with the reason if there is none that can be served."""
    file = path / "config.json"
    values = read_json_object(file)
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"{file}: architectures={names!r} must name exactly one architecture")
    name, model_type = names[0], values.get("model_type")
    if name not in _text_generators():
        raise ModelLoadError(
            f"{file}: {IMPLEMENTATION} has no {name} that generates text; code of checkpoints never runs"
        )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelLoadError(f"{file}: {IMPLEMENTATION} does not know model_type={model_type!r}")
    if values.get("compression_config") is not None:
        raise ModelLoadError(f"{file}: compression_config={values['compression_config']!r} is not supported")
    quantisation = quantisation_of(Options(values, str(file)))
    if quantisation is not None and quantisation.method in {"mxfp4", "gguf"}:
        raise ModelLoadError(f"{file}: {quantisation} is not read for models that {IMPLEMENTATION} computes")
    # Matrices become numbers before transformers' code gets them.
    unread = ("auto_map", "custom_pipelines", "quantization_config")
    plain = {key: value for key, value in values.items() if key not in unread}
    try:
        known = CONFIG_MAPPING[model_type]
        config = known.from_dict(known._decode_special_floats(plain))
        kind = getattr(transformers, name)
    except Exception as error:  # what its checks raise has many types
        raise ModelLoadError(f"{file}: {IMPLEMENTATION} cannot read it: {_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{file}: {name} has an encoder; only decoders are served")
    if _has_own_head(path, kind, config):
        for each in (config, config.get_text_config(decoder=True)):
            each.tie_word_embeddings = False
    return ModelClass(kind, config, quantisation)


def _has_own_head(path: Path, kind: Any, config: Any) -> bool:
    """Whether the files have a tied head that differs from the embedding: transformers computes with it then."""
    tied = getattr(kind, "_tied_weights_keys", None)
    if not config.tie_word_embeddings or not isinstance(tied, dict) or not any(path.glob("*.safetensors")):
        return False
    with open_checkpoint(path) as checkpoint:
        for head, embedding in tied.items():
            if {head, embedding} <= checkpoint.names:
                values = [checkpoint.tensor(name) for name in (head, embedding)]
                return not torch.equal(*values)
    return False


def _text_generators() -> set[str]:
    names: set[str] = set()
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for value in mapping.values():
            names |= {value} if isinstance(value, str) else set(value)
    return names


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as soon as a module has them, before anything is written to it; buffers keep it."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
