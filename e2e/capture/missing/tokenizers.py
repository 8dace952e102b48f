"""Tokenizers that are not there, of the vocabulary of their model: one token for four characters of any text, as long
as a model's own tokens of English are in the mean, so that shapes are about those of the real text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from costmodel.base.errors import ModelError
from e2e.capture.imports import patched_imports
from e2e.capture.missing.hub import Hub
from e2e.capture.stand_ins import Note

CHARACTERS = 4
_WORD = "word"

# Special tokens by the model's type: their text and place in the vocabulary; a negative place counts from its end.
_BERT = {"pad_token": ("[PAD]", 0), "unk_token": ("[UNK]", 100), "cls_token": ("[CLS]", 101),
         "sep_token": ("[SEP]", 102), "mask_token": ("[MASK]", 103)}  # fmt: skip
_ROBERTA = {"bos_token": ("<s>", 0), "pad_token": ("<pad>", 1), "eos_token": ("</s>", 2), "unk_token": ("<unk>", 3),
            "cls_token": ("<s>", 0), "sep_token": ("</s>", 2), "mask_token": ("<mask>", -1)}  # fmt: skip
_T5 = {"pad_token": ("<pad>", 0), "eos_token": ("</s>", 1), "unk_token": ("<unk>", 2)}
_GPT2 = {"bos_token": ("<|endoftext|>", -1), "eos_token": ("<|endoftext|>", -1), "unk_token": ("<|endoftext|>", -1)}
_LLAMA_2 = {"unk_token": ("<unk>", 0), "bos_token": ("<s>", 1), "eos_token": ("</s>", 2)}
_LLAMA_3 = {"bos_token": ("<|begin_of_text|>", 128000), "eos_token": ("<|end_of_text|>", 128001)}
_QWEN = {"pad_token": ("<|endoftext|>", 151643), "eos_token": ("<|im_end|>", 151645)}
_GEMMA = {"pad_token": ("<pad>", 0), "eos_token": ("<eos>", 1), "bos_token": ("<bos>", 2), "unk_token": ("<unk>", 3)}
_CLIP = {"bos_token": ("<|startoftext|>", -2), "eos_token": ("<|endoftext|>", -1), "pad_token": ("<|endoftext|>", -1),
         "unk_token": ("<|endoftext|>", -1)}  # fmt: skip
_WAV2VEC2 = {"pad_token": ("<pad>", 0), "bos_token": ("<s>", 1), "eos_token": ("</s>", 2), "unk_token": ("<unk>", 3)}
_WHISPER = {**dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), ("<|endoftext|>", 50257)),
            "cls_token": ("<|startoftranscript|>", 50258), "mask_token": ("<|en|>", 50259),
            "sep_token": ("<|notimestamps|>", 50363)}  # fmt: skip
_SPECIAL: dict[str, dict[str, tuple[str, int]]] = {
    **dict.fromkeys(("bert", "distilbert", "mpnet", "deberta-v2", "albert", "electra"), _BERT),
    **dict.fromkeys(("roberta", "xlm-roberta", "bart", "mbart"), _ROBERTA),
    **dict.fromkeys(("t5", "mt5", "switch_transformers"), _T5),
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3"), _LLAMA_2),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), _QWEN),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
    **dict.fromkeys(("clip", "clip_text_model"), _CLIP),
    "opt": {"pad_token": ("<pad>", 1), "bos_token": ("</s>", 2), "eos_token": ("</s>", 2), "unk_token": ("</s>", 2)},
    **dict.fromkeys(("wav2vec2", "hubert"), _WAV2VEC2),
    "whisper": _WHISPER,
}
# Tokens before and after a text, and between two of a pair.
_TEMPLATES = {
    "[CLS]": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "<s></s>": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "</s>": ("$A </s>", "$A </s> $B </s>"),
    "<s>": ("<s> $A", "<s> $A <s> $B"),
    "<bos>": ("<bos> $A", "<bos> $A <bos> $B"),
    "<|begin_of_text|>": ("<|begin_of_text|> $A", "<|begin_of_text|> $A <|begin_of_text|> $B"),
    "<|startoftranscript|>": (
        "<|startoftranscript|> <|en|> <|en|> <|notimestamps|> $A <|endoftext|>",
        "<|startoftranscript|> <|en|> <|en|> <|notimestamps|> $A $B <|endoftext|>",
    ),
    "<|startoftext|>": ("<|startoftext|> $A <|endoftext|>", "<|startoftext|> $A $B <|endoftext|>"),
}
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LARGE = 100_000  # a vocabulary of Llama 3's kind


def _special_tokens(config: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    size = _vocabulary(config)
    kind = str(config.get("model_type", ""))
    tokens = _LLAMA_3 if kind in ("llama", "mistral") and size > _LARGE else _SPECIAL.get(kind, _GPT2)
    return {name: (text, place % size) for name, (text, place) in tokens.items()}


def _vocabulary(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    found = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    if found is not None:
        return int(found)
    return _DEFAULT_SIZES.get(str(config.get("model_type", "")), 32000)


# Vocabularies of the published models of a type, where their configuration leaves them out.
_DEFAULT_SIZES = {
    "bert": 30522, "distilbert": 30522, "gpt2": 50257, "t5": 32128, "opt": 50272, "bart": 50265, "clip": 49408,
    "clip_text_model": 49408, "albert": 30000, "gpt_neo": 50257, "gptj": 50400, "phi": 51200, "phi3": 32064,
    "gemma": 256000, "gemma2": 256000, "falcon": 65024, "wav2vec2": 32, "hubert": 32, "whisper": 51865, "xlnet": 32000,
    "switch_transformers": 32128, "qwen3_moe": 151936, "nemotron": 256000,
}  # fmt: skip


def write_tokenizer(config: Mapping[str, Any], folder: Path) -> int:
    """Write the files of a tokenizer for the model of ``config`` to ``folder``; return the size of its vocabulary."""
    size, special = _vocabulary(config), _special_tokens(config)
    texts = {place: text for text, place in special.values()}
    vocabulary = {texts.get(place, f"{_WORD}{place}"): place for place in range(size)}
    # Every piece of a text is the same ordinary word, which is no special token, so that it may be masked.
    common = next(text for text, place in reversed(vocabulary.items()) if place not in texts)
    kind = next((key for key in _TEMPLATES if _fits(key, special, str(config.get("model_type", "")))), None)
    added = [
        {"id": place, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for place, text in sorted(texts.items())
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": rf"[\s\S]{{1,{CHARACTERS}}}"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None if kind is None else _processor(_TEMPLATES[kind], vocabulary),
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": common},
    }
    longest = config.get("max_position_embeddings") or config.get("n_positions") or 1 << 20
    if str(config.get("model_type")) in ("roberta", "xlm-roberta", "mpnet"):
        longest = 512  # its positions begin at 2
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 77 if kind == "<|startoftext|>" else longest,
        "chat_template": _CHAT,
        "model_input_names": ["input_ids", *(["token_type_ids"] if kind == "[CLS]" else []), "attention_mask"],
        **{name: text for name, (text, _) in special.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return size


def _fits(template: str, special: Mapping[str, tuple[str, int]], kind: str) -> bool:
    texts = {text for text, _ in special.values()}
    if template == "</s>":
        return kind in ("t5", "mt5", "switch_transformers")
    if template == "<s></s>":
        return "<mask>" in texts
    return template in texts and kind not in ("wav2vec2", "hubert")


def _processor(templates: tuple[str, str], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    def piece(word: str) -> dict[str, Any]:
        name, _, kind = word.partition(":")
        what = {"id": name.removeprefix("$"), "type_id": int(kind or 0)}
        return {"Sequence" if name.startswith("$") else "SpecialToken": what}

    single, pair = ([piece(word) for word in template.split()] for template in templates)
    names = {each["SpecialToken"]["id"] for each in (*single, *pair) if "SpecialToken" in each}
    tokens = {name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]} for name in sorted(names)}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


@contextmanager
def made_up_tokenizers(hub: Hub, folder: Path, note: Note) -> Iterator[None]:
    """Context in which tokenizers that are not on this machine are made up in ``folder``."""
    patches = {
        "transformers.tokenization_utils_base": lambda module: _classes(module, hub, folder, note),
        "transformers.models.auto.tokenization_auto": lambda module: _classes(module, hub, folder, note),
        "tiktoken.registry": lambda module: _tiktoken(module, note),
        "sentencepiece": _sentencepiece,
    }
    with patched_imports(patches):
        yield


# Files by which a tokenizer is known.
_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "tokenizer_config.json", "tekken.json")


def _made(hub: Hub, name: Any, subfolder: str, folder: Path, note: Note) -> Path | None:
    """Return the folder of the tokenizer of the model ``name``, made up now; None if its own is here, or if its model
    is not known.
    """
    snapshot = hub.snapshot(os.fspath(name))
    if snapshot is None or any(any((snapshot / subfolder).glob(file)) for file in _FILES):
        return None
    config = hub.config(os.fspath(name)) or hub.config(str(snapshot / "text_encoder"))
    if not config:
        return None
    place = folder / re.sub(r"\W+", "-", os.fspath(name)).strip("-")
    if not (place / "tokenizer.json").exists():
        size = write_tokenizer(config, place)
        (place / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        note(f"{name}: its tokenizer is not here: one token of {size:,} for {CHARACTERS} characters of any text")
    return place


# Arguments that say where the files are.
_PLACE = ("subfolder", "revision", "cache_dir", "token", "use_auth_token", "force_download", "local_files_only")


def _classes(module: Any, hub: Hub, folder: Path, note: Note) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of a module's classes that have ``from_pretrained``: the base of all tokenizers, or that which
    chooses one of them.
    """
    owner = module.AutoTokenizer if hasattr(module, "AutoTokenizer") else module.PreTrainedTokenizerBase
    original = owner.__dict__["from_pretrained"].__func__

    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        place = _made(hub, name, kwargs.get("subfolder") or "", folder, note)
        if place is None:
            return original(cls, name, *args, **kwargs)
        fast = import_module("transformers").PreTrainedTokenizerFast
        tokenizer = fast.from_pretrained(str(place), **_settings(kwargs))
        tokenizer.name_or_path = str(name)
        return tokenizer

    yield owner, "from_pretrained", classmethod(from_pretrained)


def _settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    left = (*_PLACE, "trust_remote_code", "use_fast", "config", "tokenizer_type", "_from_auto", "_commit_hash")
    return {name: value for name, value in kwargs.items() if name not in left}


class Encoding:
    """Tokenizer as those of tiktoken."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.n_vocab, self.max_token_value = name, size, size - 1
        self.eot_token = size - 1
        self.special_tokens_set = {"<|endoftext|>"}

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return one token for every few characters."""
        return [sum(map(ord, text[at : at + CHARACTERS])) % self.eot_token for at in range(0, len(text), CHARACTERS)]

    encode_ordinary = encode

    def encode_batch(self, texts: Any, **options: Any) -> list[list[int]]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    encode_ordinary_batch = encode_batch

    def encode_single_token(self, text: str) -> int:
        """Return the token of a special one, or of a short text."""
        return self.eot_token if text in self.special_tokens_set else self.encode(text)[0]

    def decode(self, tokens: Any, **options: Any) -> str:
        """Return a text of the right length."""
        return _WORD * len(tokens)

    def decode_batch(self, batch: Any, **options: Any) -> list[str]:
        """Return a text for each list of tokens."""
        return [self.decode(tokens) for tokens in batch]


_TIKTOKEN = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}


def _tiktoken(module: Any, note: Note) -> Iterator[tuple[Any, str, Any]]:
    get = module.get_encoding

    def get_encoding(encoding_name: str) -> Any:
        try:
            return get(encoding_name)
        except Exception:
            if encoding_name not in _TIKTOKEN:
                raise
        size = _TIKTOKEN[encoding_name]
        note(f"tiktoken's {encoding_name} is not here: one token of {size:,} for {CHARACTERS} characters of any text")
        return Encoding(encoding_name, size)

    yield module, "get_encoding", get_encoding


def _sentencepiece(module: Any) -> Iterator[tuple[Any, str, Any]]:
    made = module.SentencePieceProcessor.__init__
    load = module.SentencePieceProcessor.Load

    def missing(file: Any) -> ModelError:
        return ModelError(f"{file}: the tokenizer of sentencepiece is not here; put one of that form there")

    def construct(self: Any, model_file: Any = None, *args: Any, **kwargs: Any) -> None:
        if model_file is not None and not os.path.exists(model_file):
            raise missing(model_file)
        made(self, model_file, *args, **kwargs)

    def load_file(self: Any, model_file: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model_file is not None and not os.path.exists(model_file):
            raise missing(model_file)
        return load(self, model_file, *args, **kwargs)

    yield module.SentencePieceProcessor, "__init__", construct
    yield module.SentencePieceProcessor, "Load", load_file
    yield module.SentencePieceProcessor, "load", load_file
