"""``python -m megatron_eopt`` is the command ``megatron-eopt``."""

import sys

from megatron_eopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
