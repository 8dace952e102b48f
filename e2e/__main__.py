"""``python -m e2e``."""

from e2e.commands.cli import main

main()
