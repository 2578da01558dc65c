"""``python -m lightning_ort`` is the command ``lightning-ort``."""

from lightning_ort.cli import main

if __name__ == "__main__":
    main()
