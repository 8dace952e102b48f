"""Imports of CUDA packages by a program: a finder that makes their stand-ins, and what is said about others.

A stand-in precedes a package that is installed: without a GPU it cannot run. A package that is not installed is stood
in for where the program itself imports it, not where a library merely looks whether it is there
(:data:`ASKED_BY_LIBRARIES` are those that libraries import only if the program asked for them).
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch

from costmodel.base.errors import ModelError
from e2e.capture import imports
from e2e.capture.cuda_packages.image_filters import EXTENSIONS
from e2e.capture.imports import Patches, patched_imports
from e2e.capture.script_lines import library_folder
from e2e.capture.stand_ins import Silent

Note = Callable[[str], None]

# Package -> the module here that stands in for it, and the version that it says it has.
PACKAGES: dict[str, tuple[str, str]] = {
    "flash_attn": ("flash_attention", "2.8.3"),
    "flash_attn_interface": ("flash_attention", "3.0.0"),
    "dropout_layer_norm": ("flash_attention", "2.8.3"),
    "rotary_emb": ("flash_attention", "2.8.3"),
    "xentropy_cuda_lib": ("flash_attention", "2.8.3"),
    "xformers": ("xformers", "0.0.32"),
    "apex": ("apex", "0.1"),
    "amp_C": ("apex", "0.1"),
    "apex_C": ("apex", "0.1"),
    "fused_weight_gradient_mlp_cuda": ("apex", "0.1"),
    "transformer_engine": ("transformer_engine", "2.8.0"),
    "mamba_ssm": ("state_spaces", "2.2.5"),
    "causal_conv1d": ("state_spaces", "1.5.2"),
    "grouped_gemm": ("grouped_products", "0.3.0"),
    "bitsandbytes": ("bitsandbytes", "0.48.0"),
    "kernels": ("kernels_hub", "0.10.0"),
    "triton": ("triton_language", "3.4.0"),
}
# Those that run without CUDA where they are installed.
_RUN_AS_INSTALLED = ("bitsandbytes", "kernels", "triton")
# Stand-ins whose other modules and names are there too, and do nothing.
_ANYTHING = ("triton",)
ASKED_BY_LIBRARIES = (
    *("flash_attn", "flash_attn_interface", "xformers", "bitsandbytes", "transformer_engine", "triton"),
    "fused_weight_gradient_mlp_cuda",
)
# Libraries that import such packages to see whether they are there, and do without them if not.
LOOK_BY_IMPORTING = ("torch",)
# Libraries that lie beside a program as a checkout, too.
_CHECKED_OUT = ("megatron",)
# Packages of pure Python, whose kernels are launched through Triton: they run as they are if they are installed.
INSTALLABLE = {
    "liger_kernel": "liger-kernel",
    "fla": "flash-linear-attention",
    "torchao": "torchao",
    "cut_cross_entropy": "cut-cross-entropy",
    "quack": "quack-kernels",
}
# Packages that are refused by name, with the reason.
REFUSED = {
    "unsloth": "it rewrites models for the GPU that it finds while it is imported; import the model from transformers "
    "and peft instead (unsloth's kernels save memory more than time)",
    "megablocks": "its block-sparse products have no measured kernels; call torch.nn.functional.grouped_mm instead",
    "nvidia.dali": "it decodes data on the GPU; read the data through a DataLoader",
    "cupy": "its kernels are compiled on the GPU; write them with torch",
    "pycuda": "its kernels are compiled on the GPU; write them with torch",
    "tensorrt": "it builds engines on the GPU; leave it out of the step",
    "deep_ep": "its exchange of tokens has no model; use torch.distributed.all_to_all_single",
    "deep_gemm": "its products are compiled on the GPU; call torch._scaled_mm, which has the same shapes",
    "spconv": "its sparse convolutions depend on data that a capture does not have",
    "torchsparse": "its sparse convolutions depend on data that a capture does not have",
    "MinkowskiEngine": "its sparse convolutions depend on data that a capture does not have",
}


class _Unknown(type):
    """Class of names that a stand-in does not have: they have any attribute, and are refused when they are used."""

    @classmethod
    @cache
    def of(cls, path: str) -> _Unknown:
        """Return the class called ``path``."""
        return cls(path.rpartition(".")[2], (), {"__new__": lambda owner, *args, **kwargs: refuse(path), "path": path})

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unknown.of(f"{cls.path}.{name}")


class _Package(ModuleType):
    """Module of a stand-in. What it lacks is an ``ImportError`` for a program, as for another version of the package; a
    library, which names much that it never uses, gets a class that is refused when it is used.
    """

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if _is_known(path):
            return import_module(path)
        if self.__name__.partition(".")[0] in _ANYTHING and not name.startswith("__"):
            return Silent()
        if name.startswith("__") or not _asking_library():
            raise AttributeError(f"module {self.__name__!r} has no {name!r} in its stand-in")
        return _Unknown.of(path)


def modules_of(package: str) -> Mapping[str, Mapping[str, Any]]:
    """Return module -> its exports, of the stand-in for ``package``."""
    every: dict[str, Mapping[str, Any]] = import_module(f"e2e.capture.cuda_packages.{PACKAGES[package][0]}").MODULES
    return {name: exports for name, exports in every.items() if name.partition(".")[0] == package}


def _is_known(name: str) -> bool:
    """True for the name of a module of a stand-in."""
    return any(f"{each}.".startswith(f"{name}.") for each in modules_of(name.partition(".")[0]))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, note: Note, stack: ExitStack, installed: Mapping[str, importlib.machinery.ModuleSpec]) -> None:
        self.note, self.stack, self.installed = note, stack, installed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in PACKAGES or not (self._stands_in(package) or self._calls_a_library(name)):
            return None
        if package not in _ANYTHING and not _is_known(name) and not _asking_library():
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(self.note, self.stack), is_package=True)

    def _stands_in(self, package: str) -> bool:
        if package in self.installed:
            # A module of the user's own, which stands in for the package too, comes first.
            return package not in _RUN_AS_INSTALLED and library_folder(str(self.installed[package].origin)) is not None
        library = _asking_library()
        return not library or (
            library not in LOOK_BY_IMPORTING and (package in sys.modules or package in ASKED_BY_LIBRARIES)
        )

    def _calls_a_library(self, name: str) -> bool:
        """True for the module by which an installed bitsandbytes without operators loads its kernels."""
        installed = self.installed.get("bitsandbytes") if name == "bitsandbytes.cextension" else None
        return installed is not None and not Path(str(installed.origin)).with_name("_ops.py").exists()

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """Yield the metadata of the stand-ins, by which libraries check versions."""
        wanted = getattr(context, "name", None)
        packages = ASKED_BY_LIBRARIES if wanted is None else (wanted.replace("-", "_"),)
        for package in packages:
            if package in PACKAGES and package not in self.installed and self._stands_in(package):
                yield _Metadata(package)


class _Loader(importlib.abc.Loader):
    """Loader of one module of a stand-in."""

    def __init__(self, note: Note, stack: ExitStack) -> None:
        self.note, self.stack = note, stack

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        package = module.__name__.partition(".")[0]
        here = "is not installed" if package in _RUN_AS_INSTALLED else "cannot run without a GPU"
        told = partial(self.note, f"{package} {here}: stood in for, its kernels by name and shape")
        looks = bool(_asking_library())  # a library may only see whether it is there
        for name, value in modules_of(package).get(module.__name__, {}).items():
            setattr(module, name, self._telling(value, told) if looks else value)
        if module.__name__ == package:
            module.__version__ = PACKAGES[package][1]  # type: ignore[attr-defined]
            if not looks:
                told()

    def _telling(self, value: Any, told: Callable[[], None]) -> Any:
        """Return ``value`` so that ``told`` is called when it is used: a function is called, a class has an object."""

        def telling(called: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(called)
            def call(*args: Any, **kwargs: Any) -> Any:
                told()
                return called(*args, **kwargs)

            return call

        if isinstance(value, type):
            made = value.__init__  # type: ignore[misc]
            if made is object.__init__:  # what `__new__` takes is not for it
                made = lambda made, *args, **kwargs: None  # type: ignore[misc,assignment]  # noqa: E731
            self.stack.enter_context(patch.object(value, "__init__", telling(made)))
            return value
        return telling(value) if isinstance(value, FunctionType) else value


# Last parts of the names of modules in C++ or CUDA that a package builds for itself.
_BUILT = ("_C", "_ext", "_cuda")


class _UnbuiltFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder, asked last, of the module in CUDA of a package that was not built: what it has is refused when it is
    used, so that what does without it runs.
    """

    def __init__(self, note: Note) -> None:
        self.note = note

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package, _, part = name.rpartition(".")
        # PyTorch's own libraries do without theirs.
        if part not in _BUILT or not package or package.partition(".")[0] in ("torch", "torchvision", "torchaudio"):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Unbuilt(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = f"{module.__name__}.so"
        self.note(f"{module.__name__} is not built: its functions are refused where they take tensors")


class _Unbuilt(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values())):
                refuse(f"{self.__name__}.{name}")
            return Silent()  # its version, its compiler

        return call


class _Metadata(importlib.metadata.Distribution):
    def __init__(self, package: str) -> None:
        self.package = package

    def read_text(self, filename: str) -> str | None:
        if filename == "top_level.txt":
            return self.package
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        return f"Metadata-Version: 2.1\nName: {self.package.replace('_', '-')}\nVersion: {PACKAGES[self.package][1]}\n"

    def locate_file(self, path: Any) -> Any:
        return Path(path)


# Where imports pass through on their way from who asks.
_ON_THE_WAY = ("<", str(Path(__file__).parent), str(imports.__file__))


def _asking_library() -> str:
    """Return the name of the installed library whose code asks for an import; empty if the program does."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_ON_THE_WAY) and "importlib" not in file:
            folder = library_folder(file)
            if folder is not None:
                return Path(file).relative_to(folder).parts[0]
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            return package if package in _CHECKED_OUT else ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _adapted(note: Note, module: Any) -> Iterable[tuple[Any, str, Any]]:
    """Return the patches of bitsandbytes: of the installed package, or of what stands for it."""
    own = import_module("e2e.capture.cuda_packages.bitsandbytes")
    return own.noted(note) if isinstance(module, _Package) else own.patches(module, note)  # type: ignore[no-any-return]


def _extended(module: Any) -> Iterable[tuple[Any, str, Any]]:
    return import_module("e2e.capture.cuda_packages.mmcv").patches(module)  # type: ignore[no-any-return]


def _unbuilt(note: Note, module: Any) -> Iterable[tuple[Any, str, Any]]:
    """Return the patches by which CUDA extensions are not built: known ones are stood in for, of others a program may
    have another way without them.
    """

    def build_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(name: str, *args: Any, **kwargs: Any) -> Any:
            sources = [str(each) for value in (*args[:1], kwargs.get("sources")) if value for each in value]
            cuda = kwargs.get("with_cuda") or kwargs.get("cuda_sources") or (len(args) > 1 and args[1])
            if not cuda and not any(each.endswith((".cu", ".cuh")) for each in sources):
                return original(name, *args, **kwargs)
            if name in EXTENSIONS:
                note(f"the CUDA extension {name}, which the program builds: stood in for, its kernels by shape")
                stand_in = sys.modules[name] = _Unbuilt(name)  # which programs also import by its name
                vars(stand_in).update(EXTENSIONS[name])
                return stand_in
            note(f"the CUDA extension {name}, which the program builds, is not built: its kernels are not known here")
            raise RuntimeError(
                f"the CUDA extension {name} is not built without a GPU; call functions written with torch instead of it"
            )

        return build

    return [(module, name, build_of(getattr(module, name))) for name in ("load", "load_inline")]


@contextmanager
def cuda_packages(note: Note) -> Iterator[None]:
    """Context in which CUDA packages can be imported; ``note`` is told of each."""
    stack = ExitStack()
    finder = _Finder(note, stack, {package: where for package in PACKAGES if (where := find_spec(package)) is not None})
    if "triton" not in finder.installed:
        import_module("torch.utils._triton").has_triton_package()  # kept: PyTorch goes without the stand-in
    unbuilt = _UnbuiltFinder(note)
    sys.meta_path.insert(0, finder)
    sys.meta_path.append(unbuilt)
    try:
        # Packages take it from there when they are imported; a PyTorch without CUDA lacks it.
        current_stream = patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True)
        patches: dict[str, Patches] = {
            "bitsandbytes": partial(_adapted, note),
            "mmcv.utils.ext_loader": _extended,
            "torch.utils.cpp_extension": partial(_unbuilt, note),
        }
        with stack, current_stream, patched_imports(patches):
            yield
    finally:
        sys.meta_path.remove(finder)
        sys.meta_path.remove(unbuilt)
        for name in [name for name, module in sys.modules.items() if isinstance(module, (_Package, _Unbuilt))]:
            del sys.modules[name]


def missing_package(error: BaseException, frames: traceback.StackSummary) -> str | None:
    """Return what to do about an import that failed, or None for other errors."""
    while error.__cause__ is not None and not (isinstance(error, ImportError) and error.name):
        error = error.__cause__  # a library says that it could not import a part of itself
        frames = traceback.extract_tb(error.__traceback__)
    asking = [frame for frame in frames if _is_code(frame) and frame.name != "__getattr__"]
    place = f"{asking[-1].filename}:{asking[-1].lineno}: " if asking else ""
    owner = getattr(error, "obj", None)
    if isinstance(owner, ModuleType) and library_folder(str(getattr(owner, "__file__", ""))) is not None:
        return f"{place}uses {error.name} of {owner.__name__}, {_other_version(owner.__name__.partition('.')[0])}"  # type: ignore[attr-defined]
    if isinstance(error, AttributeError) and frames[-1].name == "__getattr__":  # which says what has become of it
        folder = library_folder(frames[-1].filename)
        if folder is not None:
            package = Path(frames[-1].filename).relative_to(folder).parts[0]
            return f"{place}{error} Install the version of {package} that the program was written for"
    if isinstance(error, NameError) and frames and (wanted := _imported_if_there(str(error.name), frames[-1].filename)):
        return f"{place}uses {error.name}, which it has only with {wanted}; choose the program's way without it"
    if not isinstance(error, ImportError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    stub = f"put a {package}.py with these functions, written with torch, on PYTHONPATH"
    if package in PACKAGES and (package in sys.modules or not isinstance(error, ModuleNotFoundError)):
        return f"{place}imports {_imported(error)}, which the stand-in for {package} does not have; {stub}"
    refused = next((name for name in REFUSED if f"{error.name}.".startswith(f"{name}.")), None)
    if refused is not None:
        return f"{place}imports {error.name}, which is not predicted: {REFUSED[refused]}"
    named = re.match("cannot import name", str(error)) and library_folder(str(error.path)) is not None
    if named or (isinstance(error, ModuleNotFoundError) and error.name != package and package in sys.modules):
        return f"{place}imports {_imported(error)}, {_other_version(package)}"
    if not isinstance(error, ModuleNotFoundError):
        return None
    if package in INSTALLABLE:
        return (
            f"{place}imports {package}, which is not installed here and needs no GPU: "
            f"pip install --no-deps {INSTALLABLE[package]}"
        )
    return f"{place}imports {error.name}, which is not installed here: pip install it, or, if it needs CUDA, {stub}"


def _imported_if_there(name: str, file: str) -> str:
    """Return the package that ``file`` tries to import together with ``name``; empty if it does not try."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    for attempt in (node for node in ast.walk(tree) if isinstance(node, ast.Try)):
        imports = [node for node in ast.walk(attempt) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.asname or alias.name for node in imports for alias in node.names}
        if name in names:
            first = imports[0]
            module = first.module or "" if isinstance(first, ast.ImportFrom) else first.names[0].name
            return module.partition(".")[0]
    return ""


def _other_version(package: str) -> str:
    return (
        f"which the installed {package} does not have: install the version of {package} that the program was written "
        "for"
    )


def _imported(error: ImportError) -> str:
    named = re.match(r"cannot import name '(\w+)'", str(error))
    return f"{named[1]} of {error.name}" if named else str(error.name)


def _is_code(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(_ON_THE_WAY) and "importlib" not in frame.filename


def refuse(what: str) -> Any:
    """Raise ``ModelError`` for a part of a package that is not stood in for."""
    raise ModelError(f"{what} is not stood in for: its kernels are not known here; leave it out of the step")
