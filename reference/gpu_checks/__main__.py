"""`python -m reference.gpu_checks`."""

import sys

# Not written here: the processes that run the checks import what they are sent, and never a `__main__`.
from reference.gpu_checks.run import main

if __name__ == "__main__":
    sys.exit(main())
