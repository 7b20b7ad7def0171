"""Whole files by name, in a directory or in a bucket (`s3://`, `gs://`), in the same way.

Buckets are reached by TensorStore's key-value stores: they are installed for the arrays of checkpoints anyway, repeat
failed requests, and write on a condition. (s3fs and gcsfs would be some twenty packages more, and could not write
arrays.) `memory://` is in this process alone, for tests.

S3 takes credentials and region from the usual variables (AWS_ACCESS_KEY_ID or AWS_PROFILE, AWS_REGION), and
AWS_ENDPOINT_URL names another server than Amazon's. Imports TensorStore when a bucket is first used.
"""

import abc
import errno
import functools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lingvo_moe.core.files.files import write_atomic
from lingvo_moe.core.files.paths import PathError, check_local, check_portable

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]+)/?(.*)")
_DRIVERS = {"s3": "s3", "gs": "gcs", "memory": "memory"}
MOST = 1 << 28  # bytes of a file of a checkpoint, about: it is read in one request to a bucket
_PIECE = 1 << 17  # bytes read at once from a file: what stays in a processor's cache
_PATIENCE = 600.0  # seconds of a request with its repetitions, e.g. to write 2 GiB
# About half a minute; TensorStore's own 32 repetitions take a quarter of an hour where nobody answers.
_RETRIES = {"max_retries": 8, "initial_delay": "250ms", "max_delay": "8s"}
# A transfer that stands still for so long, in seconds, is broken off and repeated. TensorStore's own has no end.
_STANDSTILL = {"TIME_SECONDS": "30", "LIMIT_BYTES": "1"}
_PAST_END = "OUT_OF_RANGE"  # in the refusal of a range that is not in a file
_ADVICE = {
    "NoSuchBucket": "there is no such bucket; make it, or correct its name",
    "credentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "PERMISSION_DENIED": "these credentials do not allow it",
    "UNAUTHENTICATED": "the credentials are wrong",
    "CURL error": "no answer; is the network up, and AWS_ENDPOINT_URL, if it is set, right?",
}


class StoreError(OSError):
    """A bucket that did not do what it was asked. The message names the address, the reason and what to do."""


def is_address(path: str | os.PathLike) -> bool:
    """Whether a path is an address, such as s3://bucket/run, and no name of a local file."""
    return bool(_ADDRESS.fullmatch(os.fspath(path)))


def check_place(path: str | os.PathLike, what: str, portable: bool = True) -> None:
    """Accepts an address of object storage, and the paths that check_portable, or else check_local, accepts.

    `what` is the flag or parameter, for the error. Raises PathError.
    """
    if not is_address(path):
        return (check_portable if portable else check_local)(path, what)
    try:
        Bucket(os.fspath(path))
    except PathError as e:
        raise PathError(f"{what}={e}") from None


class Store(abc.ABC):
    """Files below one place. Names are relative, with slashes.

    Attributes:
        address: the place, as a user names it.
    """

    address: str

    @abc.abstractmethod
    def Below(self, name: str) -> "Store":
        """The files below a name, which may have none."""

    @abc.abstractmethod
    def List(self) -> list[str]:
        """All names, sorted. Raises OSError; ValueError for a link to a directory, a pipe or a device."""

    @abc.abstractmethod
    def Has(self, name: str) -> bool:
        """Whether there is a file of that name. Raises OSError."""

    @abc.abstractmethod
    def Read(self, name: str) -> bytes:
        """A file's contents. Raises OSError: FileNotFoundError where there is none."""

    @abc.abstractmethod
    def Pieces(self, name: str) -> Iterator[memoryview]:
        """A file's contents a piece at a time, each valid until the next. Raises OSError as Read."""

    @abc.abstractmethod
    def Write(self, name: str, data: bytes) -> None:
        """Writes or replaces a file: all of it, or nothing. Raises OSError."""

    @abc.abstractmethod
    def Delete(self, name: str) -> None:
        """Deletes a file, if it is there. Raises OSError."""

    @abc.abstractmethod
    def DeleteAll(self) -> None:
        """Deletes every file. Raises OSError."""

    @abc.abstractmethod
    def Spec(self, name: str) -> dict[str, Any]:
        """TensorStore's description of the place below `name`, for arrays."""


class LocalStore(Store):
    """The files of a directory, which is made when something is written; `path` is the directory."""

    def __init__(self, path: str | os.PathLike):
        self.path, self.address = Path(path), os.fspath(path)

    def Below(self, name: str) -> "LocalStore":
        return LocalStore(self.path / name)

    def List(self) -> list[str]:
        def fail(error: OSError) -> None:
            raise error

        names = []
        for root, directories, files in os.walk(self.path, onerror=fail):
            for path in (Path(root, name) for name in (*directories, *files)):
                shown = str(PurePosixPath(path.relative_to(self.path)))
                if wrong := cannot_be_listed(path):
                    raise ValueError(f"{self.path}: {shown} {wrong}")
                if path.is_file():
                    names.append(shown)
        return sorted(names)

    def Has(self, name: str) -> bool:
        return (self.path / name).exists()

    def Read(self, name: str) -> bytes:
        return self._File(name).read_bytes()

    def Pieces(self, name: str) -> Iterator[memoryview]:
        with open(self._File(name), "rb", buffering=0) as file:
            piece = memoryview(bytearray(min(_PIECE, os.fstat(file.fileno()).st_size + 1)))
            while size := file.readinto(piece):
                yield piece[:size]

    def Write(self, name: str, data: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / name, data)

    def Delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def DeleteAll(self) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)

    def Spec(self, name: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{os.path.abspath(self.path / name)}/"}

    def _File(self, name: str) -> Path:
        """The path of a file that ends: to open a pipe would wait for ever."""
        path = self.path / name
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return path


class Version(NamedTuple):
    """A file in a bucket: its contents, None where there is none, and what tells it from earlier and later ones."""

    value: bytes | None
    generation: bytes


class Bucket(Store):
    """The files below an address of object storage. Raises PathError: no such storage, or no name of a bucket."""

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        match = _ADDRESS.fullmatch(address)
        scheme = match[1] if match else address.partition(":")[0]
        if scheme not in _DRIVERS:
            raise PathError(
                f"{address}: no storage is known as {scheme}://; name a local path, s3://BUCKET/PATH or "
                "gs://BUCKET/PATH"
            )
        if match is None:
            raise PathError(f"{address}: names no bucket; write {scheme}://BUCKET/PATH")
        if {".", ".."} & {*address.split("/")}:  # of a copy they would lead elsewhere
            raise PathError(f"{address}: holds . or .. as a name; write the address without them")
        self._scheme, self._bucket, self._path = match[1], match[2], match[3].strip("/")

    def Below(self, name: str) -> "Bucket":
        return Bucket(f"{self.address}/{name}")

    def List(self) -> list[str]:
        # What ends with a slash is no file: consoles and mounts leave such objects for folders, also for this one.
        keys = (key for key in self._Do("", "list") if not (b"/" + key).endswith(b"/"))
        return sorted(key.decode("utf-8", "surrogateescape") for key in keys)

    def Has(self, name: str) -> bool:
        import tensorstore as ts

        return bool(self._Do(name, "list", ts.KvStore.KeyRange(name, f"{name}\0")))

    def Read(self, name: str) -> bytes:
        if (data := self.Version(name).value) is None:
            raise FileNotFoundError(2, "No such object", f"{self.address}/{name}")
        return data

    def Pieces(self, name: str) -> Iterator[memoryview]:
        yield memoryview(self.Read(name))  # what is written there has at most about MOST bytes

    def Write(self, name: str, data: bytes) -> None:
        self._Do(name, "write", name, data)

    def Version(self, name: str) -> Version:
        """A file as it is now. Raises StoreError."""
        answer = self._Do(name, "read", name)
        value = None if answer.state == "missing" else bytes(answer.value)
        return Version(value, answer.stamp.generation)

    def Range(self, name: str, begin: int, end: int) -> bytes:
        """Bytes of a file, none where it is shorter than `end`. Raises StoreError; FileNotFoundError: there is none."""
        try:
            answer = self._Do(name, "read", name, byte_range=slice(begin, end))
        except StoreError as e:
            if _PAST_END in str(e.__cause__):
                return b""
            raise
        if answer.state == "missing":
            raise FileNotFoundError(errno.ENOENT, "No such object", f"{self.address}/{name}")
        return bytes(answer.value)

    def Generation(self, name: str) -> bytes:
        """A word that tells a file from earlier and later ones; b'' for an empty one. Raises StoreError."""
        try:
            answer = self._Do(name, "read", name, byte_range=slice(0, 1))
        except StoreError as e:
            if _PAST_END in str(e.__cause__):
                return b""
            raise
        return bytes(answer.stamp.generation)

    def IsStill(self, name: str, generation: bytes) -> bool:
        """Whether a file is still of that generation. Raises StoreError."""
        answer = self._Do(name, "read", name, if_not_equal=generation)
        return bool(answer.state == "unspecified" or answer.stamp.generation == generation)

    def Replace(self, name: str, data: bytes, generation: bytes) -> bytes:
        """Writes a file if it is still of that generation; returns its new one, b'' where it was not.

        `data` must differ between writers. Raises StoreError.
        """
        if new := self._Do(name, "write", name, data, if_equal=generation).generation:
            return bytes(new)
        # Refused: another writer was there; or a first attempt has done it, whose answer was lost.
        current = self.Version(name)
        return current.generation if current.value == data else b""

    def Delete(self, name: str) -> None:
        self._Do(name, "write", name, None)

    def DeleteAll(self) -> None:
        import tensorstore as ts

        self._Do("", "delete_range", ts.KvStore.KeyRange("", ""))

    def Spec(self, name: str) -> dict[str, Any]:
        return {**_connection(self._scheme, self._bucket), "path": self._Key(name)}

    def _Key(self, name: str) -> str:
        parts = "/".join(part for part in (self._path, name) if part)
        return f"{parts}/" if parts else ""

    def _Do(self, name: str, what: str, *args: Any, **more: Any) -> Any:
        """The result of a method of TensorStore's KvStore."""
        import tensorstore as ts

        try:
            kv = ts.KvStore.open(self.Spec(""), context=context()).result()
            return getattr(kv, what)(*args, **more).result(timeout=_PATIENCE)
        except Exception as e:
            raise StoreError(f"{self.address}/{name}: {_advice(e)}") from e


def open_store(path: str | os.PathLike) -> Store:
    """The files below a directory or an address. Nothing is read or written. Raises PathError as Bucket."""
    text = os.fspath(path)
    return Bucket(text) if "://" in text else LocalStore(text)


@functools.cache
def context() -> Any:
    """The context that TensorStore's stores of this process share: their patience, the files of memory://."""
    import tensorstore as ts

    for name, value in _STANDSTILL.items():
        os.environ.setdefault(f"TENSORSTORE_CURL_LOW_SPEED_{name}", value)
    retries = {f"{name}_request_retries": _RETRIES for name in ("s3", "gcs")}
    return ts.Context(retries)


def fresh_context(cache: int = 1 << 28) -> Any:
    """Makes a context with an empty cache, of so many bytes: nothing is read of files that have been replaced since."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": cache}}, context())


def _connection(scheme: str, bucket: str) -> dict[str, Any]:
    """TensorStore's description of a bucket."""
    spec: dict[str, Any] = {"driver": _DRIVERS[scheme]}
    if scheme == "memory":
        return spec
    spec["bucket"] = bucket
    if scheme == "gs":
        return spec
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        spec["endpoint"] = endpoint.rstrip("/")
        region = region or "us-east-1"
    if region:
        spec["aws_region"] = region
    # Without this, files are looked for first, with lines on standard error.
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def reason_of(error: Exception) -> str:
    """TensorStore's reason for an error, in one line, without its long description of the store."""
    text = re.sub(r"\s+", " ", f"{error}")
    return re.sub(r" \[(tensorstore_spec|source locations|http_response_body)=.*", "", text)


def _advice(error: Exception) -> str:
    """TensorStore's reason for an error, with advice if there is any."""
    text = reason_of(error) or type(error).__name__
    return next((f"{said} ({text})" for mark, said in _ADVICE.items() if mark in text), text)


def cannot_be_listed(path: Path) -> str:
    """Says why a path is neither a file nor a directory to descend into; '' for these."""
    if path.is_symlink() and path.is_dir():
        return "is a symbolic link to a directory; put the directory itself there"
    if path.is_symlink() and not path.exists():
        return "leads to no file; copy the directory again, or write it again"
    if path.exists() and not path.is_file() and not path.is_dir():
        return "is no file but a pipe or a device; it does not belong there"
    return ""
