"""Build directory: written by ``tune``, read by ``run`` and ``compare``.

    build/
    ├── model.so            tuned kernels, fusion chosen per site; needs only TVM's runtime
    ├── model_unfused.so    the same kernels with fusion off
    ├── manifest.json       interface, CPU, TVM version, origin and a digest of every file: this module
    ├── summary.json        results of tuning, for scripts
    ├── report.html         results of tuning, for a browser (:mod:`fusion.report.tune_page`)
    ├── records/            tuning records (written during tuning, not here)
    └── cache/              compiled models of the peers of ``compare``

Files are staged beside their destination and renamed; the manifest is moved last, so a directory whose manifest
matches its files is complete.

For several input shapes ("profiles") there is a folder with one complete build per profile, and an index:

    build/
    ├── 1x3x48x320/         a complete build, likewise for every profile
    ├── 1x3x48x640/
    ├── manifest.json       folders of the profiles, in the order of the request, and the digest of each manifest
    ├── summary.json        results of tuning for every profile
    └── records/            tuning records of all of them
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import decoded, open_file, read_text
from fusion.model.library_messages import os_reason, write_failure
from fusion.model.named_arrays import TensorInfo
from schedules.contract.cpu_target import TILE_FLAG, CpuTarget, cpu_flags, required_flags, tiles_refused

FORMAT = 1
MODEL = "model.so"
UNFUSED_MODULE = "model_unfused.so"
MANIFEST = "manifest.json"
SUMMARY = "summary.json"
REPORT = "report.html"
CACHE = "cache"
_PRECISIONS = ("float32", "bfloat16", "int8", "mixed")
STAGING = ".staging-"  # name prefix of a temporary folder


class Executable(Protocol):
    """Interface of the result of ``tvm.relax.build`` that is used here."""

    def export_library(self, file_name: str) -> Any:
        """Write a shared library."""


@dataclass(frozen=True)
class Manifest:
    """Metadata that ``run`` needs before it loads code."""

    model_path: str
    model_sha256: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    mcpu: str
    # Features of /proc/cpuinfo that the code requires.
    cpu_flags: tuple[str, ...]
    threads: int
    tvm_version: str
    # File name -> SHA-256.
    files: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT
    # True if candidate networks were timed against each other on such a CPU.
    measured: bool = True
    # True if outputs were compared with the reference.
    checked: bool = True
    # Number type of layers with weights: ``float32``, ``bfloat16``, ``int8`` or ``mixed``. Inputs and outputs always
    # have the types of the model.
    precision: str = "float32"
    # Module -> layer names of its kernels in execution order (:func:`fusion.relax.machine_code.kernel_layers`); empty
    # in older builds.
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    __pydantic_config__ = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name in self.files:
            if Path(name).name != name or "\0" in name:
                raise ValueError(f"files: {name!r} is not a plain file name")
        for each in (*self.inputs, *self.outputs):
            if not _is_dtype(each.dtype):
                raise ValueError(f"{each.name}: {each.dtype!r} is no data type")
            if any(extent < 0 for extent in each.shape):
                raise ValueError(f"{each.name}: {list(each.shape)} is no shape")
        if self.threads < 1:
            raise ValueError(f"threads: {self.threads} is not above zero")
        if self.precision not in _PRECISIONS:
            raise ValueError(f"precision: {self.precision!r} is none of {', '.join(_PRECISIONS)}")


@dataclass(frozen=True)
class Artifact:
    """A build directory that was read and verified."""

    directory: Path
    manifest: Manifest

    @property
    def cache(self) -> Path:
        """Folder for compiled models of peers."""
        return self.directory / CACHE

    def library(self, name: str = MODEL) -> Path | None:
        """Path of a module, or None if the build does not contain it."""
        return self.directory / name if name in self.manifest.files else None


def model_file(artifact: Artifact) -> Path | None:
    """Unchanged ONNX file that ``artifact`` was built from, or None.

    It is searched at its original path and in the build folder, which may have moved (models quantised during tuning
    are stored there).
    """
    path = Path(artifact.manifest.model_path)
    places = (path, artifact.directory / path.name, artifact.directory.parent / path.name)
    unchanged = (each for each in places if each.is_file() and file_digest(each) == artifact.manifest.model_sha256)
    return next(unchanged, None)


def make_manifest(
    model: Path,
    inputs: tuple[TensorInfo, ...],
    outputs: tuple[TensorInfo, ...],
    cpu: CpuTarget,
    tvm_version: str,
    measured: bool = True,
    checked: bool = True,
    precision: str = "float32",
) -> Manifest:
    """Create the manifest of a build of ``model`` for ``cpu`` (files are filled in by :func:`write_artifact`)."""
    return Manifest(
        model_path=str(model.resolve()),
        model_sha256=file_digest(model),
        inputs=inputs,
        outputs=outputs,
        mcpu=cpu.mcpu,
        cpu_flags=required_flags(cpu.mcpu),
        threads=cpu.threads,
        tvm_version=tvm_version,
        measured=measured,
        checked=checked,
        precision=precision,
    )


def write_artifact(
    directory: Path, manifest: Manifest, executables: Mapping[str, Executable], summary: Mapping[str, Any]
) -> Artifact:
    """Write modules, summary and manifest; on failure no partial files are left and old files stay.

    ``executables``: file name (``MODEL``, ``UNFUSED_MODULE``) -> executable. Raises ``OutputError``.
    """
    with staging(directory) as stage:
        complete = stage_build(stage, manifest, executables, summary)
        install_build(stage, directory)
    return Artifact(directory, complete)


def stage_build(
    stage: Path, manifest: Manifest, executables: Mapping[str, Executable], summary: Mapping[str, Any]
) -> Manifest:
    """Write the files of a build into the empty folder ``stage``; return its manifest with their digests."""
    for name, executable in executables.items():
        executable.export_library(str(stage / name))
    files = {name: file_digest(stage / name) for name in executables}
    layers = {name: tuple(getattr(executable, "layers", ())) for name, executable in executables.items()}
    told = {name: names for name, names in layers.items() if names}
    complete = Manifest(**{**_shallow(manifest), "files": files, "layers": told})
    write_json(stage / SUMMARY, summary)
    write_json(stage / MANIFEST, asdict(complete))
    return complete


def install_build(stage: Path, directory: Path) -> None:
    """Move a staged build into ``directory``; modules that it does not contain are deleted there.

    Modules are moved first, the manifest last: after an interruption the old manifest does not match, and the build is
    rejected.
    """
    names = {path.name for path in stage.iterdir() if path.is_file()}
    for name in sorted(names, key=lambda each: (each == MANIFEST, each not in (MODEL, UNFUSED_MODULE))):
        os.replace(stage / name, directory / name)
    for stale in {MODEL, UNFUSED_MODULE} - names:
        (directory / stale).unlink(missing_ok=True)


def prepare_directory(directory: Path) -> None:
    """Create ``directory`` and test that it is writable, before tuning starts. Raises ``OutputError``."""
    file = next((path for path in (directory, *directory.parents) if path.exists() and not path.is_dir()), None)
    if file is not None:
        raise OutputError(f"{directory}: {file} is a file, not a folder; name another folder")
    with _output_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0")


@contextmanager
def output_directory(directory: Path) -> Iterator[None]:
    """Create the writable ``directory``; on failure remove it if it was created here and is empty."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    prepare_directory(directory)
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


def read_artifact(directory: Path) -> Artifact:
    """Read and validate a build directory: manifest well-formed, every module present and undamaged.

    Raises ``InputError`` that names the file.
    """
    if not directory.is_dir():
        if directory.exists():
            raise InputError(f"{directory}: is not a folder; name one that `fusion tune MODEL -o FOLDER` wrote")
        raise InputError(f"{directory}: no such build directory; `fusion tune MODEL -o {directory}` makes one")
    manifest = _read_manifest(directory / MANIFEST)
    if MODEL not in manifest.files:
        raise InputError(f"{directory / MANIFEST}: lists no {MODEL}; tune the model again")
    for name, expected in manifest.files.items():
        path = directory / name
        try:
            actual = file_digest(path)
        except OSError as error:
            raise InputError(f"{path}: {os_reason(error)}; tune the model again (records are reused)") from error
        if actual != expected:
            raise InputError(f"{path}: damaged, its digest is not the manifest's; tune the model again")
    return Artifact(directory, manifest)


def check_runnable(artifact: Artifact, flags: frozenset[str] | None = None, tvm_version: str | None = None) -> None:
    """Raise ``InputError`` for a CPU or a TVM version on which the build's code would crash."""
    manifest = artifact.manifest
    present = cpu_flags() if flags is None else flags
    missing = [flag for flag in manifest.cpu_flags if flag not in present]
    if missing:
        raise InputError(
            f"{artifact.directory}: built for {manifest.mcpu}; this CPU lacks {', '.join(missing)}: tune the model here"
        )
    # float32 kernels use no AMX tiles; kernels of shorter types may.
    if TILE_FLAG in manifest.cpu_flags and manifest.precision != "float32" and (refused := tiles_refused()):
        raise InputError(f"{artifact.directory}: built for a CPU with AMX, but {refused}: tune the model here")
    if tvm_version is not None and _series(tvm_version) != _series(manifest.tvm_version):
        raise InputError(
            f"{artifact.directory}: built with TVM {manifest.tvm_version}, but TVM {tvm_version} is installed: "
            f"install apache-tvm=={_series(manifest.tvm_version)}.* or tune the model again"
        )


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open_file(path, "library") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def staging(directory: Path) -> Iterator[Path]:
    """Temporary directory inside ``directory``, on its file system; a failure removes what this call created."""
    created = not directory.exists()
    with _output_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=STAGING, dir=directory))
        try:
            yield stage
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            if created:
                with suppress(OSError):
                    directory.rmdir()
            raise
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def _output_errors(path: Path) -> Iterator[None]:
    """Convert write failures, including those of TVM, into ``OutputError`` with a one-line message."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot write: {os_reason(error)}; choose another place, or free some") from error
    except RuntimeError as error:  # TVM's export: the linker or the compiler failed
        raise OutputError(
            f"{path}: cannot write the compiled model: {write_failure(path, error)}; choose another place, or free some"
        ) from error


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _shallow(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _read_manifest(path: Path) -> Manifest:
    from costmodel.machines.record_file import convert_record

    fields = read_fields(path)
    if fields.get("profiles"):
        folders = ", ".join(str(path.parent / name) for name in fields["profiles"])
        raise InputError(f"{path.parent}: holds a build for each of several input shapes; name one: {folders}")
    try:
        return convert_record(fields, Manifest, path, InputError)
    except InputError as error:
        raise InputError(f"{error}; tune the model again") from None


def read_fields(path: Path) -> dict[str, Any]:
    """Read the unvalidated fields of a manifest of this format; raises ``InputError`` that names the file."""
    try:
        fields = decoded(read_text(path, "record"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing, so {path.parent} is no finished build; run `tune` (again)") from error
    except OSError as error:
        raise InputError(f"{path}: {os_reason(error)}") from error
    except ValueError as error:
        raise InputError(f"{path}: damaged, not JSON; tune the model again") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise InputError(f"{path}: not a manifest of format {FORMAT}; tune the model again")
    return fields


def _is_dtype(name: str) -> bool:
    """True if NumPy or ``ml_dtypes`` (``bfloat16``) has the type."""
    import ml_dtypes

    try:
        known = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # NumPy may parse the name as a list of types
        return isinstance(getattr(ml_dtypes, name, None), type)
    return known.kind in "biufc" or known.type is getattr(ml_dtypes, name, None)


@dataclass(frozen=True, eq=False)
class ProfileBuild:
    """One profile's build, to be written into ``folder``, a name inside the build folder."""

    folder: str
    manifest: Manifest
    executables: Mapping[str, Executable]
    summary: Mapping[str, Any]


def profile_names(profiles: Sequence[Sequence[TensorInfo]]) -> list[str]:
    """Folder name of each profile: shapes of the inputs that differ between profiles, e.g. ``1x3x48x320``.

    Raises ``InputError`` if two profiles have the same shapes.
    """
    shapes = [[info.shape for info in inputs] for inputs in profiles]
    differing = [index for index, each in enumerate(zip(*shapes, strict=True)) if len(set(each)) > 1]
    names = ["_".join("x".join(map(str, inputs[index])) for index in differing) for inputs in shapes]
    for index, inputs in enumerate(profiles):
        if names[index] in names[:index]:
            raise InputError(
                f"{describe_inputs(inputs)}: two profiles (--shape, --batch) take these shapes; leave one out"
            )
    return names


def describe_inputs(inputs: Sequence[TensorInfo]) -> str:
    """Format inputs as on the command line: ``x=1,3,48,320``."""
    return " ".join(f"{info.name}={','.join(map(str, info.shape))}" for info in inputs)


def write_profiles(directory: Path, builds: Sequence[ProfileBuild], summary: Mapping[str, Any]) -> None:
    """Write the builds, then the index; remove profiles of earlier builds that are not in this one.

    All files are written before the first one is moved to its place. Raises ``OutputError``.
    """
    names = [build.folder for build in builds]
    with staging(directory) as stage:
        stale = _profiles_before(directory)
        for build in builds:
            (stage / build.folder).mkdir()
            stage_build(stage / build.folder, build.manifest, build.executables, build.summary)
        digests = {name: file_digest(stage / name / MANIFEST) for name in names}
        for name in names:
            (directory / name).mkdir(exist_ok=True)
            install_build(stage / name, directory / name)
        write_json(stage / SUMMARY, summary)
        write_json(stage / MANIFEST, {"format": FORMAT, "profiles": digests})
        install_build(stage, directory)
        _remove(directory, [name for name in stale if name not in names])


def write_single(directory: Path, build: ProfileBuild) -> None:
    """Write the only build into ``directory`` itself; remove profiles of earlier builds."""
    stale = _profiles_before(directory)
    write_artifact(directory, build.manifest, build.executables, build.summary)
    _remove(directory, stale)


def read_profiles(directory: Path) -> list[Artifact]:
    """Read the builds in ``directory``: one per profile, or the only one.

    Raises ``InputError`` for a damaged one, naming the file.
    """
    index = directory / MANIFEST
    if not index.is_file() or not (profiles := read_fields(index).get("profiles")):
        return [read_artifact(directory)]
    if not isinstance(profiles, dict) or any(Path(name).name != name for name in profiles):
        raise InputError(f"{index}: damaged, its profiles are no plain folder names; tune the model again")
    found = [read_artifact(directory / name) for name in profiles]
    for artifact, expected in zip(found, profiles.values(), strict=True):
        if file_digest(artifact.directory / MANIFEST) != expected:
            found_file = artifact.directory / MANIFEST
            raise InputError(f"{found_file}: is not the one that {index} lists; tune the model again")
    return found


def _profiles_before(directory: Path) -> list[str]:
    with suppress(InputError):
        profiles = read_fields(directory / MANIFEST).get("profiles")
        if isinstance(profiles, dict):
            return [name for name in profiles if Path(name).name == name]
    return []


def _remove(directory: Path, names: Sequence[str]) -> None:
    """Remove the files of builds only; other files in their folders stay."""
    for name in names:
        folder = directory / name
        ours = [folder / file for file in (MANIFEST, MODEL, UNFUSED_MODULE, SUMMARY, REPORT)]
        for file in (*ours, *folder.glob("model-batch*.onnx")):
            file.unlink(missing_ok=True)
        shutil.rmtree(folder / CACHE, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()
