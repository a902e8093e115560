"""``python -m offset_runtime`` is ``offset-runtime``."""

from offset_runtime.cli import main

if __name__ == "__main__":
    main()
