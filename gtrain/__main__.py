"""``python -m gtrain``: the command line, as torchrun starts it."""

from gtrain.cli import main

if __name__ == "__main__":
    main()
