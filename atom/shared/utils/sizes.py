"""Numbers of bytes as text."""

__all__ = ["size_text"]


def size_text(count: int) -> str:
    """Bytes in GiB, MiB or KiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"
