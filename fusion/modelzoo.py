"""Published CNNs as ONNX files: Hugging Face `transformers` configurations with seeded random weights.

    python -m fusion.modelzoo mobilenet_v2 -o mobilenet_v2.onnx [--image-size 224 --width 1.0 --seed 0]

Nothing is downloaded: latency does not depend on the values of the weights. Batch norms stay separate nodes with
statistics near (0, 1), and weights preserve the variance of the activations (He et al. 2015), so that an importer that
folds them wrongly changes the outputs. The same arguments write the same file with one version of torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costmodel.base.errors import InputError, MissingDependencyError, OutputError, ProjectError

if TYPE_CHECKING:
    import torch

OPSET = 18
CLASSES = 1000
INPUT, OUTPUT = "pixel_values", "logits"


@dataclass(frozen=True)
class Architecture:
    """A network of `transformers`; ``sizes`` are arguments of the configuration class."""

    module: str
    configuration: str
    model: str
    sizes: tuple[tuple[str, object], ...] = ()
    is_mobilenet: bool = True


ARCHITECTURES = {
    "mobilenet_v1": Architecture("mobilenet_v1", "MobileNetV1Config", "MobileNetV1ForImageClassification"),
    "mobilenet_v2": Architecture("mobilenet_v2", "MobileNetV2Config", "MobileNetV2ForImageClassification"),
    "resnet18": Architecture(
        "resnet",
        "ResNetConfig",
        "ResNetForImageClassification",
        (("hidden_sizes", (64, 128, 256, 512)), ("depths", (2, 2, 2, 2)), ("layer_type", "basic")),
        is_mobilenet=False,
    ),
    "resnet50": Architecture(
        "resnet",
        "ResNetConfig",
        "ResNetForImageClassification",
        (("hidden_sizes", (256, 512, 1024, 2048)), ("depths", (3, 4, 6, 3)), ("layer_type", "bottleneck")),
        is_mobilenet=False,
    ),
}


def build_model(name: str, *, width: float = 1.0, tf_padding: bool = False, seed: int = 0) -> torch.nn.Module:
    """Create the network in evaluation mode; its forward maps images (N, 3, H, W) to logits (N, 1000).

    ``width`` scales the channels (depth multiplier); ``tf_padding`` gives MobileNets TensorFlow's asymmetric SAME
    padding, as separate Pad nodes, instead of the symmetric one of torchvision and timm. Raises ``InputError`` for an
    unknown name or a width that is not positive.
    """
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise InputError(f"unknown model {name!r}, known: {', '.join(ARCHITECTURES)}")
    if not width > 0:
        raise InputError(f"--width must be positive, not {width}")
    if tf_padding and not architecture.is_mobilenet:
        raise InputError(f"--tf-padding applies to MobileNets, not to {name}; leave it out")
    torch = _import_torch()
    configuration_class, model_class = _transformers_classes(architecture)
    configuration = configuration_class(num_labels=CLASSES, **_sizes(architecture, width, tf_padding))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = model_class(configuration).eval()
        _initialise(network)
    return _logits_only(network)


def export(
    name: str,
    path: str | os.PathLike[str],
    *,
    image_size: int = 224,
    width: float = 1.0,
    batch: int = 1,
    tf_padding: bool = False,
    seed: int = 0,
) -> Path:
    """Write the network as one ONNX file with static shapes (batch, 3, image_size, image_size).

    The write is atomic. Raises ``OutputError`` if it fails.
    """
    if image_size < 1 or batch < 1:
        raise InputError(f"--image-size and --batch must be at least 1, not {image_size} and {batch}")
    model = build_model(name, width=width, tf_padding=tf_padding, seed=seed)
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".modelzoo-") as directory:
            draft = Path(directory) / "model.onnx"
            _export_onnx(model, draft, (batch, 3, image_size, image_size))
            draft.replace(target)
    except OSError as error:
        raise OutputError(
            f"{target}: cannot write the model: {error.strerror or error}; choose another place, or free some"
        ) from error
    return target


def _import_torch():
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(f"models need torch: pip install 'fusion-costmodel[models]' ({error})") from error
    return torch


def _transformers_classes(architecture: Architecture) -> tuple[type, type]:
    try:
        with _without_broken_torchvision():
            from importlib import import_module

            package = f"transformers.models.{architecture.module}"
            configuration = getattr(
                import_module(f"{package}.configuration_{architecture.module}"), architecture.configuration
            )
            model = getattr(import_module(f"{package}.modeling_{architecture.module}"), architecture.model)
    except ImportError as error:
        raise MissingDependencyError(
            f"models need transformers: pip install 'fusion-costmodel[models]' ({error})"
        ) from error
    return configuration, model


@contextmanager
def _without_broken_torchvision() -> Iterator[None]:
    """Hide torchvision if it cannot be imported.

    `transformers` imports an installed torchvision, and fails if that was built for another torch. The networks here do
    not need it; ``None`` in ``sys.modules`` hides a module.
    """
    try:
        import torchvision  # noqa: F401
    except Exception:
        from transformers.utils.import_utils import is_torchvision_available

        sys.modules["torchvision"] = None  # type: ignore[assignment]
        is_torchvision_available.cache_clear()
        try:
            yield
        finally:
            del sys.modules["torchvision"]
    else:
        yield


def _sizes(architecture: Architecture, width: float, tf_padding: bool) -> dict[str, object]:
    if architecture.is_mobilenet:
        return {"depth_multiplier": float(width), "tf_padding": tf_padding}
    sizes = dict(architecture.sizes)
    # A bottleneck divides its channels by four: widths must be multiples of eight afterwards.
    channels = [max(32, round(size * width / 32) * 32) for size in sizes["hidden_sizes"]]  # type: ignore[attr-defined]
    return {**sizes, "hidden_sizes": channels, "embedding_size": max(8, round(64 * width / 8) * 8)}


def _initialise(network: torch.nn.Module) -> None:
    """Initialise weights so that the variance of activations is preserved, and batch norms near the identity."""
    import torch
    from torch import nn

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.75, 1.25)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.75, 1.5)
    for module in network.modules():
        if type(module).__name__ in ("ResNetBottleNeckLayer", "ResNetBasicLayer"):
            with torch.no_grad():  # 16 residual branches add up: start each small (Goyal et al. 2017 start at zero)
                module.layer[-1].normalization.weight.mul_(0.3)


def _logits_only(network: torch.nn.Module) -> torch.nn.Module:
    from torch import nn

    class Logits(nn.Module):
        """Images to logits; the attribute's name becomes the prefix of the ONNX node names."""

        def __init__(self) -> None:
            super().__init__()
            self.model = network

        def forward(self, pixel_values):
            return self.model(pixel_values=pixel_values).logits

    return Logits().eval()


def _export_onnx(model: torch.nn.Module, path: Path, shape: tuple[int, ...]) -> None:
    """Export with the TorchScript exporter: its node names are module paths, and it can leave batch norms unfolded."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.zeros(shape),),
            str(path),
            dynamo=False,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[OUTPUT],
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(ARCHITECTURES)}")],
    output: Annotated[Path, typer.Option("-o", "--output", help="file to write")],
    image_size: Annotated[int, typer.Option(help="height and width of the input image, pixels")] = 224,
    width: Annotated[float, typer.Option(help="factor on the channels (depth multiplier)")] = 1.0,
    batch: Annotated[int, typer.Option(help="images per batch")] = 1,
    tf_padding: Annotated[bool, typer.Option("--tf-padding", help="TensorFlow's asymmetric SAME padding")] = False,
    seed: Annotated[int, typer.Option(help="seed of the random weights")] = 0,
) -> None:
    """Write a published CNN with seeded random weights as an ONNX file."""
    try:
        path = export(name, output, image_size=image_size, width=width, batch=batch, tf_padding=tf_padding, seed=seed)
    except ProjectError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(main)
