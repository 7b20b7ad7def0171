"""Files in a directory and in a bucket are alike, whatever goes wrong on the way."""

import threading

import pytest
from object_storage import FAULTS, bucket
from processes import run_python
from refusals import refuses

from lingvo_moe.core.files.manifest import ManifestError, verify_manifest, write_manifest
from lingvo_moe.core.files.paths import PathError
from lingvo_moe.core.files.store import Bucket, LocalStore, Store, StoreError, open_store


@pytest.fixture(scope="module")
def storage():
    with bucket() as found:
        found.page = 3
        yield found


@pytest.fixture(params=["directory", "s3", "memory"])
def store(request, tmp_path, storage) -> Store:
    places = {
        "directory": str(tmp_path / "new" / "place"),
        "s3": f"s3://bucket/{tmp_path.name}/place",
        "memory": f"memory://x/{tmp_path.name}/place",
    }
    return open_store(places[request.param])


def test_files_are_written_read_listed_and_deleted(store):
    assert not store.Has("a/b")
    names = ["a/b", "a/b c", "größe", "x/1", "x/2", "x/3", "x/4"]
    for name in names:
        store.Write(name, name.encode())
    store.Write("a/b", b"again")
    assert store.List() == names
    assert store.Read("a/b") == b"again" and b"".join(store.Pieces("größe")) == "größe".encode()
    assert store.Below("x").List() == ["1", "2", "3", "4"] and store.Below("x").Read("3") == b"x/3"
    assert (store.Has("x/1") and not store.Has("x")) or isinstance(store, LocalStore)
    with pytest.raises(FileNotFoundError, match="x/5"):
        store.Read("x/5")
    store.Delete("x/1")
    store.Delete("x/1")
    store.Below("a").DeleteAll()
    assert store.List() == ["größe", "x/2", "x/3", "x/4"]


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_ranges_of_a_file(scheme, storage, tmp_path):
    store = Bucket(f"{scheme}://bucket/{tmp_path.name}/place")
    store.Write("a", bytes(range(100)))
    store.Write("empty", b"")
    assert store.Range("a", 90, 100) == bytes(range(90, 100))
    assert [store.Range("a", at, at + 2) for at in (99, 100, 200)] == [b""] * 3
    with pytest.raises(FileNotFoundError, match="place/none"):
        store.Range("none", 0, 1)
    first = store.Generation("a")
    assert first == store.Generation("a") and store.Generation("empty") == b""
    store.Write("a", b"other")
    assert store.Generation("a") != first


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_of_many_writers_one_creates_a_file(scheme, storage, tmp_path):
    store = Bucket(f"{scheme}://bucket/{tmp_path.name}/place")
    absent, won = store.Version("one").generation, []

    def create(i):
        won.append((i, store.Replace("one", b"%d" % i, absent)))

    writers = [threading.Thread(target=create, args=[i]) for i in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (winner,) = [i for i, created in won if created]
    assert store.Read("one") == b"%d" % winner and store.List() == ["one"]
    assert not store.Replace("one", b"late", absent)
    there = store.Version("one").generation
    assert store.IsStill("one", there) and store.IsStill("two", absent)
    assert not store.IsStill("one", absent) and not store.IsStill("two", there)
    assert store.Replace("one", b"again", there) and not store.IsStill("one", there)


_READ = """
from lingvo_moe.core.files.store import open_store
print(open_store("s3://bucket/standstill").Read("a"))
"""


def test_a_transfer_that_stands_still_is_repeated(storage):
    """Runs in a process of its own, which keeps the seconds that it begins with; here 1 instead of 30."""
    open_store("s3://bucket/standstill").Write("a", b"whole")
    storage.faults.append("hang")
    env = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"}
    done = run_python("-c", _READ, env=env, timeout=50)
    assert done.stdout == "b'whole'\n", done.stderr
    assert not storage.faults


def test_an_answer_that_was_lost_is_not_taken_for_another_writer(storage, tmp_path):
    store = Bucket(f"s3://bucket/{tmp_path.name}")
    first = store.Replace("x", b"1", store.Version("x").generation)
    storage.faults.extend(["", "500 after"])  # of HEAD and PUT
    second = store.Replace("x", b"2", first)
    assert second and store.Version("x") == (b"2", second)
    assert store.Replace("x", b"3", first) == b"" and store.Read("x") == b"2"


def test_a_list_of_files_finds_what_differs(store):
    for name in ("a", "b/c", "b/d"):
        store.Write(name, name.encode() * 1000)
    write_manifest(store, "list")
    verify_manifest(store, "list")
    store.Write("b/c", b"b/d" * 1000)
    with pytest.raises(ManifestError, match=r"b/c was changed or damaged"):
        verify_manifest(store, "list")
    store.Delete("b/c")
    with pytest.raises(ManifestError, match="b/c is missing"):
        verify_manifest(store, "list")


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_objects_that_stand_for_folders_are_no_files(scheme, storage, tmp_path):
    store = Bucket(f"{scheme}://bucket/{tmp_path.name}")
    for name in ("a/", "a/b", "a/c/", "d/"):
        store.Write(name, b"")
    assert store.List() == ["a/b"] and store.Below("a").List() == ["b"]
    store.DeleteAll()
    assert not store._Do("", "list")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_once_or_twice_is_repeated(storage, tmp_path, fault):
    store = Bucket(f"s3://bucket/{tmp_path.name}")

    def twice(work):
        storage.faults.extend([fault] * (1 if fault == "slow" else 2))
        return work()

    content = bytes(range(256)) * 1000
    twice(lambda: store.Write("a", content))
    assert twice(lambda: store.Read("a")) == content
    for i in range(8):
        store.Write(f"b{i}", b"")
    assert twice(store.List) == ["a", *(f"b{i}" for i in range(8))]
    absent = store.Version("one").generation
    assert twice(lambda: store.Replace("one", b"by me", absent))
    assert not twice(lambda: store.Replace("one", b"by me too", absent))
    twice(lambda: store.Delete("a"))
    assert not store.Has("a") and not storage.faults


@refuses(
    PathError,
    ("s3://no-such-bucket/x", StoreError, r"^s3://no-such-bucket/x/: there is no such bucket"),
    ("s3:///x", "^s3:///x: names no bucket; write s3://BUCKET/PATH"),
    ("s3://bucket/run/../x", r"^s3://bucket/run/../x: holds . or .. as a name; write the address"),
    ("memory://../x", r"^memory://../x: holds . or .. as a name"),
    ("az://b/x", "^az://b/x: no storage is known as az://; name a local path, s3:"),
)
def test_an_address_that_leads_nowhere(address, storage):
    open_store(address).List()


def test_nobody_answers_and_no_credentials(storage, monkeypatch):
    with monkeypatch.context() as m:
        m.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(StoreError, match=r"^s3://bucket/x/a: set AWS_ACCESS_KEY_ID and"):
            open_store("s3://bucket/x").Read("a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"^s3://bucket/x/a: no answer; .*AWS_ENDPOINT_URL"):
        open_store("s3://bucket/x").Read("a")
