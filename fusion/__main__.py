"""``python -m fusion``."""

from fusion.commands.cli import main

if __name__ == "__main__":
    main()
