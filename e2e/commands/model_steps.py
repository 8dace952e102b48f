"""Steps of the built-in workloads with weights and inputs on a real device, equal to the captured ones.

Models are built by the same code as for the capture, but on a real device instead of the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from costmodel.base.errors import InputError
from e2e.capture.models import catalog, dlrm, transformer
from e2e.commands.model_cases import ModelCase
from e2e.step.options import StepOptions

Forward = Callable[[], torch.Tensor]


def real_step(case: ModelCase, device: Any) -> Callable[[], Any]:
    """Return one step of ``case`` on ``device`` with random weights and data.

    Raises ``InputError`` for unknown models.
    """
    options = StepOptions(mode=case.mode, dtype=case.dtype, attention=case.attention)  # type: ignore[arg-type]
    if case.model in catalog.IMAGES:
        return _images(case, device, options)
    if case.model in dlrm.CONFIGS:
        return _dlrm(case, device, options)
    if case.model in transformer.PRESETS:
        return _transformer(case, device, options)
    raise InputError(f"model {case.model!r} has no real step; choose one of {', '.join(catalog.known_models())}")


def _prepared(model: torch.nn.Module, options: StepOptions) -> torch.nn.Module:
    return model.to(catalog.TORCH_DTYPES[options.dtype]).train(options.mode != "inference")


def _images(case: ModelCase, device: Any, options: StepOptions) -> Callable[[], Any]:
    make, side = catalog.IMAGES[case.model]
    with torch.device(device):
        model = _prepared(make(), options)
        pictures = torch.randn((case.batch_size, 3, side, side), dtype=catalog.TORCH_DTYPES[options.dtype])
        labels = torch.randint(1000, (case.batch_size,))
    forward = catalog.classification(model, pictures, labels, options.mode)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)

    return catalog.workload(case.model, model, forward, options, optimizer).step


def _dlrm(case: ModelCase, device: Any, options: StepOptions) -> Callable[[], Any]:
    config = replace(dlrm.CONFIGS[case.model], embedding="bags")
    dtype, lookups = catalog.TORCH_DTYPES[options.dtype], config.lookups
    with torch.device(device):
        model = _prepared(dlrm.Dlrm(config), options)
        dense = torch.randn((case.batch_size, config.bottom[0]), dtype=dtype)
        indices = torch.stack([torch.randint(rows, (case.batch_size * lookups,)) for rows in config.rows])
        offsets = torch.arange(0, case.batch_size * lookups, lookups)
        clicks = torch.rand((case.batch_size, 1)).to(dtype)
    criterion = torch.nn.MSELoss() if config.loss == "mse" else torch.nn.BCELoss()

    def forward() -> torch.Tensor:
        probabilities = model(dense, indices, offsets)
        return probabilities if options.mode == "inference" else criterion(probabilities, clicks)

    step = catalog.workload(case.model, model, forward, options, lambda each: torch.optim.SGD(each, lr=1e-4))
    return step.step


def _transformer(case: ModelCase, device: Any, options: StepOptions) -> Callable[[], Any]:
    attention = "eager" if case.attention == "eager" else "sdpa"
    shape = transformer.build_transformer(transformer.PRESETS[case.model], attention, case.model)
    length = transformer.sequence_length(shape.config.to_dict(), case.sequence_length or None, case.model)
    with torch.device(device):
        # Built again: the meta device does not keep the values of buffers such as masks and rotary frequencies.
        model = type(shape)._from_config(shape.config, attn_implementation=attention, dtype=torch.float32)
        model.tie_weights()
        ids = torch.randint(min(model.config.vocab_size, 30000), (case.batch_size, length))
    _prepared(model.to(device), options)
    forward = _on_tokens(model, ids, options.mode != "inference")
    return catalog.workload(case.model, model, forward, options, lambda each: torch.optim.AdamW(each, lr=1e-5)).step


def _on_tokens(model: Any, ids: torch.Tensor, with_loss: bool) -> Forward:
    arguments: dict[str, Any] = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = ids
    if with_loss:
        arguments["labels"] = ids
    model.config.use_cache = False

    def run() -> torch.Tensor:
        output = model(**arguments)
        loss = getattr(output, "loss", None) if with_loss else output[0]
        return loss if loss is not None else output[0].float().mean()

    return run
