"""Numbers with their units, as text."""


def size(value: float) -> str:
    """Return bytes in the largest binary unit that leaves a number of at least 1, such as ``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.3g} {unit}"
