"""Pages that are taken, shared and given back in any order: each has the users that it should, and none is lost."""

import collections

from hypothesis import given, settings, strategies as st

from lingvo_moe.core.decode.pages import PagePool, name_of


@settings(max_examples=200)
@given(
    pages=st.integers(1, 6),
    acts=st.lists(st.tuples(st.sampled_from(["take", "find", "name", "give"]), st.integers(0, 5))),
)
def test_pages_are_in_use_free_or_kept_for_their_names(pages, acts):
    pool, users, names = PagePool(pages), collections.Counter(), {}
    for act, number in acts:
        name, used = name_of(b"", [number]), sorted(users)
        if act == "take":
            page, free = pool.Take(), pages - len(users)
            assert bool(page) == bool(free) and page not in users
            names = {one: at for one, at in names.items() if at != page}
            users.update([page] * bool(page))
        elif act == "find":
            page = pool.Find(name)
            assert page == names.get(name, 0)
            users.update([page] * bool(page))
        elif used:
            page = used[number % len(used)]
            if act == "give":
                pool.Give(page)
                users -= collections.Counter([page])
            elif page not in names.values():
                pool.Name(page, name)
                names.setdefault(name, page)
        assert pool.free == pages - len(users)
    for page, count in users.items():
        for _ in range(count):
            pool.Give(page)
    assert sorted(pool.Take() for _ in range(pages)) == [*range(1, pages + 1)] and not pool.Take()


def test_a_name_says_all_tokens_up_to_it():
    first = name_of(b"", [1, 2])
    names = [
        first,
        name_of(b"", [2, 1]),
        name_of(first, [1, 2]),
        name_of(name_of(b"", [3]), [1, 2]),
    ]
    assert len({*names}) == 4 and name_of(first, [1, 2]) == names[2]
