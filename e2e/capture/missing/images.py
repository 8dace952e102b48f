"""Images that are not there, of torchvision's data sets, of folders and by their names; torchvision and torchaudio
beside a PyTorch without a GPU.
"""

from __future__ import annotations

import builtins
import glob
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from e2e.capture.cuda_packages import torchvision_operators
from e2e.capture.imports import Patches, patched_imports
from e2e.capture.missing.arrays import is_missing
from e2e.capture.stand_ins import Note


@contextmanager
def libraries_for_cuda() -> Iterator[None]:
    """Context in which a torchvision or torchaudio built for CUDA can be imported beside a PyTorch without it: its
    library does not load there, and its operators are stood in for.
    """
    spec = importlib.util.find_spec("torchvision")
    with ExitStack() as stack:
        if spec is not None and spec.origin is not None and not _loads(Path(spec.origin).parent.glob("_C*.so")):
            library = stack.enter_context(torch.library._scoped_library("torchvision", "DEF"))
            torchvision_operators.define_operators(library)
            patches: dict[str, Patches] = {
                "torchvision.extension": lambda module: [(module, "_assert_has_ops", lambda: None)],
                "torchvision.ops.roi_align": torchvision_operators.patches,
            }
            stack.enter_context(patched_imports(patches))
        stack.enter_context(patched_imports({"torchaudio._extension.utils": _without_library}))
        yield


def _without_library(module: Any) -> Iterator[tuple[Any, str, Any]]:
    load = module._load_lib

    def load_if_possible(library: str) -> bool:
        try:
            return bool(load(library))
        except OSError:
            return False  # as if it were not there, which torchaudio takes

    yield module, "_load_lib", load_if_possible


def _loads(libraries: Iterable[Path]) -> bool:
    try:
        for library in libraries:
            torch.ops.load_library(library)
    except OSError:
        return False
    return True


@contextmanager
def made_up_images(folder: Path, note: Note) -> Iterator[None]:
    """Context in which data sets of torchvision that are not there have empty images, and so has a folder that is not
    there and is listed or searched by a pattern such as ``*.png``; an image that is opened and not there is empty.
    ``folder``: place for files.
    """

    def instead(path: Any) -> Any:
        """Return ``path``, or an empty image of its form if it is that of an image that is not there."""
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not isinstance(name, str) or not _IMAGE.search(name) or not is_missing(name):
            return path
        mode = "L" if _CLASSES.search(name) else "RGB"  # its values are classes, or colours
        size = size_of_image(name)
        wide, high = size
        file = folder / f"{mode}{wide}x{high}{Path(name).suffix.lower()}"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            import_module("PIL.Image").new(mode, size).save(file)
        how = "COCO's sizes" if _NUMBERED.search(name) else f"{wide}x{high}"
        note(f"images in {os.path.dirname(name) or '.'} are not there: empty ones of {how}")
        return str(file)

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*given: Any, **named: Any) -> Any:
            return original(*map(instead, given), **{name: instead(value) for name, value in named.items()})

        return read

    def opening(original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return original(instead(file) if mode == "rb" else file, mode, *args, **kwargs)

        return opened

    def timm_reader(module: Any) -> Iterator[tuple[Any, str, Any]]:
        # By its name from timm 0.8 on, from 0.4 on, and before.
        known = next((name for name in ("create_reader", "create_parser") if hasattr(module, name)), None)
        if known is None:
            return
        original = getattr(module, known)

        def create_reader(name: Any, root: Any = None, *args: Any, **kwargs: Any) -> Any:
            if name or not is_missing(root):
                return original(name, root, *args, **kwargs)
            return _NumberedImages(str(root), instead)

        yield module, known, create_reader

    readers: dict[str, Patches] = {
        "timm.data.dataset": timm_reader,
        "cv2": lambda module: [(module, "imread", reading(module.imread))],
        "torchvision.io.image": lambda module: [(module, "read_file", reading(module.read_file))],
    }
    with ExitStack() as stack:
        stack.enter_context(patched_imports({"torchvision.datasets": lambda module: _image_datasets(module, note)}))
        stack.enter_context(patched_imports(readers))
        for owner, name in ((Path, "glob"), (Path, "rglob"), (glob, "glob"), (glob, "iglob")):
            stack.enter_context(patch.object(owner, name, _search(getattr(owner, name), folder / "found", note)))
        for owner, name, value in (
            (builtins, "open", opening(open)), (io, "open", opening(io.open)),
            (os, "listdir", _list(os.listdir, note, lambda path, name: name)),
            (os, "scandir", _list(os.scandir, note, ListedImage)),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        yield


_IMAGE = re.compile(r"\.(jpe?g|png|webp|bmp|tiff?)$", re.IGNORECASE)
# Paths of images whose values are classes, and of folders that have images, in their last two parts.
_CLASSES = re.compile(r"label|mask|annot|segm|gtfine", re.IGNORECASE)
_OF_IMAGES = re.compile(r"(image|img|photo|picture|jpeg|frame|train|val|test|label|mask|annot)[^/]*(/[^/]+)?/?$", re.I)
# Size of an image that is opened by its name, unless that is a number as COCO's are: these have the sizes of 53 images
# of COCO in turn (val2017, in its order). Programs pad those of a batch to the largest and wait for the rank that has
# the largest, so that a step takes more time than one of images of the mean size.
_NAMED_SIZE = (640, 480)
_NUMBERED = re.compile(r"(?:^|[/_\\])(\d{12})\.[a-z]+$", re.IGNORECASE)
_COCO_SIZES = (
    "640x427 640x426 640x427 333x500 640x480 640x480 640x480 640x480 612x612 640x358 640x480 640x427 480x640 457x640 "
    "640x428 500x333 640x423 478x640 640x457 640x480 640x427 424x640 640x480 428x640 640x427 474x640 500x375 640x480 "
    "640x480 470x640 500x334 427x640 640x304 640x427 480x640 640x428 640x480 640x464 375x500 500x375 640x424 640x559 "
    "640x480 640x427 640x480 640x414 640x480 383x640 640x406 640x313 640x480 478x640 640x480"
)


class ListedImage:
    """Entry of a folder of images that is not there."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return True."""
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return False."""
        return False

    is_symlink = is_dir


class _NumberedImages:
    """Images of a folder that is not there, as timm reads them."""

    def __init__(self, root: str, instead: Callable[[Any], Any]) -> None:
        self.root, self._instead, self.class_to_idx = root, instead, {str(number): number for number in range(1_000)}

    def __len__(self) -> int:
        return _IMAGES["ImageNet"][3]

    def __getitem__(self, place: int) -> tuple[Any, int]:
        return open(self._instead(self.filename(place)), "rb"), place % 1_000

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """Return the name of an image."""
        return f"{self.root}/{index}.jpg"


class _Listing(list):  # type: ignore[type-arg]
    """Entries of a folder, which can be closed as those of ``os.scandir``."""

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def close(self) -> None:
        """Close nothing."""


def name_of_image(number: int, form: str = "jpg") -> str:
    """Return the name of an image in a folder and in annotations, as COCO names them."""
    return f"{number:012}.{form}"


def size_of_image(name: str) -> tuple[int, int]:
    """Return width and height of the image that stands for ``name``."""
    found = _NUMBERED.search(name)
    if found is None:
        return _NAMED_SIZE
    sizes = _COCO_SIZES.split()
    wide, high = sizes[int(found.group(1)) % len(sizes)].split("x")
    return int(wide), int(high)


def _list(original: Any, note: Note, entry: Callable[[str, str], Any]) -> Any:
    """Return a function that lists a folder, with images in one that is not there and has a name of images."""

    def listed(path: Any = ".") -> Any:
        if not is_missing(path) or not _OF_IMAGES.search(os.fspath(path)):
            return original(path)
        note(f"{os.fspath(path)} is not there: {_FILES:,} images, each as .jpg and .png")
        names = (name_of_image(number, form) for number in range(1, _FILES + 1) for form in ("jpg", "png"))
        return _Listing(entry(os.fspath(path), name) for name in names)

    return listed


# Images in a folder that is not there, and their size.
_FILES, _SIZE = 2_048, (512, 512)
_IMAGE_PATTERN = re.compile(r"\*\.(jpe?g|png|webp|bmp|tiff?)$", re.IGNORECASE)


def _search(original: Any, folder: Path, note: Note) -> Any:
    def search(*given: Any, **options: Any) -> Any:
        if not given:
            return original(**options)
        pattern = str(given[-1])
        searched = Path(*given[:-1], re.split(r"[*?\[]", pattern)[0])
        if not _IMAGE_PATTERN.search(pattern) or searched.exists():
            return original(*given, **options)
        kind = type(given[0])
        if not folder.exists():
            folder.mkdir(parents=True)
            import_module("PIL.Image").new("RGB", _SIZE).save(folder / "0.png")
            for number in range(1, _FILES):
                (folder / f"{number}.png").symlink_to(folder / "0.png")
        note(f"{searched} is not there: {_FILES:,} empty images of {_SIZE[0]}x{_SIZE[1]}")
        return [kind(folder / f"{number}.png") for number in range(_FILES)]

    return search


# torchvision's data: mode and size of an image, classes (0: of each pixel), images of the training part.
_IMAGES: dict[str, tuple[str, tuple[int, int], int, int]] = {
    "MNIST": ("L", (28, 28), 10, 60_000),
    "FashionMNIST": ("L", (28, 28), 10, 60_000),
    "KMNIST": ("L", (28, 28), 10, 60_000),
    "EMNIST": ("L", (28, 28), 47, 112_800),
    "CIFAR10": ("RGB", (32, 32), 10, 50_000),
    "CIFAR100": ("RGB", (32, 32), 100, 50_000),
    "SVHN": ("RGB", (32, 32), 10, 73_257),
    "STL10": ("RGB", (96, 96), 10, 5_000),
    "ImageFolder": ("RGB", (500, 375), 1_000, 1_281_167),
    "ImageNet": ("RGB", (500, 375), 1_000, 1_281_167),
    "Flowers102": ("RGB", (500, 667), 102, 1_020),
    "OxfordIIITPet": ("RGB", (500, 375), 37, 3_680),
    "Food101": ("RGB", (512, 512), 101, 75_750),
    "CelebA": ("RGB", (178, 218), 10_177, 162_770),
    "VOCSegmentation": ("RGB", (500, 375), 0, 1_464),
    "SBDataset": ("RGB", (500, 375), 0, 8_498),
    "LSUN": ("RGB", (256, 256), 10, 3_033_042),
}


def _image_datasets(datasets: Any, note: Note) -> Iterator[tuple[Any, str, Any]]:
    """Yield classes of images that are made up if their folder is not there; transformations run on them as on real
    ones. Programs take a class from the package, or from the module that defines it.
    """
    for name, form in _IMAGES.items():
        original = getattr(datasets, name, None)
        if original is not None:
            pictures = _pictures(original, name, form, note)
            for module in {datasets.__name__, original.__module__}:
                yield sys.modules[module], name, pictures


def _pictures(original: Any, name: str, form: tuple[str, tuple[int, int], int, int], note: Note) -> Any:
    mode, size, classes, length = form

    arguments = signature(original.__init__)

    class Pictures(original):  # type: ignore[misc]
        def __init__(self, root: Any, *args: Any, **kwargs: Any) -> None:
            self.made_up = False
            if os.path.exists(root):
                try:
                    super().__init__(root, *args, **kwargs)
                    return
                except (RuntimeError, OSError):  # it has other data, and these cannot be downloaded
                    pass
            self.made_up = True
            given = arguments.bind(self, root, *args, **kwargs).arguments
            given.update(given.pop("kwargs", {}))
            tested = given.get("train") is False or given.get("split") in ("val", "valid", "test")
            self.length = min(length, 10_000) if tested else length
            note(f"torchvision's {name} is not in {root}: {self.length:,} empty images of {size[0]}x{size[1]}")
            self.root, self.transform, self.transforms = root, given.get("transform"), given.get("transforms")
            self.target_transform = given.get("target_transform")
            self.classes = [str(number) for number in range(classes)]

        def __getattr__(self, attribute: str) -> Any:
            if attribute == "class_to_idx":
                return {each: number for number, each in enumerate(self.classes)}
            if attribute == "targets":
                return torch.arange(self.length) % classes if mode == "L" else [n % classes for n in range(self.length)]
            if attribute == "data":  # takes memory where it is read only
                if mode == "L":
                    return torch.zeros((self.length, *reversed(size)), dtype=torch.uint8)
                return import_module("numpy").zeros((self.length, *reversed(size), 3), "uint8")
            if attribute in ("samples", "imgs"):  # kept: programs take one at a time
                self.samples = self.imgs = [(f"{self.root}/{n}.png", n % classes) for n in range(self.length)]
                return self.samples
            if attribute == "loader":
                return lambda path: import_module("PIL.Image").new(mode, size)
            raise AttributeError(f"{name} has no attribute {attribute!r}")

        def __len__(self) -> int:
            return self.length if self.made_up else super().__len__()

        def __getitem__(self, place: int) -> Any:
            if not self.made_up:
                return super().__getitem__(place)
            if not 0 <= place < self.length:
                raise IndexError(place)
            picture = import_module("PIL.Image").new
            image, target = picture(mode, size), place % classes if classes else picture("L", size)
            if self.transforms is not None:
                return self.transforms(image, target)
            if self.transform is not None:
                image = self.transform(image)
            return image, target if self.target_transform is None else self.target_transform(target)

    Pictures.__name__ = Pictures.__qualname__ = name
    return Pictures
