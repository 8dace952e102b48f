"""``python -m costmodel``."""

import sys

from costmodel.base.process import interruptible_start


def start() -> int:
    """Load the command line, run it and return its exit status. Entry point of the console script too."""
    with interruptible_start():
        from costmodel.commands.cli import main

        return main()


if __name__ == "__main__":
    sys.exit(start())
