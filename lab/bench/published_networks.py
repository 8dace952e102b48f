"""Networks absent from `fusion.modelzoo` and timm, written from their papers: inputs of `lab/bench/models.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ConvNormActivation(nn.Sequential):
    """Convolution without bias, batch norm, optional activation; (N, C, H, W) to (N, C', H', W')."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1,
        activation: Callable[[], nn.Module] | None = nn.ReLU,
    ) -> None:  # fmt: skip
        layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)]
        layers += [nn.BatchNorm2d(outputs)] + ([] if activation is None else [activation()])
        super().__init__(*layers)


class ShuffleUnit(nn.Module):
    """Block of ShuffleNetV2 (Ma et al., ECCV 2018): half of the channels passes through, both halves are
    interleaved.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.stride = stride
        if stride == 2:
            self.skip = nn.Sequential(
                ConvNormActivation(inputs, inputs, 3, 2, inputs, activation=None), ConvNormActivation(inputs, half)
            )
        self.body = nn.Sequential(
            ConvNormActivation(inputs if stride == 2 else half, half),
            ConvNormActivation(half, half, 3, stride, half, activation=None),
            ConvNormActivation(half, half),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        passed, taken = (self.skip(x), x) if self.stride == 2 else x.chunk(2, dim=1)
        joined = torch.cat((passed, self.body(taken)), dim=1)
        batch, channels, height, width = joined.shape
        return joined.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(joined.shape)


def shufflenet_v2() -> nn.Module:
    """ShuffleNetV2 1.0x: (1, 3, 224, 224) to 1,000 classes."""
    blocks: list[nn.Module] = [ConvNormActivation(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 24
    for outputs, repeats in ((116, 4), (232, 8), (464, 4)):
        for index in range(repeats):
            blocks.append(ShuffleUnit(inputs, outputs, 2 if index == 0 else 1))
            inputs = outputs
    blocks += [ConvNormActivation(inputs, 1024), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
    return nn.Sequential(*blocks)


class CrossStage(nn.Module):
    """C2f block of YOLOv8: every bottleneck's output is kept and all are concatenated."""

    def __init__(self, inputs: int, outputs: int, repeats: int, shortcut: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.shortcut = shortcut
        self.opening = ConvNormActivation(inputs, outputs, activation=nn.SiLU)
        self.bottlenecks = nn.ModuleList(
            nn.Sequential(*(ConvNormActivation(half, half, 3, activation=nn.SiLU) for _ in range(2)))
            for _ in range(repeats)
        )
        self.closing = ConvNormActivation((2 + repeats) * half, outputs, activation=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H, W)."""
        parts = list(self.opening(x).chunk(2, dim=1))
        for bottleneck in self.bottlenecks:
            made = bottleneck(parts[-1])
            parts.append(parts[-1] + made if self.shortcut else made)
        return self.closing(torch.cat(parts, dim=1))


class PooledPyramid(nn.Module):
    """SPPF block: three sequential max poolings, concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.opening = ConvNormActivation(channels, channels // 2, activation=nn.SiLU)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.closing = ConvNormActivation(channels * 2, channels, activation=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape."""
        parts = [self.opening(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.closing(torch.cat(parts, dim=1))


class YoloV8Nano(nn.Module):
    """Backbone, neck and convolutions of the heads of YOLOv8n (Ultralytics, 2023), before boxes are decoded."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        down = [(3, 16), (16, 32), (32, 64), (64, 128), (128, 256)]
        self.down = nn.ModuleList(ConvNormActivation(a, b, 3, 2, activation=nn.SiLU) for a, b in down)
        stages = [(32, 1), (64, 2), (128, 2), (256, 1)]
        self.stages = nn.ModuleList(CrossStage(width, width, repeats, True) for width, repeats in stages)
        self.pyramid = PooledPyramid(256)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.neck = nn.ModuleList(
            CrossStage(a, b, 1, False) for a, b in [(384, 128), (192, 64), (192, 128), (384, 256)]
        )
        self.shrink = nn.ModuleList(ConvNormActivation(c, c, 3, 2, activation=nn.SiLU) for c in (64, 128))
        self.boxes = nn.ModuleList(self._head(width, 64, 64) for width in (64, 128, 256))
        self.classes = nn.ModuleList(self._head(width, 80, classes) for width in (64, 128, 256))

    @staticmethod
    def _head(inputs: int, width: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            ConvNormActivation(inputs, width, 3, activation=nn.SiLU),
            ConvNormActivation(width, width, 3, activation=nn.SiLU),
            nn.Conv2d(width, outputs, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(N, 3, H, W) to three maps of (N, 144, H / s, W / s), s of 8, 16 and 32."""
        x = self.down[0](x)
        kept = []
        for down, stage in zip(list(self.down)[1:], self.stages, strict=True):
            x = stage(down(x))
            kept.append(x)
        deep = self.pyramid(x)
        middle = self.neck[0](torch.cat((self.up(deep), kept[2]), dim=1))
        fine = self.neck[1](torch.cat((self.up(middle), kept[1]), dim=1))
        middle = self.neck[2](torch.cat((self.shrink[0](fine), middle), dim=1))
        deep = self.neck[3](torch.cat((self.shrink[1](middle), deep), dim=1))
        levels = zip((fine, middle, deep), self.boxes, self.classes, strict=True)
        return tuple(torch.cat((boxes(level), classes(level)), dim=1) for level, boxes, classes in levels)


class UNet(nn.Module):
    """U-Net (Ronneberger et al., MICCAI 2015) with padded convolutions and batch norms, as it is used today."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.encoder = nn.ModuleList(self._pair(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.decoder = nn.ModuleList(self._pair(2 * w, w) for w in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(ConvNormActivation(inputs, outputs, 3), ConvNormActivation(outputs, outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, classes, H, W)."""
        kept = []
        for level, block in enumerate(self.encoder):
            x = block(x if level == 0 else self.pool(x))
            kept.append(x)
        for grow, block, skipped in zip(self.grow, self.decoder, reversed(kept[:-1]), strict=True):
            x = block(torch.cat((skipped, grow(x)), dim=1))
        return self.last(x)


class BasicPitch(nn.Module):
    """Network of Bittner et al. (ICASSP 2022) after its harmonic stacking: note, onset and contour maps."""

    def __init__(self, harmonics: int = 8, width: int = 32) -> None:
        super().__init__()
        self.contour = nn.Sequential(
            _window(harmonics, width, (5, 5)), _window(width, 8, (3, 39)), nn.Conv2d(8, 1, 5, padding=2), nn.Sigmoid()
        )
        self.note = nn.Sequential(
            nn.ConstantPad2d((2, 2, 3, 3), 0), _window(1, width, (7, 7), (1, 3), (0, 0)),
            nn.Conv2d(width, 1, (7, 3), padding=(3, 1)), nn.Sigmoid(),
        )  # fmt: skip
        self.onset = nn.Sequential(nn.ConstantPad2d((1, 1, 2, 2), 0), _window(harmonics, width, (5, 5), (1, 3), (0, 0)))
        self.last = nn.Sequential(nn.Conv2d(width + 1, 1, 3, padding=1), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(N, 8, frames, 264) to contours (N, 1, frames, 264), notes and onsets (N, 1, frames, 88)."""
        contour = self.contour(x)
        note = self.note(contour)
        return contour, note, self.last(torch.cat((note, self.onset(x)), dim=1))


def _window(
    inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] | None = None,
) -> nn.Module:  # fmt: skip
    """Convolution with a window of any shape, batch norm and ReLU."""
    around = padding if padding is not None else (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, around, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def crepe_tiny() -> nn.Module:
    """CREPE in its smallest form (Kim et al., ICASSP 2018): (1, 1024, 1) samples to 360 pitches, in tall windows."""
    blocks: list[nn.Module] = []
    inputs = 1
    for outputs, window, stride in ((128, 512, 4), (16, 64, 1), (16, 64, 1), (16, 64, 1), (32, 64, 1), (64, 64, 1)):
        before = (window - stride) // 2
        blocks += [
            nn.ConstantPad2d((0, 0, before, window - stride - before), 0),
            nn.Conv2d(inputs, outputs, (window, 1), (stride, 1)), nn.ReLU(), nn.BatchNorm2d(outputs),
            nn.MaxPool2d((2, 1)),
        ]  # fmt: skip
        inputs = outputs
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * inputs, 360), nn.Sigmoid())


def keyword_conv() -> nn.Module:
    """The larger of Sainath and Parada's keyword spotters (Interspeech 2015): (1, 98, 40) features to 12 words."""
    return nn.Sequential(
        nn.ConstantPad2d((3, 4, 9, 10), 0), nn.Conv2d(1, 64, (20, 8)), nn.ReLU(), nn.MaxPool2d(2),
        nn.ConstantPad2d((1, 2, 4, 5), 0), nn.Conv2d(64, 64, (10, 4)), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 49 * 20, 12),
    )  # fmt: skip


def waveform_m5() -> nn.Module:
    """M5 (Dai et al., ICASSP 2017): (1, 1, 16000) samples to 10 classes."""
    blocks: list[nn.Module] = [_window(1, 128, (1, 80), (1, 4), (0, 38)), nn.MaxPool2d((1, 4))]
    inputs = 128
    for outputs in (128, 256, 512):
        blocks += [_window(inputs, outputs, (1, 3)), nn.MaxPool2d((1, 4))]
        inputs = outputs
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def srcnn() -> nn.Module:
    """SRCNN 9-1-5 (Dong et al., PAMI 2016): one channel of an enlarged picture, sharpened."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 9, padding=4), nn.ReLU(), nn.Conv2d(64, 32, 1), nn.ReLU(), nn.Conv2d(32, 1, 5, padding=2)
    )


def espcn() -> nn.Module:
    """ESPCN (Shi et al., CVPR 2016): one channel of a picture, enlarged three times."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh(),
        nn.Conv2d(32, 9, 3, padding=1), nn.PixelShuffle(3),
    )  # fmt: skip


def eegnet() -> nn.Module:
    """EEGNet-8,2 (Lawhern et al. 2018): (1, 64 electrodes, 512 samples) to 4 classes."""
    return nn.Sequential(
        nn.ConstantPad2d((31, 32, 0, 0), 0), nn.Conv2d(1, 8, (1, 64), bias=False), nn.BatchNorm2d(8),
        nn.Conv2d(8, 16, (64, 1), groups=8, bias=False), nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 4)),
        nn.ConstantPad2d((7, 8, 0, 0), 0), nn.Conv2d(16, 16, (1, 16), groups=16, bias=False),
        nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 8)), nn.Flatten(),
        nn.Linear(16 * 16, 4),
    )  # fmt: skip


# Name: constructor, and channels, height and width of its inputs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "shufflenet_v2": (shufflenet_v2, (3, 224, 224)),
    "yolov8n": (YoloV8Nano, (3, 320, 320)),
    "unet": (UNet, (3, 256, 256)),
    "basic_pitch": (BasicPitch, (8, 172, 264)),
    "crepe_tiny": (crepe_tiny, (1, 1024, 1)),
    "keyword_conv": (keyword_conv, (1, 98, 40)),
    "waveform_m5": (waveform_m5, (1, 1, 16000)),
    "srcnn": (srcnn, (1, 256, 256)),
    "espcn": (espcn, (1, 240, 320)),
    "eegnet": (eegnet, (1, 64, 512)),
}
