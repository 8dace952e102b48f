"""Data sets of the hub that are not on this machine, by their names: rows of the published columns, with texts as long
as the published ones in the mean, empty images and silence.

All rows are alike up to their class, so that batches of any sampler have the same shape. What works on them (``map``,
collators, streams) is the library's own.
"""

from __future__ import annotations

import io
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from costmodel.base.errors import ModelError
from e2e.capture.imports import patched_imports
from e2e.capture.missing.sounds import Sound
from e2e.capture.script_lines import users_line
from e2e.capture.stand_ins import Note

# Rows that are made up: enough for the first steps of any loop, few enough to be mapped in seconds.
MOST_ROWS = 2_048
_SPLITS = {"train": MOST_ROWS, "validation": 256, "test": 256}
_SENTENCE = "the steps of a model are as long as its kernels and what it waits for, whatever the words are; "


@dataclass(frozen=True)
class Text:
    """Text of about so many characters."""

    length: int


@dataclass(frozen=True)
class Label:
    """One of so many classes; a number with a fraction if there are none."""

    classes: int


@dataclass(frozen=True)
class Picture:
    """Image of this width and height."""

    width: int
    height: int
    mode: str = "RGB"


@dataclass(frozen=True)
class Talk:
    """Messages of a user and an assistant, of so many characters each."""

    turns: int
    length: int


Column = Text | Label | Picture | Sound | Talk | Mapping[str, "Column"]
Form = Mapping[str, Any]

_PAIR = {"sentence1": Text(118), "sentence2": Text(118), "label": Label(2), "idx": Label(1)}
_DOCUMENT = {"text": Text(3000)}
_INSTRUCTION = {"instruction": Text(60), "input": Text(40), "output": Text(270)}
_IMAGE_AND_TEXT = {"image": Picture(512, 512), "text": Text(60)}
_PREFERENCE = {"chosen": Talk(2, 800), "rejected": Talk(2, 800), "score_chosen": Label(0), "score_rejected": Label(0)}
_TRANSLATED = {"id": Text(5), "translation": {"en": Text(120), "de": Text(130)}}

# Columns by name without owner and with the configuration after a colon where they depend on it.
_FORMS: dict[str, Form] = {
    "wikitext": {"text": Text(290)},
    "glue:mrpc": _PAIR,
    "glue:cola": {"sentence": Text(41), "label": Label(2), "idx": Label(1)},
    "glue:sst2": {"sentence": Text(53), "label": Label(2), "idx": Label(1)},
    "glue:qqp": {"question1": Text(60), "question2": Text(60), "label": Label(2), "idx": Label(1)},
    "glue:qnli": {"question": Text(60), "sentence": Text(150), "label": Label(2), "idx": Label(1)},
    "glue:rte": {"sentence1": Text(280), "sentence2": Text(50), "label": Label(2), "idx": Label(1)},
    "glue:wnli": {"sentence1": Text(80), "sentence2": Text(40), "label": Label(2), "idx": Label(1)},
    "glue:stsb": {"sentence1": Text(58), "sentence2": Text(58), "label": Label(0), "idx": Label(1)},
    "glue:mnli": {"premise": Text(103), "hypothesis": Text(52), "label": Label(3), "idx": Label(1)},
    "sst2": {"idx": Label(1), "sentence": Text(53), "label": Label(2)},
    "imdb": {"text": Text(1300), "label": Label(2)},
    "ag_news": {"text": Text(236), "label": Label(4)},
    "yelp_review_full": {"label": Label(5), "text": Text(730)},
    "yelp_polarity": {"text": Text(730), "label": Label(2)},
    "rotten_tomatoes": {"text": Text(113), "label": Label(2)},
    "emotion": {"text": Text(96), "label": Label(6)},
    "squad": {"id": Text(24), "title": Text(15), "context": Text(755), "question": Text(60),
              "answers": {"text": [Text(20)], "answer_start": [Label(1)]}},
    "cnn_dailymail": {"article": Text(4000), "highlights": Text(300), "id": Text(40)},
    "xsum": {"document": Text(2200), "summary": Text(125), "id": Text(8)},
    "samsum": {"id": Text(8), "dialogue": Text(500), "summary": Text(110)},
    "wmt14": _TRANSLATED, "wmt16": _TRANSLATED, "wmt19": _TRANSLATED, "opus_books": _TRANSLATED,
    "c4": {"text": Text(2200), "timestamp": Text(20), "url": Text(60)},
    "openwebtext": {"text": Text(4900)},
    "bookcorpus": {"text": Text(62)},
    "wikipedia": {"id": Text(6), "url": Text(50), "title": Text(20), "text": Text(3000)},
    "tinystories": {"text": Text(900)},
    "fineweb": _DOCUMENT, "fineweb-edu": _DOCUMENT, "slimpajama-627b": _DOCUMENT, "pile": _DOCUMENT,
    "ptb_text_only": {"sentence": Text(110)},
    "alpaca": {**_INSTRUCTION, "text": Text(520)},
    "alpaca-cleaned": _INSTRUCTION,
    "databricks-dolly-15k": {"instruction": Text(70), "context": Text(350), "response": Text(360),
                             "category": Text(12)},
    "openassistant-guanaco": {"text": Text(1400)},
    "ultrachat_200k": {"prompt": Text(900), "prompt_id": Text(64), "messages": Talk(6, 900)},
    "capybara": {"source": Text(10), "messages": Talk(6, 700), "num_turns": Label(1)},
    "ultrafeedback_binarized": _PREFERENCE,
    "hh-rlhf": {"chosen": Text(700), "rejected": Text(700)},
    "kto-mix-14k": {"prompt": Talk(1, 600), "completion": Talk(1, 800), "label": Label(1)},
    "tldr": {"prompt": Text(1500), "completion": Text(130)},
    "gsm8k": {"question": Text(235), "answer": Text(280)},
    "all-nli:pair": {"anchor": Text(70), "positive": Text(40)},
    "all-nli:pair-class": {"premise": Text(70), "hypothesis": Text(40), "label": Label(3)},
    "all-nli:pair-score": {"sentence1": Text(70), "sentence2": Text(40), "score": Label(0)},
    "all-nli:triplet": {"anchor": Text(70), "positive": Text(40), "negative": Text(40)},
    "stsb": {"sentence1": Text(58), "sentence2": Text(58), "score": Label(0)},
    "natural-questions": {"query": Text(48), "answer": Text(560)},
    "quora-duplicates:pair": {"anchor": Text(52), "positive": Text(52)},
    "conll2003": {"id": Text(4), "tokens": [Text(5)] * 14, "ner_tags": [Label(9)] * 14},
    "mnist": {"image": Picture(28, 28, "L"), "label": Label(10)},
    "fashion_mnist": {"image": Picture(28, 28, "L"), "label": Label(10)},
    "cifar10": {"img": Picture(32, 32), "label": Label(10)},
    "cifar100": {"img": Picture(32, 32), "fine_label": Label(100), "coarse_label": Label(20)},
    "beans": {"image_file_path": Text(60), "image": Picture(500, 500), "labels": Label(3)},
    "food101": {"image": Picture(512, 512), "label": Label(101)},
    "cats_vs_dogs": {"image": Picture(400, 360), "labels": Label(2)},
    "imagenet-1k": {"image": Picture(500, 375), "label": Label(1000)},
    "tiny-imagenet": {"image": Picture(64, 64), "label": Label(200)},
    "smithsonian_butterflies_subset": {"image": Picture(512, 512), "name": Text(20)},
    "flowers-102-categories": {"image": Picture(500, 667)},
    "pokemon": {"image": Picture(512, 512)},
    "librispeech_asr": {"file": Text(60), "audio": Sound(12.3), "text": Text(180), "speaker_id": Label(1),
                        "chapter_id": Label(1), "id": Text(14)},
    "librispeech_asr_dummy": {"file": Text(60), "audio": Sound(7.0), "text": Text(100), "id": Text(14)},
    "minds14": {"path": Text(60), "audio": Sound(8.5, 8_000), "transcription": Text(70),
                "english_transcription": Text(70), "intent_class": Label(14), "lang_id": Label(14)},
    "speech_commands": {"file": Text(30), "audio": Sound(1.0), "label": Label(36), "is_unknown": Label(1)},
    "superb:ks": {"file": Text(30), "audio": Sound(1.0), "label": Label(12)},
    "superb:asr": {"file": Text(60), "audio": Sound(12.3), "text": Text(180), "id": Text(14)},
    "common_language": {"client_id": Text(64), "path": Text(60), "audio": Sound(4.0, 48_000), "sentence": Text(50),
                        "language": Label(45)},
    "lj_speech": {"id": Text(10), "audio": Sound(6.6, 22_050), "file": Text(60), "text": Text(100),
                  "normalized_text": Text(100)},
    "voxpopuli": {"audio_id": Text(30), "audio": Sound(9.9), "raw_text": Text(130), "normalized_text": Text(130),
                  "speaker_id": Text(6)},
    "gtzan": {"file": Text(40), "audio": Sound(30.0, 22_050), "genre": Label(10)},
    **dict.fromkeys(
        ("common_voice", "common_voice_11_0", "common_voice_13_0", "common_voice_17_0"),
        {"client_id": Text(64), "path": Text(60), "audio": Sound(5.3, 48_000), "sentence": Text(55),
         "up_votes": Label(1), "down_votes": Label(1), "age": Text(8), "gender": Text(6), "accent": Text(6),
         "locale": Text(2), "segment": Text(1)},
    ),
    "naruto-blip-captions": _IMAGE_AND_TEXT,
    "pokemon-blip-captions": _IMAGE_AND_TEXT,
}  # fmt: skip
# Other splits than the usual ones.
_OTHER_SPLITS: dict[str, tuple[str, ...]] = {
    "glue:mnli": ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"),
    "ultrachat_200k": ("train_sft", "test_sft", "train_gen", "test_gen"),
    **dict.fromkeys(("capybara", "ultrafeedback_binarized", "hh-rlhf", "imdb", "ag_news", "gsm8k"), ("train", "test")),
    **dict.fromkeys(("cifar10", "cifar100", "mnist", "fashion_mnist"), ("train", "test")),
    **dict.fromkeys(("alpaca", "alpaca-cleaned", "databricks-dolly-15k", "openwebtext", "wikipedia"), ("train",)),
    "food101": ("train", "validation"),
}
# Kinds of local files whose columns are known.
_LOCAL: dict[str, Form] = {"text": {"text": Text(290)}, "imagefolder": {"image": Picture(512, 512), "label": Label(2)}}


def _form(path: str, name: str | None) -> tuple[str, Form] | None:
    """Return the key and the columns of the data set ``path`` with the configuration ``name``."""
    short = path.rpartition("/")[2].lower()
    return next(
        ((key, _FORMS[key]) for key in (f"{short}:{name}", short) if key in _FORMS),
        next(((key, form) for key, form in _FORMS.items() if name is None and key.startswith(f"{short}:")), None),
    )


@contextmanager
def made_up_datasets(made_up: bool, note: Note) -> Iterator[None]:
    """Context in which data sets of the hub that are not here are made up, or named if not ``made_up``."""
    patches = {"datasets.load": lambda module: _loading(module, made_up, note), "evaluate.loading": _measuring}
    with patched_imports(patches):
        yield


class Scores(dict):  # type: ignore[type-arg]
    """Results of a metric: one, whatever it is."""

    def __missing__(self, key: str) -> float:
        return 1.0


class Metric:
    """Metric of ``evaluate`` whose code is not here: it takes anything."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Take a result."""

    add_batch = add

    def compute(self, *args: Any, **kwargs: Any) -> Scores:
        """Return the scores."""
        return Scores({self.name: 1.0})


def _measuring(module: Any) -> Iterator[tuple[Any, str, Any]]:
    original = module.load

    def load(path: str, config_name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(path, config_name, *args, **kwargs)
        except (OSError, ValueError):
            return Metric(path)

    yield module, "load", load


def _loading(module: Any, made_up: bool, note: Note) -> Iterator[tuple[Any, str, Any]]:
    load = module.load_dataset

    def load_dataset(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(path, name, *args, **kwargs)
        except (OSError, ValueError, RuntimeError) as error:  # all that a missing one may be
            reason = error
        return _stand_in(str(path), name, kwargs, made_up, note, reason)  # its own errors are not of a missing network

    yield module, "load_dataset", load_dataset


def _stand_in(
    path: str, name: str | None, options: Mapping[str, Any], made_up: bool, note: Note, error: Exception
) -> Any:
    data = import_module("datasets")
    files = options.get("data_files")
    if path in _LOCAL and (files or options.get("data_dir")):
        found: tuple[str, Form] | None = (path, _LOCAL[path])
        splits: tuple[str, ...] = tuple(files) if isinstance(files, Mapping) else ("train",)
    else:
        found = _form(path, name)
        splits = _OTHER_SPLITS.get(found[0], tuple(_SPLITS)) if found else ()
    line = users_line(traceback.extract_stack())
    place = f"{line}: " if line else ""
    title = " ".join(filter(None, (path, name, str(files) if files else "")))
    if os.path.isdir(path) or found is None:
        raise ModelError(
            f"{place}load_dataset({title!r}): not here, and its columns are not known; put some rows of it into "
            f"{path if found is None and path not in _KINDS else 'the files named'}"
            f"{'/train.jsonl' if path not in _KINDS else ''}, or load it once where there is a network"
        ) from error
    if not made_up:
        raise ModelError(
            f"{place}load_dataset({title!r}): not here; give --data synthetic, or load it once where there is a network"
        ) from error
    note(f"{title}: not here, {MOST_ROWS:,} rows of {_told(found[1])}")
    wanted = options.get("split")
    if wanted is None or isinstance(wanted, Mapping):
        kind = data.IterableDatasetDict if options.get("streaming") else data.DatasetDict
        parts = wanted or {split: split for split in splits}
        return kind({name: split_of(data, found[1], str(split), options) for name, split in parts.items()})
    if isinstance(wanted, (list, tuple)):
        return type(wanted)(split_of(data, found[1], str(each), options) for each in wanted)
    return split_of(data, found[1], str(wanted), options)


_KINDS = ("csv", "json", "text", "parquet", "arrow", "imagefolder", "audiofolder", "webdataset", "pandas")


def split_of(data: Any, form: Form, split: str, options: Mapping[str, Any]) -> Any:
    """Return the rows that ``split`` names, such as ``train[:10%]``, as the library ``data`` has them."""
    name, _, part = re.sub(r"\s", "", split).partition("[")
    rows = sum(_SPLITS.get(each.partition("_")[0], MOST_ROWS) for each in name.split("+"))
    rows = len(range(rows)[_slice(part.rstrip("]"), rows)]) if part else rows
    row = {column: _value(kind) for column, kind in form.items()}
    features = data.Features({column: _feature(data, kind) for column, kind in form.items()})
    if options.get("streaming"):
        return data.IterableDataset.from_generator(_endless, features=features, gen_kwargs={"row": row})
    columns = {column: _column(form[column], value, rows) for column, value in row.items()}
    return data.Dataset.from_dict(columns, features=features)


def _column(kind: Any, value: Any, rows: int) -> list[Any]:
    """Return a value for each row: classes in turn, as a program may look for some of each."""
    if isinstance(kind, Label) and kind.classes > 1:
        return [number % kind.classes for number in range(rows)]
    return [value] * rows


def _endless(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    while True:
        yield dict(row)


def _slice(text: str, rows: int) -> slice:
    """Return the rows that ``train[:1000]`` or ``train[10%:20%]`` means."""

    def number(part: str) -> int | None:
        if part.endswith("%"):
            return rows * int(part[:-1]) // 100
        return int(part) if part else None

    start, _, end = text.partition(":")
    return slice(number(start), number(end))


def _value(kind: Any) -> Any:
    if isinstance(kind, Text):
        return (_SENTENCE * (kind.length // len(_SENTENCE) + 1))[: kind.length]
    if isinstance(kind, Label):
        return 0 if kind.classes else 0.5
    if isinstance(kind, Picture):
        file = io.BytesIO()
        import_module("PIL.Image").new(kind.mode, (kind.width, kind.height)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}
    if isinstance(kind, Sound):
        return {"bytes": kind.file(), "path": None}
    if isinstance(kind, Talk):
        return [
            {"role": ("user", "assistant")[turn % 2], "content": _value(Text(kind.length))}
            for turn in range(kind.turns)
        ]
    if isinstance(kind, Mapping):
        return {name: _value(each) for name, each in kind.items()}
    assert isinstance(kind, Sequence)
    return [_value(each) for each in kind]


def _feature(data: Any, kind: Any) -> Any:
    if isinstance(kind, Text):
        return data.Value("string")
    if isinstance(kind, Label):
        if kind.classes > 1:
            return data.ClassLabel(names=[str(number) for number in range(kind.classes)])
        return data.Value("int64" if kind.classes else "float32")
    if isinstance(kind, Picture):
        return data.Image()
    if isinstance(kind, Sound):
        return data.Audio(sampling_rate=kind.rate)
    if isinstance(kind, Talk):
        return [{"role": data.Value("string"), "content": data.Value("string")}]
    if isinstance(kind, Mapping):
        return {name: _feature(data, each) for name, each in kind.items()}
    return [_feature(data, kind[0])]


def _told(form: Form) -> str:
    """Describe the columns for the report."""
    return ", ".join(f"{name}{_size(kind)}" for name, kind in form.items())


def _size(kind: Any) -> str:
    if isinstance(kind, Text):
        return f" ({kind.length:,} characters)"
    if isinstance(kind, Picture):
        return f" ({kind.width}x{kind.height})"
    if isinstance(kind, Sound):
        return f" ({kind.seconds} s)"
    if isinstance(kind, Talk):
        return f" ({kind.turns} messages of {kind.length:,} characters)"
    return ""
