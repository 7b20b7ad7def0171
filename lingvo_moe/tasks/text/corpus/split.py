"""Decides by a hash which sentences are held out, so that no list of them has to be kept."""

import hashlib

# Of sentences of one and two words the share is smaller: longer ones make better references, and a single word that
# was never seen cannot be translated.
_SHORT = {1: 1 / 8, 2: 1 / 2}
# The share for less than so many bytes of text. It only falls as text is added: so sentences held out of more text
# were also held out of less text, and a model of less text has not seen the held-out sentences of a model of more.
_SHARES = ((10_000_000, 0.05), (100_000_000, 0.02))
LEAST_SHARE = 0.01


def share_for(size: int) -> float:
    """The default share of sentences to hold out of `size` bytes of files."""
    return next((share for below, share in _SHARES if size < below), LEAST_SHARE)


def is_held_out(key: str, share: float, salt: str = "") -> bool:
    """Whether the sentence of a key (clean.sentence_key) is held out, of all languages alike.

    Short sentences have a smaller share; another `salt` selects other sentences.
    """
    return text_hash(salt + key) < share * _SHORT.get(key.count(" ") + 1, 1.0) * 2.0**64


def text_hash(text: str) -> int:
    """64 bits that are the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
