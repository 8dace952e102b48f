"""``python -m costmodel``."""

import sys

from costmodel.base.termination import interruptible_start


def start() -> int:
    """Loads the command line and runs it; its exit status. The entry point of the console script too."""
    with interruptible_start():
        from costmodel.commands.cli import main

        return main()


if __name__ == "__main__":
    sys.exit(start())
