"""``python -m e2e``."""

from costmodel.base.process import interruptible_start


def start() -> None:
    """Loads the command line and runs it; the entry point of the console script too."""
    with interruptible_start():
        from e2e.commands.cli import main

        main()


if __name__ == "__main__":
    start()
