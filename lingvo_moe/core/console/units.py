"""Formats numbers with units for people."""

DASH = "–"


def size(num_bytes: float | None, digits: int = 2) -> str:
    """Bytes: '11.00 GiB', '512 B'; GiB with so many digits after the point."""
    if num_bytes is None:
        return DASH
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.{digits}f} GiB"


def gib(num_bytes: float | None) -> str:
    """Bytes in GiB, without the unit: '12.98', '16'."""
    return DASH if num_bytes is None else f"{num_bytes / 2**30:.2f}".removesuffix(".00")


def duration(seconds: float | None) -> str:
    """Seconds: '1.52 s', '86.1 ms', '12.0 µs', '4 min 10 s'."""
    if seconds is None:
        return DASH
    if seconds == 0:
        return "0"
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes:,} min {rest} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{_three(seconds * scale)} {unit}"
    raise AssertionError


def clock(seconds: float) -> str:
    """Seconds: '1h02m', '3m05s' or '12s'."""
    seconds = int(seconds + 0.5)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


def work(flops: float | None) -> str:
    """Floating-point operations: '82.4 TFLOP'."""
    return _decimal(flops, "FLOP")


def rate(per_second: float | None, unit: str) -> str:
    """'420 TFLOP/s', '900 GB/s'."""
    return _decimal(per_second, f"{unit}/s")


def quantity(value: float | None) -> str:
    """A large number, short: '619.3B', '1T', '840'."""
    if value is None:
        return DASH
    for name, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.1f}".removesuffix(".0") + name
    return f"{value:g}"


def in_words(value: int) -> str:
    """A count of at least a million with its unit, '619.4 billion' or '4.3 million'; '' for a smaller one."""
    for name, scale in (("billion", 1e9), ("million", 1e6)):
        if round(value / scale, 1) >= 1:
            return f"{value / scale:,.1f} {name}"
    return ""


def number(value: float | None) -> str:
    """Three figures or all digits before the point, thousands separated: '2,312', '0.571'."""
    return DASH if value is None else _three(value)


def share(value: float | None) -> str:
    """A fraction as percent: '36.2%'."""
    return DASH if value is None else f"{100 * value:.1f}%"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 if abs(value) >= 1 and abs(value) < 10 else 1 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}"


def _decimal(value: float | None, unit: str) -> str:
    if value is None:
        return DASH
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= scale:
            return f"{_three(value / scale)} {prefix}{unit}"
    return f"{_three(value)} {unit}"
