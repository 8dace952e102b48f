"""Recordings that are not there: silence as long as the published ones in the mean, in data sets of torchaudio and of
the hub.
"""

from __future__ import annotations

import io
import os
import struct
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from e2e.capture.imports import patched_imports
from e2e.capture.stand_ins import Note


@dataclass(frozen=True)
class Sound:
    """Recording of so many seconds, with so many values a second."""

    seconds: float
    rate: int = 16_000

    @property
    def values(self) -> int:
        """Number of values of its one channel."""
        return round(self.seconds * self.rate)

    def file(self) -> bytes:
        """Return the header of its WAV file, which names its length: :class:`Silence` needs no more."""
        size = 2 * self.values
        form = (16, 1, 1, self.rate, 2 * self.rate, 2, 16)
        return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVE", b"fmt ", *form, b"data", size)


class Silence(dict[str, Any]):
    """Decoded recording, as a mapping and as the decoder that newer versions of ``datasets`` give."""

    def __init__(self, sound: Sound) -> None:
        super().__init__(
            array=import_module("numpy").zeros(sound.values, "float32"), sampling_rate=sound.rate, path=None
        )

    def get_all_samples(self) -> Any:
        """Return all values, as one channel."""
        samples = type("AudioSamples", (), {})()
        samples.data, samples.sample_rate = torch.from_numpy(self["array"])[None], self["sampling_rate"]
        return samples


_TEXT = "the steps of a model are as long as its kernels and what it waits for whatever the words"

# torchaudio's data: recording, number of them, and what follows waveform and rate.
_SOUNDS: dict[str, tuple[Sound, int, tuple[Any, ...]]] = {
    "SPEECHCOMMANDS": (Sound(1.0), 84_843, ("yes", "0", 0)),
    "LIBRISPEECH": (Sound(12.7), 28_539, (_TEXT * 2, 0, 0, 0)),
    "LIBRITTS": (Sound(5.6, 24_000), 33_236, (_TEXT, _TEXT, 0, 0, "0")),
    "LJSPEECH": (Sound(6.6, 22_050), 13_100, (_TEXT, _TEXT)),
    "VCTK_092": (Sound(3.6, 48_000), 43_873, (_TEXT, "p225", "001")),
    "CMUARCTIC": (Sound(3.2), 1_132, (_TEXT, "0")),
    "TEDLIUM": (Sound(6.1), 268_263, (_TEXT, "0", "0", "0")),
    "GTZAN": (Sound(30.0, 22_050), 1_000, ("blues",)),
    "YESNO": (Sound(6.3, 8_000), 60, ([1, 0] * 4,)),
}


@contextmanager
def made_up_sounds(note: Note) -> Iterator[None]:
    """Context in which data sets of torchaudio that are not there are silent, and made-up rows of the hub's are
    decoded.
    """

    def recordings(datasets: Any) -> Iterator[tuple[Any, str, Any]]:
        for name, (sound, length, rest) in _SOUNDS.items():
            if hasattr(datasets, name):
                yield datasets, name, _recordings(getattr(datasets, name), name, sound, length, rest, note)

    with patched_imports({"torchaudio.datasets": recordings, "datasets.features.audio": _decoding}):
        yield


def _recordings(original: Any, name: str, sound: Sound, length: int, rest: tuple[Any, ...], note: Note) -> Any:
    class Recordings(original):  # type: ignore[misc]
        def __init__(self, root: Any, *args: Any, **kwargs: Any) -> None:
            self.made_up = not os.path.exists(root)
            if not self.made_up:
                try:
                    super().__init__(root, *args, **kwargs)
                except (RuntimeError, OSError):  # it has other data, and these cannot be downloaded
                    self.made_up = True
            if self.made_up:
                note(f"torchaudio's {name} is not in {root}: {length:,} silent recordings of {sound.seconds} s each")

        def __len__(self) -> int:
            return length if self.made_up else super().__len__()

        def __getitem__(self, place: int) -> Any:
            if not self.made_up:
                return super().__getitem__(place)
            if not 0 <= place < length:
                raise IndexError(place)
            return torch.zeros(1, sound.values), sound.rate, *rest

    Recordings.__name__ = Recordings.__qualname__ = name
    return Recordings


def _decoding(module: Any) -> Iterator[tuple[Any, str, Any]]:
    encode, decode = module.Audio.encode_example, module.Audio.decode_example

    def encode_example(self: Any, value: Any) -> Any:
        return value if _rate_and_values(value) else encode(self, value)

    def decode_example(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        found = _rate_and_values(value)
        if found is None:
            return decode(self, value, *args, **kwargs)
        rate = self.sampling_rate or found[0]
        return Silence(Sound(found[1] / found[0], rate))

    yield module.Audio, "encode_example", encode_example
    yield module.Audio, "decode_example", decode_example


def _rate_and_values(value: Any) -> tuple[int, int] | None:
    """Return what the header of a made-up recording says; None for any other."""
    content = value.get("bytes") if isinstance(value, dict) else None
    if not content or len(content) > 64 or not content.startswith(b"RIFF"):
        return None
    with wave.open(io.BytesIO(content)) as file:
        return file.getframerate(), file.getnframes()
