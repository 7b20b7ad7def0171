"""Keeps a second writer out of a place in a bucket, where files cannot be locked.

The object WRITER says who writes there, and its holder renews it. Whoever comes later watches it: one that is not
renewed for a while was left by a process that was killed, and is taken over, by one of those who wait for it.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from typing import Any

from lingvo_moe.core.files.store import Bucket, StoreError
from lingvo_moe.core.runs.run_lock import RunLockError

WRITER = "WRITER"
RENEWAL = 5.0  # seconds between renewals
PATIENCE = 30.0  # seconds without a renewal after which a holder counts as dead


class BucketLock:
    """Held from its making until Close.

    Raises RunLockError: another writer is at work there. StoreError: the bucket fails.
    """

    def __init__(self, place: Bucket):
        self._place, self._token, self._number = place, secrets.token_hex(16), 0
        self._since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._generation = self._Take()
        self._lost, self._closing = "", threading.Event()
        self._thread = threading.Thread(target=self._Renew, name="bucket lock", daemon=True)
        self._thread.start()

    def Check(self) -> None:
        """Raises RunLockError where another writer has taken the place over, as when this process stood still."""
        if self._lost:
            raise RunLockError(self._lost)

    def Close(self) -> None:
        """Ends it; the object goes, where it is still this writer's and the bucket works."""
        self._closing.set()
        self._thread.join()
        if not self._lost:
            with contextlib.suppress(StoreError):
                self._place.Delete(WRITER)

    def _Content(self) -> bytes:
        self._number += 1
        about = {"token": self._token, "number": self._number, "since": self._since}
        return json.dumps({**about, "pid": os.getpid(), "host": socket.gethostname()}).encode()

    def _Take(self) -> bytes:
        """Returns the generation of the object that this writer wrote."""
        found = self._place.Version(WRITER)
        until = time.monotonic() + PATIENCE
        while True:
            # An absent object, or one that stayed the same for so long, is replaced, unless somebody else was quicker.
            if found.value is None or time.monotonic() > until:
                if taken := self._place.Replace(WRITER, self._Content(), found.generation):
                    return taken
                raise self._Refusal(self._place.Version(WRITER).value)
            time.sleep(min(1.0, PATIENCE / 10))
            now = self._place.Version(WRITER)
            if now.generation != found.generation and now.value:
                raise self._Refusal(now.value)
            found = now

    def _Refusal(self, content: bytes | None) -> RunLockError:
        who: dict[str, Any] = json.loads(content or b"{}")
        by = f" (process {who.get('pid')} on {who.get('host')}, since {who.get('since')})"
        return RunLockError(
            f"{self._place.address}: another writer is at work there{by if who else ''}; wait, stop it, or name "
            "another place"
        )

    def _Renew(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(RENEWAL):
            try:
                renewed = self._place.Replace(WRITER, self._Content(), self._generation)
            except StoreError as e:
                if time.monotonic() - last < PATIENCE:
                    continue
                self._lost = f"{self._place.address}: {WRITER} could not be renewed: {e}"
                return
            if not renewed:
                self._lost = str(self._Refusal(self._place.Version(WRITER).value))
                return
            self._generation, last = renewed, time.monotonic()
