"""Annotations of objects in images (COCO's files of JSON, read by pycocotools) that are not there: as many boxes an
image as COCO has, with outlines, key points and captions; the images are those of :mod:`e2e.capture.missing.images`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from e2e.capture.imports import patched_imports
from e2e.capture.missing.images import name_of_image, size_of_image
from e2e.capture.stand_ins import Note

# Images that are made up, objects of an image and their width and height in one of 640 x 480; COCO has 7.3 objects an
# image.
_IMAGES, _OBJECTS = 2_048, 7
# COCO's key points (train2017): 262,465 persons in 64,115 images; 149,813 of them have key points, 11 of 17 each.
_PERSONS, _POINTS = 4, 11
_BOX = (90, 110)
# COCO's files.
_FILE = re.compile(r"(instances|person_keypoints|captions|image_info|stuff|panoptic)_\w+\.json$")
# COCO's names, which programs compare with their own; key points are of persons only.
_NAMES = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,parking meter,"
    "bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,frisbee,"
    "skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,"
    "cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,"
    "potted plant,bed,dining table,toilet,tv,laptop,mouse,remote,keyboard,cell phone,microwave,oven,toaster,sink,"
    "refrigerator,book,clock,vase,scissors,teddy bear,hair drier,toothbrush"
)
_UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # numbers up to 90 that COCO gives to no category
_KEY_POINTS = ["nose", *(f"{side}_{part}" for part in (
    "eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle") for side in ("left", "right"))]  # fmt: skip


@contextmanager
def made_up_annotations(note: Note) -> Iterator[None]:
    """Context in which annotations that are not there are made up."""

    def patches(module: Any) -> Iterator[tuple[Any, str, Any]]:
        make, find = module.COCO.__init__, module.COCO.getCatIds

        def __init__(self: Any, annotation_file: Any = None, *args: Any, **kwargs: Any) -> None:
            self.made_up = isinstance(annotation_file, (str, os.PathLike)) and not there(annotation_file)
            make(self, None if self.made_up else annotation_file, *args, **kwargs)
            if self.made_up:
                persons = "keypoint" in str(annotation_file)
                objects = _PERSONS if persons else _OBJECTS
                note(f"{annotation_file} is not there: {_IMAGES:,} images with {objects} objects each")
                self.dataset, self.anno_file = _dataset(persons, objects), [annotation_file]
                self.createIndex()

        def getCatIds(self: Any, catNms: Any = (), *args: Any, **kwargs: Any) -> Any:
            names = [catNms] if isinstance(catNms, str) else list(catNms)
            if not getattr(self, "made_up", False) or not names:
                return find(self, catNms, *args, **kwargs)
            return find(self)[: len(names)]  # they have whatever names they are asked for

        yield module.COCO, "__init__", __init__
        yield module.COCO, "getCatIds", getCatIds
        for name in ("exists", "isfile"):  # programs look before they read it
            yield os.path, name, _or_of_coco(getattr(os.path, name))

    there = os.path.exists
    with patched_imports(dict.fromkeys(("pycocotools.coco", "xtcocotools.coco"), patches)):
        yield


def _or_of_coco(look: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return ``look``, which tells whether a file is there, for which all of COCO's annotations are."""

    def looked(path: Any) -> bool:
        return look(path) or (isinstance(path, (str, os.PathLike)) and bool(_FILE.match(os.path.basename(path))))

    return looked


def _dataset(persons: bool, objects: int) -> dict[str, Any]:
    """Return the made-up content of a file with so many ``objects`` an image; ``persons``: these are persons."""
    images = []
    for number in range(1, _IMAGES + 1):
        width, height = size_of_image(name_of_image(number))
        images.append({"id": number, "file_name": name_of_image(number), "width": width, "height": height})
    numbers = [number for number in range(1, 91) if number not in _UNUSED][: 1 if persons else None]
    categories = [
        {"id": number, "name": name, "supercategory": "", "keypoints": _KEY_POINTS, "skeleton": []}
        for number, name in zip(numbers, _NAMES.split(","), strict=False)
    ]
    return {"info": {}, "images": images, "categories": categories, "annotations": list(_objects(numbers, objects))}


def _objects(categories: Sequence[int], objects: int) -> Iterator[dict[str, Any]]:
    for number in range(_IMAGES * objects):
        image, place = divmod(number, objects)
        width, height = size_of_image(name_of_image(image + 1))
        wide, high = width * _BOX[0] // 640, height * _BOX[1] // 480
        left, top = width * place // 9, height * place // 10
        # Every image has an object of the first category, which may be the only one that a program takes.
        category = categories[number % len(categories) if place else 0]
        visible = _POINTS if number * 4 % 7 < 4 else 0  # four persons of seven have key points, two or more in an image
        yield {
            "id": number + 1, "image_id": image + 1, "category_id": category, "iscrowd": 0, "area": wide * high,
            "bbox": [left, top, wide, high], "caption": "a thing beside another thing on a table in a room",
            "segmentation": [[left, top, left + wide, top, left + wide, top + high, left, top + high]],
            "num_keypoints": visible,
            "keypoints": [left + wide // 2, top + high // 2, 2] * visible + [0, 0, 0] * (len(_KEY_POINTS) - visible),
        }  # fmt: skip
