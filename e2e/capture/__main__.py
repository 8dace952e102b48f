"""``python -m e2e.capture JOB ANSWER``: process in which the user's program runs."""

import sys

from e2e.capture.program import main

main(*sys.argv[1:])
