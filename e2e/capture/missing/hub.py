"""The Hugging Face hub without a network: its cache on this machine, and beside it the configurations that this project
knows by name (:mod:`e2e.capture.models.configurations`), written as files where the libraries look for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from e2e.capture.imports import patched_imports
from e2e.capture.models.configurations import published, published_parts

# Commit of what is made up.
_COMMIT = "0" * 40
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

# What prepares images and sound, by the model's type: settings that differ from the defaults of their class.
_PREPARED: dict[str, dict[str, Any]] = {
    "vit": {"image_processor_type": "ViTImageProcessor"},
    "resnet": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}},
    "convnext": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}},
    "swin": {"image_processor_type": "ViTImageProcessor"},
    "clip": {"image_processor_type": "CLIPImageProcessor", "processor_class": "CLIPProcessor"},
    "wav2vec2": {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "processor_class": "Wav2Vec2Processor"},
    "hubert": {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "processor_class": "Wav2Vec2Processor"},
    "whisper": {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor"},
}


@dataclass
class Hub:
    """Cache of the hub, in ``folder``: what this machine has, and what is added on demand."""

    folder: Path
    # True if data that are not here are made up.
    made_up: bool = False
    # Names that were asked for and are neither in the cache nor known.
    unknown: list[str] = field(default_factory=list)
    # Checkpoints that were asked for and are not there.
    states: list[str] = field(default_factory=list)
    # Patterns by which the program found no file.
    searched: list[str] = field(default_factory=list)
    # What is said of the data that were made up last.
    stood_in: str = ""

    def link(self, cache: Path) -> None:
        """Show the repositories of the machine's own ``cache`` too."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if cache.is_dir():
            for entry in cache.iterdir():
                if not (self.folder / entry.name).exists():
                    (self.folder / entry.name).symlink_to(entry)

    def add(self, name: str, repo_type: str | None = None) -> None:
        """Add the model with this name, unless it is there; remember a name that is not known."""
        if os.path.isdir(name):
            return
        place = self.folder / f"{repo_type or 'model'}s--{name.replace('/', '--')}"
        if place.exists():
            return
        config, parts = published(name), published_parts(name)
        if repo_type not in (None, "model") or (config is None and not parts):
            if name not in self.unknown:
                self.unknown.append(name)
            return
        files = {f"{folder}/{_file_of(folder)}": part for folder, part in parts.items()}
        if parts:
            files["model_index.json"] = {"_class_name": "StableDiffusionPipeline"}
        if config is not None:
            files["config.json"] = {**_architecture(config["model_type"]), **config}
            if config["model_type"] in _PREPARED:
                files["preprocessor_config.json"] = _PREPARED[config["model_type"]]
        snapshot = place / "snapshots" / _COMMIT
        for file, content in files.items():
            (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / file).write_text(json.dumps(content), encoding="utf-8")
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(_COMMIT, encoding="utf-8")

    def snapshot(self, name: str) -> Path | None:
        """Return the folder of a model's files: ``name`` itself, or that in the cache; None if there is none."""
        if os.path.isdir(name):
            return Path(name)
        self.add(name)
        found = sorted((self.folder / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
        return found[-1] if found else None

    def file(self, name: str, file: str) -> str:
        """Return where a file of a model would be that is not there, such as its weights."""
        return str(self.folder / f"models--{name.replace('/', '--')}" / file)

    def config(self, name: str) -> Mapping[str, Any]:
        """Return the configuration of a model; an empty one if there is none."""
        found = self.snapshot(name)
        if found is None or not (found / "config.json").is_file():
            return {}
        config = json.loads((found / "config.json").read_text(encoding="utf-8"))
        return config if isinstance(config, dict) else {}


def _architecture(kind: str) -> Mapping[str, Any]:
    """Return the class of the published models of this type: that of its pretraining, as Transformers has it."""
    try:
        automatic = import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        return {}
    for task in ("CAUSAL_LM", "PRETRAINING", "IMAGE_CLASSIFICATION"):
        names = getattr(automatic, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        if isinstance(names.get(kind), str):
            return {"architectures": [names[kind]]}
    return {}


def _file_of(folder: str) -> str:
    return "scheduler_config.json" if folder == "scheduler" else "config.json"


# Endings of files with weights.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")


@contextmanager
def offline_hub(hub: Hub) -> Iterator[None]:
    """Context in which the libraries of the hub find what ``hub`` has, and use no network."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub.link(Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"))
    with patch.dict(os.environ, {**_OFFLINE, "HF_HUB_CACHE": str(hub.folder)}), patched_imports(_patches(hub)):
        yield


def _patches(hub: Hub) -> Mapping[str, Any]:
    def one_file(module: Any) -> Iterator[tuple[Any, str, Any]]:
        download = module.hf_hub_download

        def hf_hub_download(repo_id: str, filename: str, **options: Any) -> Any:
            weights = options.get("repo_type") in (None, "model") and filename.endswith(WEIGHTS)
            if not weights:
                hub.add(repo_id, options.get("repo_type"))
            try:
                return download(repo_id, filename, **options)
            except Exception:
                if weights:  # nobody needs their values
                    return hub.file(repo_id, filename)
                raise

        yield module, "hf_hub_download", hf_hub_download

    def all_files(module: Any) -> Iterator[tuple[Any, str, Any]]:
        download = module.snapshot_download

        def snapshot_download(repo_id: str, **options: Any) -> Any:
            hub.add(repo_id, options.get("repo_type"))
            return download(repo_id, **options)

        yield module, "snapshot_download", snapshot_download

    return {"huggingface_hub.file_download": one_file, "huggingface_hub._snapshot_download": all_files}
