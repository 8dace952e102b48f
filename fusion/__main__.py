"""``python -m fusion``."""

from fusion.cli import main

if __name__ == "__main__":
    main()
