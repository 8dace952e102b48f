"""``python -m costmodel``."""

import sys

from costmodel.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
