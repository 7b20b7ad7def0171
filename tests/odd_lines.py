"""Lines that come in odd shapes, by name: what answers lines with lines has to take them all."""

MATRIX = {
    "nothing": b"",
    "empty": b"\n\n",
    "blank": b"   \n\t\nred\n",
    "no newline at the end": b"red\ngreen",
    "BOM": b"\xef\xbb\xbfred\ngreen\n",
    "NUL": b"\0\nred\0green\n",
    "not UTF-8": b"\xff\xfe\nred \xc3\n\xed\xa0\x80\n",
    "U+2028": "\u2028\nred\u2028green\n\u2029\x85\n".encode(),
    "CRLF": b"red\r\n\r\ngreen\r\n",
    "lone CR and friends": b"red\rgreen\n\x0b\x0c\x1c\n",
    "long": b"red " * 300_000 + b"\nred\n",
    "10,000 blank": b"\n" * 10_000,
}
