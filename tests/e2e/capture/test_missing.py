"""What a program reads and this machine lacks: weights, tokenizers, data sets; loaders; the GPU that is asked."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch

from costmodel.base.errors import ModelError
from e2e.capture.environment import pretend_gpu
from e2e.capture.imports import patched_imports
from e2e.capture.missing import hub_datasets
from e2e.capture.missing.coco import made_up_annotations
from e2e.capture.missing.hub import Hub
from e2e.capture.missing.images import made_up_images, name_of_image, size_of_image
from e2e.capture.missing.loaders import LoadedBatches, loaders_without_workers
from e2e.capture.missing.program_needs import told_missing
from e2e.capture.missing.sounds import Sound, made_up_sounds
from e2e.capture.missing.tokenizers import Encoding, write_tokenizer
from e2e.capture.missing.weights import weights_not_read
from e2e.capture.models.configurations import published, published_parts
from e2e.capture.stand_ins import driver_tools, silent_loggers
from e2e.commands.e2e_api import predict
from e2e.step.options import SeenGpu

# Packages that CI lacks, as small as what a program of the tests uses of them.
DATASETS = """
from .load import load_dataset


class Value:
    def __init__(self, kind):
        self.kind = kind


class ClassLabel:
    def __init__(self, names):
        self.names = names


class Features(dict):
    pass


class DatasetDict(dict):
    def map(self, function, batched):
        return DatasetDict({name: each.map(function) for name, each in self.items()})


class Dataset:
    def __init__(self, rows):
        self.rows = rows

    @classmethod
    def from_dict(cls, columns, features):
        assert set(columns) == set(features)
        return cls([dict(zip(columns, row)) for row in zip(*columns.values())])

    def map(self, function):
        columns = {name: [row[name] for row in self.rows] for name in self.rows[0]}
        found = function(columns)
        return Dataset([{**row, **{name: found[name][at] for name in found}} for at, row in enumerate(self.rows)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return self.rows[at]
"""
LOAD = """
def load_dataset(path, name=None, **options):
    raise ConnectionError(f"{path} is on the hub")
"""

TUNING = """
import sys
import traceback

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

name, data = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path=name)
rows = load_dataset("nyu-mll/glue", data).map(lambda row: tokenizer(row["sentence"], truncation=True), batched=True)


def collated(batch):
    kept = [{key: row[key] for key in ("input_ids", "attention_mask", "label")} for row in batch]
    return DataCollatorWithPadding(tokenizer)(kept)


loader = torch.utils.data.DataLoader(
    rows["train"], 16, shuffle=True, collate_fn=collated, num_workers=2, pin_memory=True, persistent_workers=True
)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2, num_hidden_layers=2)
assert next(model.parameters()).dtype is torch.float32 and not model.training
model.train().to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
state = torch.load("checkpoint.pt", map_location="cuda")
model.load_state_dict(state["model"])
for epoch in range(state["epoch"] + 1, 10):
    for batch in loader:
        loss = model(**{key: value.to("cuda") for key, value in batch.items()}).loss
        assert not torch.isnan(loss) and loss == loss and loss.cpu() > 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("program")
    (found / "datasets").mkdir()
    (found / "datasets" / "__init__.py").write_text(DATASETS, encoding="utf-8")
    (found / "datasets" / "load.py").write_text(LOAD, encoding="utf-8")
    (found / "tune.py").write_text(TUNING, encoding="utf-8")
    return found


def run(folder: Path, *arguments: str, **options: object) -> object:
    return predict(command=("python", "tune.py", *arguments), folder=folder, gpu="h100-sxm", **options)


def test_a_program_of_names_of_the_hub_runs_without_its_files(folder: Path) -> None:
    pytest.importorskip("transformers")
    found = run(folder, "google-bert/bert-base-cased", "sst2", data="synthetic")
    assert found.throughput.samples == 16
    said = "\n".join(found.notes)
    assert "glue sst2: not here, 2,048 rows of sentence (53 characters)" in said
    assert "one token of 28,996 for 4 characters" in said
    assert "BertForSequenceClassification by its configuration, weights not read" in said
    assert "checkpoint.pt is not there" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nobody/knows-it", "sst2"), r"tune.py:\d+: asks the hub for nobody/knows-it.*hf download"),
        (("google-bert/bert-base-cased", "strange"), r"tune.py:\d+: load_dataset\(.*put some rows of it"),
    ],
)
def test_what_is_not_known_is_named_with_what_to_give(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=said):
        run(folder, *arguments, data="synthetic")


def test_generation_within_a_step_is_a_range(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "generate.py").write_text(
        """
import torch, transformers
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(10):
    prompts = torch.randint(3, 64, (2, 8), device="cuda")
    tokens = model.generate(prompts, max_new_tokens=5, pad_token_id=0)
    ended = torch.isin(tokens, torch.tensor([0, 2], device="cuda"))
    ends = torch.full((2,), tokens.shape[1], device="cuda")
    ends[ended.any(1)] = ended.int().argmax(1)[ended.any(1)]
    whole = (torch.arange(tokens.shape[1], device="cuda") <= ends[:, None]).cpu()
    lists = [row[mask].tolist() for row, mask in zip(tokens.cpu(), whole)]
    assert [len(each) for each in lists] == [13, 13]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        encoding="utf-8",
    )
    found = predict(command=("python", "generate.py"), folder=folder, gpu="h100-sxm")
    assert [(each.name, each.entered) for each in found.ranges if each.name == "generate"] == [("generate", 1)]
    assert any("sequences are as long as they may become" in line for line in found.notes)


def test_without_synthetic_data_the_missing_are_named(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "rows.py").write_text("import datasets\ndatasets.load_dataset('glue', 'sst2')\n", encoding="utf-8")
    with pytest.raises(ModelError, match=r"rows.py:2: load_dataset\('glue sst2'\): not here; give --data synthetic"):
        predict(command=("python", "rows.py"), folder=folder, gpu="h100-sxm")


@pytest.mark.parametrize(
    ("split", "rows"),
    [("train", 2048), ("train[:1000]", 1000), ("validation[50%:]", 128), ("train+test", 2304), ("train[-8:]", 8)],
)
def test_a_split_has_the_rows_that_it_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, split: str, rows: int
) -> None:
    monkeypatch.syspath_prepend(folder)
    found = hub_datasets.split_of(import_module("datasets"), {"text": hub_datasets.Text(10)}, split, {})
    assert len(found) == rows and len(found[0]["text"]) == 10
    for name in ("datasets", "datasets.load"):
        monkeypatch.delitem(sys.modules, name)


def test_names_of_the_hub_share_configurations_with_presets() -> None:
    assert published("meta-llama/Meta-Llama-3-8B-Instruct")["vocab_size"] == 128256
    assert published("Qwen/Qwen2.5-0.5B-Instruct")["hidden_size"] == 896
    assert published("gpt2-xl")["n_layer"] == 48
    assert published("TinyLlama/TinyLlama-1.1B-Chat-v1.0")["num_hidden_layers"] == 22
    assert published("nobody/knows-it") is None
    assert published_parts("CompVis/stable-diffusion-v1-4")["unet"]["cross_attention_dim"] == 768


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("Qwen/Qwen2-0.5B", 494.0),
        ("HuggingFaceTB/SmolLM2-135M", 134.5),
        ("facebook/opt-350m", 331.2),
        ("EleutherAI/pythia-410m", 405.3),
        ("google/gemma-2b", 2506.2),
        ("microsoft/phi-2", 2779.7),
        ("meta-llama/Llama-3.2-3B", 3212.7),
    ],
)
def test_a_published_model_has_its_number_of_parameters(name: str, millions: float) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**published(name)))
    assert sum(each.numel() for each in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize(
    "name", ["gpt2", "bert-base-cased", "t5-small", "facebook/opt-125m", "Qwen/Qwen2-0.5B", "openai/whisper-tiny"]
)
def test_a_tokenizer_has_the_vocabulary_and_marks_of_its_model(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = published(name)
    size = write_tokenizer(config, tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(tokenizer) == size == transformers.AutoConfig.for_model(**config).vocab_size
    plain = tokenizer("word" * 10, add_special_tokens=False)["input_ids"]
    assert len(plain) == 10 and not set(plain) & set(tokenizer.all_special_ids)
    marks = len(tokenizer("word" * 10)["input_ids"]) - 10
    assert marks == {"bert": 2, "t5": 1, "whisper": 5}.get(config["model_type"], 0)
    assert len(tokenizer("word" * 900, truncation=True, max_length=128)["input_ids"]) == 128
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "word"}], tokenize=False, add_generation_prompt=True
    )


def test_an_encoding_gives_a_token_for_four_characters() -> None:
    encoding = Encoding("gpt2", 50257)
    assert len(encoding.encode_ordinary("word" * 5)) == 5 and max(encoding.encode("word")) < encoding.n_vocab
    assert encoding.eot_token == 50256


def test_the_hub_prefers_what_is_there(tmp_path: Path) -> None:
    real = tmp_path / "cache" / "models--gpt2" / "snapshots" / "1"
    real.mkdir(parents=True)
    (real / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}), encoding="utf-8")
    hub = Hub(tmp_path / "hub")
    hub.link(tmp_path / "cache")
    assert hub.config("gpt2")["n_layer"] == 3
    assert hub.config("gpt2-xl")["n_layer"] == 48
    assert hub.config("nobody/knows-it") == {} and hub.unknown == ["nobody/knows-it"]
    assert hub.file("gpt2-xl", "model.safetensors").endswith("model.safetensors")


@contextmanager
def no_weights(tmp_path: Path, notes: list[str]) -> Iterator[None]:
    with weights_not_read(Hub(tmp_path), notes.append):
        yield


def test_a_checkpoint_that_is_not_there_stands_for_any_state(tmp_path: Path) -> None:
    notes: list[str] = []
    with no_weights(tmp_path, notes):
        state = torch.load(tmp_path / "none.pt", weights_only=False)
        module = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(module.parameters())
        module.load_state_dict(state["model"], strict=True)
        optimizer.load_state_dict(state["optimizer"])
        assert state["epoch"] + 1 == 1 and max(1.5, state["best"]) == 1.5 and list(state.items()) == []
        with pytest.raises(ModelError, match="none.pt is not there and add needs its values"):
            torch.add(torch.ones(1), state["rows"])
        torch.save({"a": torch.ones(2)}, tmp_path / "there.pt")
        assert torch.load(tmp_path / "there.pt", map_location="cuda:0")["a"].device.type == "meta"
    assert any("none.pt" in line for line in notes)


FVCORE = """
class Checkpointer:
    def load(self, path, checkpointables=None):
        return {"from": path} if path else {}
    def resume_or_load(self, path, *, resume=True):
        return self.load(path, [])
"""


def test_a_checkpoint_at_an_address_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fvcore" / "common").mkdir(parents=True)
    (tmp_path / "fvcore" / "common" / "checkpoint.py").write_text(FVCORE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    notes: list[str] = []
    here = tmp_path / "here.pkl"
    here.write_bytes(b"weights")
    with weights_not_read(Hub(tmp_path / "hub", True), notes.append):
        checkpointer = import_module("fvcore.common.checkpoint").Checkpointer()
        assert checkpointer.resume_or_load("detectron2://R-50.pkl", resume=False) == {}
        assert checkpointer.load(str(tmp_path / "absent.pkl")) == {}
        assert checkpointer.resume_or_load(str(here)) == {"from": str(here)}
    assert len(notes) == 2 and notes[0].startswith("detectron2://R-50.pkl is not there")


def test_a_program_gives_weights_that_are_not_there_other_names(tmp_path: Path) -> None:
    """As torchtune does with checkpoints of the hub."""
    pytest.importorskip("safetensors")
    empty = tmp_path / "model.safetensors"
    empty.touch()
    notes: list[str] = []
    module = torch.nn.Linear(2, 2)
    with no_weights(tmp_path, notes):
        with pytest.raises(RuntimeError, match="Missing key"):
            module.load_state_dict({})  # of no file
        with import_module("safetensors").safe_open(empty, framework="pt", device="cpu") as file:
            names = file.keys()
            assert file.metadata() == {}
        module.load_state_dict({f"model.{name}": name for name in names})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            module.load_state_dict({"other": torch.ones(2)})
    assert len(notes) == 1 and notes[0].startswith(f"{empty} is not there")


OLD_TRANSFORMERS = """
import torch

class PretrainedConfig:
    torch_dtype = None

    @classmethod
    def from_pretrained(cls, name, return_unused_kwargs=False, **options):
        return cls(), options

class PreTrainedModel(torch.nn.Module):
    config_class = PretrainedConfig

    @classmethod
    def _from_config(cls, config, *, torch_dtype=None, **options):
        made = cls()
        made.made_with = torch_dtype, options
        return made

    @classmethod
    def from_pretrained(cls, name):
        raise AssertionError("reads weights")
"""


def test_models_of_a_transformers_without_quantizers_are_made_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before 4.56 call the type of the weights `torch_dtype`."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text('__version__ = "4.16.2"', encoding="utf-8")
    (tmp_path / "transformers" / "modeling_utils.py").write_text(OLD_TRANSFORMERS, encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with weights_not_read(Hub(tmp_path / "hub", True), lambda note: None):
        model = import_module("transformers.modeling_utils").PreTrainedModel
        assert model.from_pretrained("bert").made_with == (torch.float32, {})
        assert model.from_pretrained("bert", torch_dtype=torch.bfloat16).made_with == (torch.bfloat16, {})
    for name in ("transformers", "transformers.modeling_utils"):
        monkeypatch.delitem(sys.modules, name)


def test_loaders_with_workers_start_none() -> None:
    class Parts(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            told = torch.utils.data.get_worker_info()
            yield from range(told.id, 4, told.num_workers)

    seen: list[int] = []
    batches = LoadedBatches()
    with loaders_without_workers(batches):
        loader = torch.utils.data.DataLoader(
            Parts(), 2, num_workers=3, worker_init_fn=seen.append, persistent_workers=True, timeout=9
        )
        for _ in range(2):
            assert [each.tolist() for each in loader] == [[0, 1], [2, 3]]
    assert seen == [0] and loader.num_workers == 3 and torch.utils.data.get_worker_info() is None
    (loading,) = batches.end_step()
    assert loading.workers == 3 and loading.core_seconds == 3 * loading.seconds > 0 and not batches.end_step()


def test_a_missing_folder_of_images_has_some(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    notes: list[str] = []
    with made_up_images(tmp_path / "made", notes.append):
        found = sorted((tmp_path / "absent").glob("**/*.png"))
        assert glob.glob(str(tmp_path / "absent" / "*.jpg")) and not list((tmp_path / "absent").glob("*.txt"))
        assert image.open(found[0]).size == (512, 512) and len(found) == 2_048
        names = os.listdir("absent/train_images")
        assert {"000000000001.jpg", "000000000001.png"} <= set(names) and len(names) == 4_096
        assert [entry.path for entry in os.scandir("absent/masks") if entry.is_file()][:1] == [
            "absent/masks/000000000001.jpg"
        ]
        assert (
            image.open("absent/train_images/000000000001.jpg").mode == "RGB"
            and image.open("absent/masks/000000000001.png").mode == "L"
        )
        with pytest.raises(FileNotFoundError):
            os.listdir("absent/checkpoints")
        with pytest.raises(FileNotFoundError):
            os.scandir("absent/runs")
    assert notes[0] == f"{tmp_path / 'absent'} is not there: 2,048 empty images of 512x512"


def test_numbered_images_have_the_sizes_of_their_annotations(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    notes: list[str] = []
    with made_up_images(tmp_path / "made", notes.append):
        for number in (1, 2, 3, 12, 2_000):
            wanted = size_of_image(name_of_image(number))
            assert image.open(f"absent/train2017/{number:012}.jpg").size == wanted
            assert image.open(f"absent/train2014/COCO_train2014_{number:012}.jpg").size == wanted
            assert image.open(f"absent/masks/{number:012}.png").size == wanted
        assert image.open("absent/train/street_1.png").size == image.open("absent/train/1.png").size == (640, 480)
    assert "images in absent/train2017 are not there: empty ones of COCO's sizes" in notes
    assert "images in absent/train are not there: empty ones of 640x480" in notes


@pytest.mark.parametrize("finds", ["create_reader", "create_parser"])
def test_timms_folder_of_images_is_made_up_by_either_name_of_its_reader(
    finds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL.Image")
    (tmp_path / "timm" / "data").mkdir(parents=True)
    for package in ("timm/__init__.py", "timm/data/__init__.py"):
        (tmp_path / package).touch()
    content = f"def {finds}(name, root, split='train', **kwargs):\n    return 'those of ' + name\n"
    (tmp_path / "timm" / "data" / "dataset.py").write_text(content, encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with made_up_images(tmp_path / "made", [].append):
        find = getattr(import_module("timm.data.dataset"), finds)
        found = find("", root=str(tmp_path / "absent"), split="train")
        assert len(found) == 1_281_167 and found[3][1] == 3 and found[3][0].read(2) == b"\xff\xd8"
        assert find("tfds/x", root="absent") == "those of tfds/x"
    for name in ("timm", "timm.data", "timm.data.dataset"):
        del sys.modules[name]


def test_images_of_torchvision_are_made_up_wherever_their_class_is_taken_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL.Image")
    package = tmp_path / "torchvision" / "datasets"
    package.mkdir(parents=True)
    (tmp_path / "torchvision" / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "from torchvision.datasets.cifar import CIFAR10, CIFAR100, ImageFolder\n", encoding="utf-8"
    )
    (package / "cifar.py").write_text(CIFAR, encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    notes: list[str] = []
    with made_up_images(tmp_path / "made", notes.append):
        module, datasets = import_module("torchvision.datasets.cifar"), import_module("torchvision.datasets")
        made_up = module.CIFAR100(str(tmp_path / "absent"), train=True)
        assert module.CIFAR100 is datasets.CIFAR100 and module.CIFAR10 is datasets.CIFAR10
        assert len(made_up) == 50_000 and made_up[101][0].size == (32, 32) and made_up[101][1] == 1
        folder = datasets.ImageFolder(str(tmp_path / "absent"))
        assert folder.loader(folder.samples[101][0]).size == (500, 375) and folder.samples is folder.samples
    assert len(notes) == 2 and "CIFAR100" in notes[0]
    assert module.CIFAR100.__bases__ == (module.CIFAR10,)  # undone
    for name in ("torchvision", "torchvision.datasets", "torchvision.datasets.cifar"):
        del sys.modules[name]


def test_an_old_timm_without_readers_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "timm" / "data"
    package.mkdir(parents=True)
    for file in (tmp_path / "timm" / "__init__.py", package / "__init__.py", package / "dataset.py"):
        file.write_text("CHANGED = False", encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with made_up_images(tmp_path / "made", lambda line: None):
        module = import_module("timm.data.dataset")
    for name in ("timm", "timm.data", "timm.data.dataset"):
        del sys.modules[name]
    assert not module.CHANGED


CIFAR = """
class CIFAR10:
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        raise RuntimeError("Dataset not found or corrupted.")
class ImageFolder:
    def __init__(self, root, transform=None, target_transform=None, loader=None):
        raise RuntimeError("Found no classes.")
class CIFAR100(CIFAR10):
    pass
"""
COCO = """
class COCO:
    def __init__(self, annotation_file=None):
        assert annotation_file is None
    def createIndex(self):
        self.images = {each["id"]: each["file_name"] for each in self.dataset["images"]}
    def getCatIds(self, catNms=[]):
        return [each["id"] for each in self.dataset["categories"]]
"""


def test_missing_annotations_have_objects_of_the_categories_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xtcocotools").mkdir()
    (tmp_path / "xtcocotools" / "coco.py").write_text(COCO, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    notes: list[str] = []
    with made_up_annotations(notes.append):
        found = import_module("xtcocotools.coco").COCO("absent.json")
        assert found.getCatIds(["person", "car"]) == [1, 2] and len(found.getCatIds()) == 80
        file = tmp_path / "person_keypoints_train2017.json"
        assert os.path.exists(file) and os.path.isfile(str(file)) and not os.path.exists("absent.json")
        persons = import_module("xtcocotools.coco").COCO(str(file))
    assert not os.path.exists(file)
    assert notes[0] == "absent.json is not there: 2,048 images with 7 objects each"
    names = {each["id"]: each["name"] for each in found.dataset["categories"]}
    assert (names[1], names[13], names[90], len(names)) == ("person", "stop sign", "toothbrush", 80)
    assert persons.getCatIds() == [1] and {each["category_id"] for each in persons.dataset["annotations"]} == {1}
    assert found.images[1] == "000000000001.jpg"
    sizes = {each["id"]: (each["width"], each["height"]) for each in found.dataset["images"]}
    assert len(set(sizes.values())) > 20  # as COCO's are
    for each in found.dataset["annotations"]:
        (wide, high), (left, top, width, height) = sizes[each["image_id"]], each["bbox"]
        assert 0.1 < width / wide < 0.15 and left + width <= wide
        assert 0.2 < height / high < 0.24 and top + height <= high
    # Four persons an image, four of seven with 11 key points of 17, two or more in every image.
    assert notes[1] == f"{file} is not there: 2,048 images with 4 objects each"
    visible = [each["num_keypoints"] for each in persons.dataset["annotations"]]
    assert len(visible) == 8_192 and sum(each > 0 for each in visible) == 4_681
    assert all(sum(each > 0 for each in visible[place : place + 4]) >= 2 for place in range(0, 8_192, 4))
    assert all(sum(each["keypoints"][2::3]) == 2 * each["num_keypoints"] for each in persons.dataset["annotations"])


def test_missing_recordings_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As data of torchaudio and as rows of the hub, whose feature is asked for another rate."""
    for name, content in (
        ("torchaudio/__init__.py", ""),
        ("torchaudio/datasets.py", "class YESNO:\n    def __init__(self, root, download=False): raise OSError(root)\n"),
        ("datasets/__init__.py", ""),
        ("datasets/features/__init__.py", ""),
        (
            "datasets/features/audio.py",
            "class Audio:\n    sampling_rate = 8_000\n    encode_example = decode_example = lambda self, value: value",
        ),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("datasets", "torchaudio")]:
        monkeypatch.delitem(sys.modules, name)
    notes: list[str] = []
    with made_up_sounds(notes.append):
        waves, rate, labels = import_module("torchaudio.datasets").YESNO("absent", download=True)[3]
        audio = import_module("datasets.features.audio").Audio()
        row = audio.encode_example({"bytes": Sound(2.0, 48_000).file(), "path": None})
        decoded = audio.decode_example(row)
        assert audio.decode_example({"bytes": b"other", "path": None})["bytes"] == b"other"
    assert (waves.shape, rate, len(labels)) == ((1, 50_400), 8_000, 8)
    assert decoded["array"].shape == (16_000,) and decoded.get_all_samples().sample_rate == 8_000
    assert "torchaudio's YESNO is not in absent" in notes[0]


def test_a_failure_for_want_of_a_network_is_told_as_that(tmp_path: Path) -> None:
    try:
        try:
            raise ConnectionError("no route to host")
        except ConnectionError as cause:
            raise RuntimeError("data set 'coco8' is not there") from cause
    except RuntimeError as error:
        assert "needs the network (data set 'coco8'" in str(told_missing(error, (), Hub(tmp_path)))
    assert told_missing(TimeoutError("no worker answered"), (), Hub(tmp_path)) is None


def test_rows_that_a_library_refuses_are_no_want_of_a_network(folder: Path) -> None:
    (folder / "refused.py").write_text(
        """
import datasets
def refused(*args, **kwargs):
    raise TypeError("no such feature in this version")
datasets.Dataset.from_dict = refused
datasets.load_dataset("glue", "sst2", split="train")
""",
        encoding="utf-8",
    )
    with pytest.raises(ModelError, match=r"refused.py:4.*the script failed with TypeError: no such feature"):
        predict(command=("python", "refused.py"), folder=folder, gpu="h100-sxm", data="synthetic")


def test_a_failure_on_made_up_data_names_them(folder: Path) -> None:
    (folder / "named.py").write_text(
        """
import os
classes = [name.split("_")[1] for name in os.listdir("pets/images")]
""",
        encoding="utf-8",
    )
    with pytest.raises(ModelError, match=r"named.py:3.*IndexError.*; pets/images is not there: .* \(made up: if"):
        predict(command=("python", "named.py"), folder=folder, gpu="h100-sxm", data="synthetic")


def test_a_file_that_a_program_of_a_package_looks_for_is_told_with_its_line(tmp_path: Path) -> None:
    frames = [traceback.FrameSummary(f"/opt/site-packages/titan/{each}.py", 7, "load") for each in ("train", "words")]
    told = told_missing(FileNotFoundError("no tokenizer in assets"), frames, Hub(tmp_path))
    assert str(told).startswith("titan/words.py:7: no tokenizer in assets; ")
    frames.insert(1, traceback.FrameSummary(str(tmp_path / "mine.py"), 3, "main"))
    told = told_missing(NotADirectoryError("no tokenizer in assets"), frames, Hub(tmp_path))
    assert str(told).startswith(f"{tmp_path / 'mine.py'}:3: no tokenizer in assets; ")


def test_a_library_is_patched_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_library.py").write_text("first = second = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with ExitStack() as stack:
        for name in ("first", "second"):
            stack.enter_context(patched_imports({"late_library": lambda module, name=name: [(module, name, 2)]}))
        late_library = import_module("late_library")
        assert late_library.first == late_library.second == 2
    assert late_library.first == late_library.second == 1


@pytest.fixture
def gpu() -> SeenGpu:
    return SeenGpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, 132, 50 << 20)


def test_the_gpu_has_random_numbers_memory_and_a_default_device(gpu: SeenGpu) -> None:
    with pretend_gpu(lambda: None, gpu):
        generator = torch.Generator("cuda")
        assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
        assert generator.manual_seed(1) is generator and generator.device.type == "cuda"
        assert torch.Generator().device.type == "cpu" and torch.Generator | None
        torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == torch.accelerator.max_memory_allocated() == 0
        properties = torch.cuda.get_device_properties(0)
        assert (properties.total_memory, properties.multi_processor_count) == (80 << 30, 132)
        torch.set_default_device("cuda")
        try:
            assert torch.zeros(2).device.type == "meta" and torch.get_default_device().type == "cuda"
        finally:
            torch.set_default_device(None)


def test_a_missing_logger_says_nothing_and_is_not_there_for_who_asks() -> None:
    with silent_loggers():
        neptune = import_module("neptune")
        neptune.init_run(project="mine")["loss"].append(1.0)
        first, second = neptune.init_run().pair()
        assert not first and not second and not list(neptune.init_run().rows())
        assert not import_module("torch.utils.tensorboard.summary").hparams({}, {})
        assert not neptune  # `if neptune and options.token:` goes the way of a machine without it


def test_nvidia_smi_answers_queries(gpu: SeenGpu, tmp_path: Path) -> None:
    with driver_tools(gpu, 2, tmp_path):
        asked = "nvidia-smi --query-gpu=index,name,memory.total --format=csv"
        lines = subprocess.run(asked, shell=True, capture_output=True, text=True, check=True).stdout.splitlines()
        short = subprocess.check_output(asked + ",noheader,nounits -i 1", shell=True, text=True).splitlines()
    assert lines == [
        "index, name, memory.total [MiB]",
        "0, NVIDIA H100 80GB HBM3, 81920 MiB",
        "1, NVIDIA H100 80GB HBM3, 81920 MiB",
    ]
    assert short == ["1, NVIDIA H100 80GB HBM3, 81920"]


SHARDS = """
import glob
from pathlib import Path

import numpy as np
import torch

files = [Path(name) for name in sorted(glob.glob("data/fineweb_train_*.bin"))]
assert files, "no shards"
header = torch.from_file(str(files[0]), False, 256, dtype=torch.int32)
assert header[:2].tolist() == [20240520, 1]
tokens = torch.empty(int(header[2]), dtype=torch.uint16)
with files[0].open("rb", buffering=0) as file:
    file.seek(256 * 4)
    assert file.readinto(tokens.numpy()) == 2 * len(tokens)
with open(next(Path("data").glob("fineweb_val_*.bin")), "rb") as file:
    assert np.frombuffer(file.read(256 * 4), dtype=np.int32)[2] == len(tokens)
ends = (tokens == 50256).nonzero().flatten()
assert 600 < len(tokens) / len(ends) < 800 and ends.diff().min() > 1
model = torch.nn.Embedding(50257, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for number in range(100):
    model(tokens[number * 64 : (number + 1) * 64].int().cuda()).sum().backward()
    optimizer.step()
"""


def test_files_of_tokens_that_a_pattern_does_not_find(tmp_path):
    (tmp_path / "train.py").write_text(SHARDS, encoding="utf-8")
    found = predict(command=["python", "train.py"], gpu="l40s", folder=tmp_path, data="synthetic")
    assert [note for note in found.notes if "fineweb_train_000001.bin is not there: 33,554,432 tokens" in note]
    told = r"train.py:9: AssertionError: no shards; it had found no file by data/fineweb_train_\*.bin: give --data"
    with pytest.raises(ModelError, match=told):
        predict(command=["python", "train.py"], gpu="l40s", folder=tmp_path)
    assert not (tmp_path / "data").exists()
