"""Entry point of ``python -m fusion``."""

from costmodel.base.process import interruptible_start


def start() -> None:
    """Import the command line and run it; also the entry point of the console script."""
    with interruptible_start():
        from fusion.commands.cli import main

        main()


if __name__ == "__main__":
    start()
