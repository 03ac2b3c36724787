"""The command line ``gtrain``. Importing this package imports nothing else before :func:`main` is called."""


def main() -> None:
    """Run the command; exit with 0, or with an error message of a few lines."""
    from gtrain.cli import entry

    entry.main()
