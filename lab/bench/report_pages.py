"""Pictures of the pages for docs: `python -m lab.bench.report_pages BUILD -o docs`, with a headless Chromium.

BUILD: a folder that `fusion tune` wrote. Pictures are palettes of 64 colours, so that each stays below 150 kB.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

import e2e
from fusion.report.tune_page import write_reports

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def main() -> None:
    """Write ``predict-report.png`` and ``tune-report.png``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (tuned, *_) = write_reports(arguments.build)
        picture(tuned, arguments.output / "tune-report.png", 1200, 2350)
        e2e.predict("gpt2-large", gpu="h100-sxm", batch_size=4, sequence_length=1024, report=folder / "predict.html")
        picture(folder / "predict.html", arguments.output / "predict-report.png", 1200, 2300)


def picture(page: Path, path: Path, width: int, height: int) -> None:
    """Write a screenshot of the beginning of ``page``."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("no headless browser here: make browser")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000"]
    window = [f"--window-size={width},{height}", f"--screenshot={path.resolve()}"]
    subprocess.run([browser, *options, *window, page.resolve().as_uri()], check=True, capture_output=True)
    with Image.open(path) as taken:
        small = taken.convert("RGB").quantize(64)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
