"""Annotations of objects in images (COCO's files of JSON, read by pycocotools) that are not there: as many boxes an
image as COCO has, with outlines, key points and captions; the images are those of :mod:`e2e.capture.missing.images`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.capture.imports import patched_imports
from e2e.capture.missing.arrays import is_missing
from e2e.capture.missing.images import NAMED_SIZE
from e2e.capture.stand_ins import Note

# Images and categories that are made up, objects of an image and their width and height.
_IMAGES, _CATEGORIES, _OBJECTS = 2_048, 80, 7
_BOX = (90, 110)


@contextmanager
def made_up_annotations(note: Note) -> Iterator[None]:
    """Context in which annotations that are not there are made up."""

    def patches(module: Any) -> Iterator[tuple[Any, str, Any]]:
        make, find = module.COCO.__init__, module.COCO.getCatIds

        def __init__(self: Any, annotation_file: Any = None, *args: Any, **kwargs: Any) -> None:
            self.made_up = is_missing(annotation_file)
            make(self, None if self.made_up else annotation_file, *args, **kwargs)
            if self.made_up:
                note(f"{annotation_file} is not there: {_IMAGES:,} images with {_OBJECTS} objects each")
                self.dataset, self.anno_file = _dataset(), [annotation_file]
                self.createIndex()

        def getCatIds(self: Any, catNms: Any = (), *args: Any, **kwargs: Any) -> Any:
            names = [catNms] if isinstance(catNms, str) else list(catNms)
            if not getattr(self, "made_up", False) or not names:
                return find(self, catNms, *args, **kwargs)
            return list(range(1, min(len(names), _CATEGORIES) + 1))  # they have whatever names they are asked for

        yield module.COCO, "__init__", __init__
        yield module.COCO, "getCatIds", getCatIds

    with patched_imports(dict.fromkeys(("pycocotools.coco", "xtcocotools.coco"), patches)):
        yield


def _dataset() -> dict[str, Any]:
    width, height = NAMED_SIZE
    images = [
        {"id": number, "file_name": f"{number:012}.jpg", "width": width, "height": height}
        for number in range(1, _IMAGES + 1)
    ]
    categories = [
        {
            "id": number,
            "name": str(number),
            "supercategory": "",
            "keypoints": [str(n) for n in range(17)],
            "skeleton": [],
        }
        for number in range(1, _CATEGORIES + 1)
    ]
    return {"info": {}, "images": images, "categories": categories, "annotations": list(_objects())}


def _objects() -> Iterator[dict[str, Any]]:
    for number in range(_IMAGES * _OBJECTS):
        image, place = divmod(number, _OBJECTS)
        wide, high = _BOX
        left, top = 70 * place, 50 * place
        # Every image has an object of the first category, which may be the only one that a program takes.
        category = number % _CATEGORIES + 1 if place else 1
        yield {
            "id": number + 1, "image_id": image + 1, "category_id": category, "iscrowd": 0, "area": wide * high,
            "bbox": [left, top, wide, high], "caption": "a thing beside another thing on a table in a room",
            "segmentation": [[left, top, left + wide, top, left + wide, top + high, left, top + high]],
            "num_keypoints": 17, "keypoints": [left + wide // 2, top + high // 2, 2] * 17,
        }  # fmt: skip
