"""Build for several input shapes ("profiles"): a folder with one complete build per profile, and an index.

build/
├── 1x3x48x320/         a complete build (:mod:`fusion.artifact.build_folder`), likewise for every profile
├── 1x3x48x640/
├── manifest.json       folders of the profiles, in the order of the request, and the digest of each manifest
├── summary.json        results of tuning for every profile
└── records/            tuning records of all of them
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from fusion.artifact.build_folder import (
    CACHE,
    FORMAT,
    MANIFEST,
    MODEL,
    REPORT,
    SUMMARY,
    UNFUSED_MODULE,
    Artifact,
    Executable,
    Manifest,
    digest,
    install_build,
    read_artifact,
    read_fields,
    stage_build,
    staging,
    write_artifact,
    write_json,
)
from fusion.model.tensor_info import TensorInfo


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
        digests = {name: digest(stage / name / MANIFEST) for name in names}
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
        if digest(artifact.directory / MANIFEST) != expected:
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
