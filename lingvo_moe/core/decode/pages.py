"""The pages of a pool that are free, in use, or shared by texts that begin alike. Free of TensorFlow.

A page has the keys and values of PAGE consecutive tokens. A full page may have a name, which says its tokens and all
before them; a text that begins with these tokens uses it too. A named page that nobody uses stays until it is needed.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

PAGE = 32  # tokens


def name_of(before: bytes, ids: Sequence[int]) -> bytes:
    """The name of a page with these ids, after a page of the name `before`; b"" at a text's begin."""
    return hashlib.blake2b(np.asarray(ids, "<i4").tobytes(), key=before, digest_size=24).digest()


class PagePool:
    """Counts the users of pages 1 to `pages`; page 0 is for what nobody reads."""

    def __init__(self, pages: int):
        self.pages = pages
        self._free = [*range(pages, 0, -1)]
        self._users: dict[int, int] = {}
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, without users; longest so first

    @property
    def free(self) -> int:
        """The number of pages that `Take` could give."""
        return len(self._free) + len(self._idle)

    def Take(self) -> int:
        """A page for one user; 0 where none is free."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._named[self._names.pop(page)]
        else:
            return 0
        self._users[page] = 1
        return page

    def Has(self, name: bytes) -> bool:
        """Whether there is a page of that name."""
        return name in self._named

    def Find(self, name: bytes) -> int:
        """The page of that name, with one user more; 0 where there is none."""
        page = self._named.get(name, 0)
        if page:
            self._idle.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
        return page

    def Name(self, page: int, name: bytes) -> None:
        """Says what a full page in use has, unless another page has the same."""
        if self._named.setdefault(name, page) == page:
            self._names[page] = name

    def Give(self, page: int) -> None:
        """One user less."""
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)
