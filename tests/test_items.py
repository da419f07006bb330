"""Facts: remember, remember_many, update, recall, forget, forget_all, times to live, namespaces."""

import pytest
from helpers import (
    LIMIT,
    NAME_LIMIT,
    START,
    Clock,
    Model,
    apply,
    exact,
    in_a_file,
    in_memory,
    keys,
    names,
    nested,
    operations,
    refused,
)
from hypothesis import given
from hypothesis import strategies as st

import criomem

NOW = int(START * 1000)
YEAR_9999_ENDS = 253_402_300_800.0  # seconds since 1970


# ---- remember and recall ------------------------------------------------------------------------


def test_a_plain_fact_has_exactly_five_fields(store):
    assert store.remember("users/42", "diet", "vegetarian") is None
    item = store.recall("users/42", "diet")
    assert type(item) is dict
    assert item == {
        "namespace": "users/42",
        "key": "diet",
        "value": "vegetarian",
        "created_at_ms": NOW,
        "updated_at_ms": NOW,
    }
    assert {type(item[k]) for k in ("created_at_ms", "updated_at_ms")} == {int}


def test_a_full_fact_has_exactly_ten_fields(store):
    given = {
        "label": "Diet",
        "description": "what she eats",
        "tags": ["food", "health"],
        "metadata": {
            "sure": True,
            "weight": 0.5,
            "seen": 3,
            "from": "chat",
            "days": ["mon", "tue"],
        },
    }
    store.remember("users/42", "diet", None, ttl_secs=60, **given)
    item = store.recall("users/42", "diet")
    assert item == {
        "namespace": "users/42",
        "key": "diet",
        "value": None,
        "created_at_ms": NOW,
        "updated_at_ms": NOW,
        "expires_at_ms": NOW + 60_000,
        **given,
    }
    assert exact(item["metadata"]) == exact(given["metadata"])


def test_optional_fields_given_as_none_are_absent(store):
    unset = dict.fromkeys(("ttl_secs", "label", "description", "tags", "metadata"))
    store.remember("users", "k", 1, **unset)
    assert len(store.recall("users", "k")) == 5


def test_a_missing_fact_is_none(store):
    store.remember("users/4", "k", 1)
    assert store.recall("users/4", "other") is None
    assert store.recall("users", "k") is None
    assert store.recall("users/42", "k") is None
    assert store.recall("users/4/k", "k") is None


def test_a_replaced_fact_loses_every_attribute_and_keeps_its_creation_time(store, clock):
    store.remember(
        "users", "k", 1, ttl_secs=9, label="l", description="d", tags=["t"], metadata={"m": 1}
    )
    clock.advance(5)
    store.remember("users", "k", 2)
    assert store.recall("users", "k") == {
        "namespace": "users",
        "key": "k",
        "value": 2,
        "created_at_ms": NOW,
        "updated_at_ms": NOW + 5_000,
    }
    clock.advance(60)
    assert store.recall("users", "k")["value"] == 2


def test_what_comes_out_is_a_copy(store):
    value = {"list": [1]}
    store.remember("users", "k", value, tags=["t"], metadata={"m": ["x"]})
    value["list"].append(2)
    first = store.recall("users", "k")
    first["value"]["list"].append(3)
    first["tags"].append("u")
    first["metadata"]["m"].append("y")
    again = store.recall("users", "k")
    assert (again["value"], again["tags"], again["metadata"]) == (
        {"list": [1]},
        ["t"],
        {"m": ["x"]},
    )


def test_doubled_tags_are_dropped_and_the_first_order_stays(store):
    store.remember("users", "k", 1, tags=["b", "a", "b", "a"])
    assert store.recall("users", "k")["tags"] == ["b", "a"]


def test_names_are_compared_byte_for_byte(store):
    spellings = ["café", "cafe\u0301", "CAFÉ", "cafe", "café ", "\uff43afé"]
    for n, name in enumerate(spellings):
        store.remember(name, "k", n)
        store.remember("keys", name, n)
    for n, name in enumerate(spellings):
        assert store.recall(name, "k")["value"] == n
        assert store.recall("keys", name)["value"] == n
    assert store.namespaces() == sorted([*spellings, "keys"])


@given(operations)
def test_any_history_of_calls_reads_as_a_dict_would(history):
    clock = Clock()
    model = Model(clock)
    with criomem.Storage(clock=clock) as store:
        for operation in history:
            apply(store, model, operation)
        assert store.search("", limit=None) == model.search("", limit=None)
        live = model.live()
        for name in {op[1] for op in history if op[0] in ("remember", "update", "forget")}:
            wanted = model.record(live[name]) if name in live else None
            assert store.recall(*name) == wanted
        assert store.namespaces() == sorted({namespace for namespace, _ in live})
        assert store.stats()["items"] == len(live)
        assert store.check() == []


# ---- if_absent ----------------------------------------------------------------------------------


def test_if_absent_refuses_a_live_fact_and_changes_nothing(store, clock):
    store.remember("users", "k", 1, if_absent=True)
    before = store.recall("users", "k")
    clock.advance(1)
    with refused(criomem.DuplicateError) as caught:
        store.remember("users", "k", 2, tags=["t"], if_absent=True)
    assert caught.value.code == "duplicate_id"
    assert store.recall("users", "k") == before
    store.remember("users", "other", 2, if_absent=True)
    store.remember("users/42", "k", 2, if_absent=True)


def test_if_absent_takes_a_forgotten_and_an_expired_key_afresh(store, clock):
    store.remember("users", "forgotten", 1)
    store.forget("users", "forgotten")
    store.remember("users", "expired", 1, ttl_secs=1)
    clock.advance(1)
    for key in ("forgotten", "expired"):
        store.remember("users", key, 2, if_absent=True)
        item = store.recall("users", key)
        assert (item["value"], item["created_at_ms"], "expires_at_ms" in item) == (
            2,
            NOW + 1000,
            False,
        )


# ---- remember_many ------------------------------------------------------------------------------


def test_remember_many_reads_any_iterable_and_says_how_many(store):
    wanted = [
        {"namespace": "a", "key": "1", "value": 1, "tags": ["t"], "metadata": {"m": 1}},
        {
            "namespace": "a",
            "key": "2",
            "value": None,
            "label": "l",
            "description": "d",
            "ttl_secs": 5,
        },
        {"namespace": "b", "key": "1", "value": [1]},
    ]
    assert store.remember_many(dict(one) for one in wanted) == 3
    assert store.recall("a", "1")["tags"] == ["t"]
    assert store.recall("a", "2")["expires_at_ms"] == NOW + 5_000
    assert store.recall("b", "1")["value"] == [1]
    assert store.remember_many([]) == 0
    assert store.remember_many(()) == 0


def test_the_last_of_a_repeated_key_wins_and_all_are_counted(store):
    batch = [{"namespace": "a", "key": "k", "value": n, "label": f"falcon{n}"} for n in range(5)]
    assert store.remember_many([*batch, {"namespace": "a", "key": "k", "value": "last"}]) == 6
    assert store.recall("a", "k")["value"] == "last"
    assert "label" not in store.recall("a", "k")
    assert keys(store.search("a", "last")) == ["k"]
    assert store.search("a", "falcon3") == []
    assert store.stats()["items"] == 1


def test_a_batch_is_newest_last(store):
    store.remember_many({"namespace": "a", "key": str(n), "value": n} for n in range(5))
    assert keys(store.search("a")) == ["4", "3", "2", "1", "0"]


def test_a_batch_saves_all_or_nothing_whatever_is_wrong_with_one(store):
    store.remember("a", "old", 1)
    good = {"namespace": "a", "key": "k", "value": 1}
    bad = [
        {"namespace": "a", "key": "k"},
        {"namespace": "a", "value": 1},
        {"key": "k", "value": 1},
        {**good, "value": {1, 2}},
        {**good, "key": ""},
        {**good, "namespace": "a//b"},
        {**good, "tags": "abc"},
        {**good, "ttl_secs": 0},
        {**good, "colour": "red"},
        ["a", "k", 1],
        None,
        "text",
    ]
    for one in bad:
        with refused():
            store.remember_many([good, {**good, "key": "k2"}, one])
        with refused():
            store.remember_many([one, good])
    assert keys(store.search("", limit=None)) == ["old"]
    assert store.remember_many([good]) == 1


def test_a_batch_itself_must_be_an_iterable_of_mappings(store):
    for wrong in (None, 5, "text", b"bytes", {"namespace": "a", "key": "k", "value": 1}):
        with refused():
            store.remember_many(wrong)
    assert store.search("") == []


def test_a_batch_whose_source_fails_saves_nothing_and_raises_its_error(store):
    def source():
        yield {"namespace": "a", "key": "k", "value": 1}
        raise KeyError("the source")

    with pytest.raises(KeyError, match="the source"):
        store.remember_many(source())
    assert store.recall("a", "k") is None


def test_a_batch_is_read_before_the_lock_is_taken(file_store, path):
    with criomem.Storage(path, busy_timeout_secs=0.1) as other:

        def source():
            for n in range(3):
                other.remember("other", str(n), n)
                yield {"namespace": "a", "key": str(n), "value": n}

        assert file_store.remember_many(source()) == 3
    assert len(file_store.search("", limit=None)) == 6


def test_a_batch_source_may_use_the_store_itself(store):
    def source():
        for n in range(3):
            store.remember("own", str(n), n)
            yield {"namespace": "a", "key": str(n), "value": store.recall("own", str(n))["value"]}

    assert store.remember_many(source()) == 3
    assert store.namespaces() == ["a", "own"]


def test_if_absent_in_a_batch_refuses_the_whole_batch(store):
    store.remember("a", "taken", 1)
    with refused(criomem.DuplicateError):
        store.remember_many(
            [
                {"namespace": "a", "key": "new", "value": 1},
                {"namespace": "a", "key": "taken", "value": 2, "if_absent": True},
            ]
        )
    assert store.recall("a", "new") is None
    assert store.recall("a", "taken")["value"] == 1


# ---- update -------------------------------------------------------------------------------------

FULL = {"label": "l", "description": "d", "tags": ["t"], "metadata": {"m": 1}}


@pytest.mark.parametrize("field", FULL)
def test_update_changes_only_the_field_that_is_given(store, clock, field):
    store.remember("users", "k", {"v": 1}, ttl_secs=60, **FULL)
    clock.advance(1)
    new = {"label": "new", "description": "new", "tags": ["new"], "metadata": {"new": 2}}[field]
    assert store.update("users", "k", **{field: new}) is None
    assert store.recall("users", "k") == {
        "namespace": "users",
        "key": "k",
        "value": {"v": 1},
        "created_at_ms": NOW,
        "updated_at_ms": NOW + 1000,
        "expires_at_ms": NOW + 60_000,
        **FULL,
        field: new,
    }
    store.update("users", "k", **{field: None})
    assert field not in store.recall("users", "k")


def test_update_moves_the_expiry_only_when_given_one(store, clock):
    store.remember("users", "k", 1, ttl_secs=10)
    clock.advance(5)
    store.update("users", "k", label="l")
    assert store.recall("users", "k")["expires_at_ms"] == NOW + 10_000
    store.update("users", "k", ttl_secs=10)
    assert store.recall("users", "k")["expires_at_ms"] == NOW + 15_000
    store.update("users", "k", ttl_secs=None)
    assert "expires_at_ms" not in store.recall("users", "k")
    clock.advance(1000)
    assert store.recall("users", "k")["label"] == "l"


def test_update_is_a_write_so_the_fact_is_the_newest(store):
    for key in "abc":
        store.remember("users", key, "walnut")
    store.update("users", "a", tags=["t"])
    assert keys(store.search("users")) == ["a", "c", "b"]
    assert keys(store.search("users", "walnut")) == ["a", "c", "b"]


def test_update_of_a_label_changes_what_search_finds(store):
    store.remember("users", "k", "walnut", label="falcon", description="tulip")
    store.update("users", "k", label="cobalt")
    assert store.search("users", "falcon") == []
    for word in ("walnut", "cobalt", "tulip"):
        assert keys(store.search("users", word)) == ["k"]


def test_update_of_what_is_not_there_is_not_found(store, clock):
    store.remember("users", "gone", 1)
    store.forget("users", "gone")
    store.remember("users", "expired", 1, ttl_secs=1)
    clock.advance(2)
    for key in ("never", "gone", "expired"):
        with refused(criomem.NotFoundError) as caught:
            store.update("users", key, label="l")
        assert caught.value.code == "not_found"
        assert isinstance(caught.value, LookupError)
        assert store.recall("users", key) is None


def test_update_has_no_value_argument(store):
    store.remember("users", "k", 1)
    with pytest.raises(TypeError):
        store.update("users", "k", value=2)
    assert store.recall("users", "k")["value"] == 1


@in_memory
@pytest.mark.parametrize(
    "wrong",
    [{"label": 5}, {"description": b"x"}, {"tags": "abc"}, {"metadata": []}, {"ttl_secs": -1}],
)
def test_update_refuses_what_remember_refuses(store, wrong):
    store.remember("users", "k", 1, **FULL)
    before = store.recall("users", "k")
    with refused():
        store.update("users", "k", **wrong)
    with refused():
        store.remember("users", "k", 2, **wrong)
    assert store.recall("users", "k") == before


# ---- forget -------------------------------------------------------------------------------------


def test_forget_says_whether_the_fact_was_there_and_live(store, clock):
    store.remember("users", "k", "walnut")
    store.remember("users", "expired", "walnut", ttl_secs=1)
    clock.advance(1)
    assert store.forget("users", "k") is True
    assert store.forget("users", "k") is False
    assert store.forget("users", "expired") is False
    assert store.forget("users", "never") is False
    assert store.forget("elsewhere", "k") is False
    assert store.search("", "walnut") == []
    assert store.namespaces() == []


def test_forget_of_one_key_leaves_its_neighbours(store):
    for namespace in ("users", "users/4", "users/42"):
        store.remember(namespace, "k", 1)
    assert store.forget("users", "k") is True
    assert store.namespaces() == ["users/4", "users/42"]


def test_forget_all_covers_the_subtree_and_not_its_namesakes(store, clock):
    inside = ["users/4", "users/4/a", "users/4/a/b"]
    outside = [
        "users",
        "users/42",
        "users/4-x",
        "users/40/4",
        "users/4.",
        "users/40",
        "user/4",
        "x/users/4",
    ]
    for namespace in inside + outside:
        store.remember(namespace, "k", "walnut")
    store.remember("users/4", "expired", 1, ttl_secs=1)
    clock.advance(1)
    assert store.forget_all("users/4") == 3
    assert store.namespaces() == sorted(outside)
    assert len(store.search("", "walnut", limit=None)) == len(outside)
    assert store.forget_all("users/4") == 0


@pytest.mark.parametrize("call", ["remember", "forget", "forget_all", "update", "remember_many"])
def test_the_root_is_refused_where_something_is_written_or_deleted(store, call):
    store.remember("users", "k", 1)
    calls = {
        "remember": lambda: store.remember("", "k", 1),
        "forget": lambda: store.forget("", "k"),
        "forget_all": lambda: store.forget_all(""),
        "update": lambda: store.update("", "k", label="l"),
        "remember_many": lambda: store.remember_many([{"namespace": "", "key": "k", "value": 1}]),
    }
    with refused():
        calls[call]()
    assert store.namespaces() == ["users"]


# ---- Times --------------------------------------------------------------------------------------


def test_an_expired_fact_is_absent_at_once_everywhere(store, clock):
    given = {"label": "falcon", "tags": ["t"], "metadata": {"m": 1}}
    store.remember("users/42", "k", "walnut", ttl_secs=10, **given)
    store.remember("users/7", "stays", "walnut", ttl_secs=11, **given)
    searches = [{}, {"text": "walnut"}, {"text": "falcon", "mode": "weighted"}]
    searches += [
        {**one, **more} for one in searches for more in ({"tags": ["t"]}, {"metadata": {"m": 1}})
    ]
    clock.advance(9.5)
    assert all(len(store.search("", **one)) == 2 for one in searches)
    assert store.recall("users/42", "k") is not None
    clock.advance(0.5)
    assert [keys(store.search("", **one)) for one in searches] == [["stays"]] * len(searches)
    assert [store.search("users/42", **one) for one in searches] == [[]] * len(searches)
    assert store.recall("users/42", "k") is None
    assert store.namespaces() == ["users/7"]
    assert store.stats()["items"] == 1
    assert [record["key"] for record in store.export()] == ["stays"]
    assert store.forget("users/42", "k") is False
    assert store.forget_all("users/42") == 0
    assert store.prune()["memory_items_deleted"] <= 1
    assert store.namespaces() == ["users/7"]


def test_a_fact_that_expires_inside_a_transaction_is_absent_there_too(store, clock):
    store.remember("a", "k", "walnut", ttl_secs=1)
    store.remember("a", "k2", "walnut", ttl_secs=1)
    with store.transaction():
        store.remember("a", "other", 1)
        clock.advance(1)
        assert store.recall("a", "k") is None
        assert store.search("a", "walnut") == []
        assert store.forget("a", "k") is False
        store.remember("a", "k2", "falcon", if_absent=True)
        assert store.recall("a", "k2")["value"] == "falcon"


def test_prune_removes_expired_rows_and_only_those(store, clock):
    for n in range(30):
        store.remember("a", str(n), "walnut", ttl_secs=n + 1)
    store.remember("a", "stays", "walnut")
    clock.advance(10)
    assert store.prune() == {
        "threads_deleted": 0,
        "threads_busy": 0,
        "checkpoints_deleted": 0,
        "memory_items_deleted": 10,
    }
    assert store.prune()["memory_items_deleted"] == 0
    assert len(store.search("a", "walnut", limit=None)) == 21


def test_prune_reports_its_progress(store, clock):
    for n in range(50):
        store.remember("a", str(n), n, ttl_secs=1)
    clock.advance(1)
    calls = []
    assert (
        store.prune(progress=lambda done, total: calls.append((done, total)))[
            "memory_items_deleted"
        ]
        == 50
    )
    assert calls
    assert calls[-1][0] == 50
    assert all(total is None or done <= total for done, total in calls)


def test_a_fact_remembered_over_an_expired_one_starts_afresh(store, clock):
    store.remember("users", "k", 1, ttl_secs=1, label="old")
    clock.advance(5)
    store.remember("users", "k", 2)
    item = store.recall("users", "k")
    assert item["created_at_ms"] == item["updated_at_ms"] == NOW + 5_000
    assert set(item) == {"namespace", "key", "value", "created_at_ms", "updated_at_ms"}


def test_a_clock_that_steps_back_revives_nothing_after_a_write(store, clock):
    store.remember("users", "k", "walnut", ttl_secs=10)
    clock.advance(20)
    store.remember("users", "later", 1)
    clock.now = START
    assert store.recall("users", "k") is None
    assert store.search("users", "walnut") == []
    assert keys(store.search("users")) == ["later"]
    store.remember("users", "k", 2, if_absent=True)
    assert store.recall("users", "k")["created_at_ms"] == NOW + 20_000


def test_a_clock_that_steps_back_revives_nothing_that_was_read_as_gone(store, clock):
    store.remember("users", "k", "walnut", ttl_secs=10)
    clock.advance(20)
    assert store.recall("users", "k") is None
    clock.now = START
    assert store.recall("users", "k") is None
    assert store.search("users", "walnut") == []
    assert store.search("users") == []
    assert store.namespaces() == []


def test_a_file_opened_under_a_clock_that_is_behind_revives_nothing(path, clock):
    with criomem.Storage(path, clock=clock) as store:
        store.remember("users", "k", "walnut", ttl_secs=10)
        clock.advance(20)
        store.remember("users", "later", 1)
    behind = Clock(START)
    with criomem.Storage(path, clock=behind) as store:
        assert store.recall("users", "k") is None
        assert store.search("users", "walnut") == []
        store.remember("users", "now", 1)
        assert store.recall("users", "now")["created_at_ms"] == NOW + 20_000


def test_two_stores_of_one_file_with_different_clocks_agree_on_what_expired(
    file_store, path, clock
):
    with criomem.Storage(path, clock=Clock(START)) as behind:
        file_store.remember("users", "k", "walnut", ttl_secs=10)
        assert behind.recall("users", "k") is not None
        clock.advance(20)
        file_store.remember("users", "later", 1)
        assert behind.recall("users", "k") is None
        assert behind.search("users", "walnut") == []


def test_stamps_never_go_back_when_the_clock_does(store, clock):
    store.remember("users", "a", 1)
    clock.advance(-3600)
    store.remember("users", "b", 1)
    store.remember("users", "a", 2)
    clock.advance(3601)
    store.remember("users", "c", 1)
    stamps = [store.recall("users", key)["updated_at_ms"] for key in "abc"]
    assert stamps == [NOW, NOW, NOW + 1000]
    assert keys(store.search("users")) == ["c", "a", "b"]


@in_memory
@pytest.mark.parametrize(
    "ttl", [0, -1, -0.0, float("nan"), float("inf"), 1e300, 10**400, True, "60", b"6", [60]]
)
def test_a_time_to_live_is_a_positive_finite_number(store, ttl):
    with refused():
        store.remember("users", "k", 1, ttl_secs=ttl)
    with refused():
        store.remember_many([{"namespace": "users", "key": "k", "value": 1, "ttl_secs": ttl}])
    store.remember("users", "k", 1)
    with refused():
        store.update("users", "k", ttl_secs=ttl)
    assert "expires_at_ms" not in store.recall("users", "k")


def test_expiry_ends_with_the_year_9999(store):
    store.remember("users", "k", 1, ttl_secs=YEAR_9999_ENDS - START - 1)
    assert store.recall("users", "k")["expires_at_ms"] == int(YEAR_9999_ENDS - 1) * 1000
    for too_far in (YEAR_9999_ENDS - START, YEAR_9999_ENDS, 1e15):
        with refused():
            store.remember("users", "k", 1, ttl_secs=too_far)


@in_memory
@pytest.mark.parametrize("ttl", [1e-9, 0.0004, 0.001])
def test_a_tiny_time_to_live_is_accepted_and_over_within_milliseconds(store, clock, ttl):
    store.remember("users", "k", 1, ttl_secs=ttl)
    clock.advance(0.01)
    assert store.recall("users", "k") is None


# ---- Namespaces ---------------------------------------------------------------------------------

TREE = ["a", "a/b", "a/b/c", "a/b/c/d", "a-b", "a0", "ab", "b/x", "b/y/z"]


@pytest.fixture
def tree(store):
    store.remember_many({"namespace": namespace, "key": "k", "value": 1} for namespace in TREE)
    return store


@in_memory
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, sorted(TREE)),
        ({"prefix": ""}, sorted(TREE)),
        ({"prefix": "a"}, ["a", "a/b", "a/b/c", "a/b/c/d"]),
        ({"prefix": "a/b"}, ["a/b", "a/b/c", "a/b/c/d"]),
        ({"prefix": "a/b/c/d"}, ["a/b/c/d"]),
        ({"prefix": "b"}, ["b/x", "b/y/z"]),
        ({"prefix": "c"}, []),
        ({"depth": 1}, ["a", "a-b", "a0", "ab", "b"]),
        ({"depth": 2}, ["a", "a-b", "a/b", "a0", "ab", "b/x", "b/y"]),
        ({"depth": 9}, sorted(TREE)),
        ({"depth": None}, sorted(TREE)),
        ({"prefix": "a", "depth": 1}, ["a", "a/b"]),
        ({"prefix": "a", "depth": 2}, ["a", "a/b", "a/b/c"]),
        ({"prefix": "b", "depth": 1}, ["b/x", "b/y"]),
        ({"prefix": "b/y", "depth": 1}, ["b/y/z"]),
    ],
)
def test_namespaces_are_listed_by_prefix_and_depth(tree, asked, wanted):
    assert tree.namespaces(**asked) == wanted


@in_memory
@pytest.mark.parametrize("depth", [-1, True, 1.5, "1"])
def test_depth_is_a_count(store, depth):
    with refused():
        store.namespaces(depth=depth)


@given(st.lists(names, max_size=8), names, st.integers(1, 3))
def test_namespaces_are_cut_and_deduped_as_paths(pairs, prefix, depth):
    with criomem.Storage() as store:
        for namespace, key in pairs:
            store.remember(namespace, key, 1)
        there = {namespace for namespace, _ in pairs}
        below = {n for n in there if n == prefix[0] or n.startswith(prefix[0] + "/")}
        levels = prefix[0].count("/") + 1 + depth
        cut = {"/".join(n.split("/")[:levels]) for n in below}
        assert store.namespaces(prefix[0]) == sorted(below)
        assert store.namespaces(prefix[0], depth=depth) == sorted(cut)


# ---- Limits -------------------------------------------------------------------------------------

BAD_NAMESPACES = [
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/.",
    "a/..",
    "./a",
    "../a",
    "a/../b",
    "a\x00b",
    "a\nb",
    "a\x1fb",
    "a\x7fb",
    "a\x85b",
    "a\ud800b",
    "a\ud83d\ude00b",
]
NO_STRINGS = [None, 5, 1.5, True, b"a", ["a"], ("a", "b"), {"a": 1}, object()]


@in_memory
@pytest.mark.parametrize("namespace", [*BAD_NAMESPACES, *NO_STRINGS], ids=repr)
def test_a_bad_namespace_is_refused_by_every_call(store, namespace):
    calls = [
        lambda: store.remember(namespace, "k", 1),
        lambda: store.remember_many([{"namespace": namespace, "key": "k", "value": 1}]),
        lambda: store.update(namespace, "k", label="l"),
        lambda: store.recall(namespace, "k"),
        lambda: store.forget(namespace, "k"),
        lambda: store.forget_all(namespace),
        lambda: store.search(namespace),
        lambda: store.search(namespace, "walnut"),
        lambda: store.namespaces(namespace),
        lambda: list(store.export(namespace)),
    ]
    for call in calls:
        with refused():
            call()
    assert store.namespaces() == []


@in_memory
@pytest.mark.parametrize(
    "key", ["", "a\x00b", "a\nb", "\x7f", "\x9f", "a\ud800", *NO_STRINGS], ids=repr
)
def test_a_bad_key_is_refused_by_every_call(store, key):
    calls = [
        lambda: store.remember("a", key, 1),
        lambda: store.remember_many([{"namespace": "a", "key": key, "value": 1}]),
        lambda: store.update("a", key, label="l"),
        lambda: store.recall("a", key),
        lambda: store.forget("a", key),
    ]
    for call in calls:
        with refused():
            call()
    assert store.namespaces() == []


@in_memory
@pytest.mark.parametrize(
    "key", ["/", "a//b", ".", "..", " ", "%", "_", "'", '"', "\ue000", "🙂", "a\u200db"]
)
def test_an_odd_key_is_a_key(store, key):
    store.remember("a", key, 1)
    assert store.recall("a", key)["value"] == 1
    assert keys(store.search("a")) == [key]
    assert store.forget("a", key) is True


@in_memory
@pytest.mark.parametrize(
    "namespace", ["...", ".a", "a.", "a b", " ", "%", "a_b", "*", "[a]", "'", "🙂/é", "\ue000"]
)
def test_an_odd_namespace_is_a_namespace(store, namespace):
    store.remember(namespace, "k", "walnut")
    assert store.namespaces() == [namespace]
    assert keys(store.search(namespace, "walnut")) == ["k"]
    assert store.forget_all(namespace) == 1


@in_memory
@pytest.mark.parametrize(("letter", "size"), [("a", 1), ("é", 2), ("字", 3), ("🙂", 4)])
def test_names_may_have_512_bytes(store, letter, size):
    full = letter * (NAME_LIMIT // size) + "a" * (NAME_LIMIT % size)
    for name in (full[:-1], full):
        store.remember(name, name, "walnut")
        assert store.recall(name, name)["key"] == name
    with refused():
        store.remember(full + "a", "k", 1)
    with refused():
        store.remember("a", full + "a", 1)
    with refused():
        store.search(full + "a")


@in_a_file
@pytest.mark.parametrize(
    ("letter", "size"),
    [
        ("a", 1),
        ("é", 2),
        ("字", 3),
        ("🙂", 4),
        ("\ud800", 3),
        ("\x00", 6),
        ('"', 2),
        ("\\", 2),
        ("\n", 2),
    ],
    ids=ascii,
)
def test_a_value_may_have_one_mebibyte_of_json(store, letter, size):
    room = LIMIT - 2  # the quotes
    full = letter * (room // size) + "a" * (room % size)
    for value in (full[:-1], full):
        store.remember("a", "k", value)
        assert store.recall("a", "k")["value"] == value
    before = store.recall("a", "k")
    with refused():
        store.remember("a", "k", full + "a")
    assert store.recall("a", "k") == before


@in_memory
def test_a_value_is_measured_as_compact_json(store):
    room = LIMIT - len('{"k":["",1,2]}')
    store.remember("a", "k", {"k": ["a" * room, 1, 2]})
    assert len(store.recall("a", "k")["value"]["k"][0]) == room
    with refused():
        store.remember("a", "k", {"k": ["a" * (room + 1), 1, 2]})


@in_memory
@pytest.mark.parametrize("depth", [1, 99, 100])
def test_a_value_may_be_nested_a_hundred_deep(store, depth):
    in_dicts = {}
    for _ in range(depth - 1):
        in_dicts = {"k": in_dicts}
    for value in (nested(depth), nested(depth, "leaf"), in_dicts):
        store.remember("a", "k", value)
        assert store.recall("a", "k")["value"] == value


@in_memory
@pytest.mark.parametrize("depth", [101, 990, 1_100, 100_000])
def test_a_value_nested_deeper_is_refused(store, depth):
    value = nested(depth)
    with refused():
        store.remember("a", "k", value)
    with refused():
        store.remember("a", "k", {"k": value})
    while value:
        value = value.pop()  # taken apart, or its own end would recurse
    store.remember("a", "k", 1)


@in_memory
def test_tags_have_their_limits(store):
    for good in (
        [str(n) for n in range(64)],
        ["t" * 256],
        ["字" * 256],
        ["t"],
        ("t", "u"),
        ["é%_'\"/"],
    ):
        store.remember("a", "k", 1, tags=good)
        assert store.recall("a", "k")["tags"] == list(good)
    before = store.recall("a", "k")
    for bad in (
        [str(n) for n in range(65)],
        [str(n) for n in range(10_000)],
        ["t" * 257],
        [""],
        ["a\x00b"],
        ["a\nb"],
        ["\ud800"],
        [1],
        [None],
        [["t"]],
        "abc",
        b"abc",
        5,
        {"t": 1},
    ):
        with refused():
            store.remember("a", "k", 2, tags=bad)
    assert store.recall("a", "k") == before


def test_empty_attributes_are_unset(store):
    store.remember("a", "k", 1, tags=[], metadata={})
    assert len(store.recall("a", "k")) == 5


GOOD_METADATA = [
    {f"f{n}": n for n in range(64)},
    {"s": "x" * 1024},
    {"s": "字" * 1024},
    {"s": ""},
    {"least": -(2**63), "most": 2**63 - 1},
    {"f": 1.5, "g": -0.0, "h": 1e308, "i": 5e-324},
    {"true": True, "false": False},
    {"l": [str(n) for n in range(64)], "e": [], "long": ["x" * 1024]},
    {"a.b": 1, '"': 2, "$": 3, "字": 4, " ": 5, "$.a": 6, "[0]": 7},
]
BAD_METADATA = [
    {f"f{n}": n for n in range(65)},
    {f"f{n}": n for n in range(100_000)},
    {"s": "x" * 1025},
    {"n": 2**63},
    {"n": -(2**63) - 1},
    {"f": float("nan")},
    {"f": float("inf")},
    {"l": ["x"] * 65},
    {"l": ["x" * 1025]},
    {"l": [1]},
    {"l": ["a", 1]},
    {"l": [["a"]]},
    {"d": {"a": 1}},
    {"n": None},
    {"b": b"x"},
    {"s": "a\x00b"},
    {"s": "a\nb"},
    {"s": "\ud800"},
    {"a\x00b": 1},
    {"\ud800": 1},
    {1: "a"},
    {None: 1},
    [("a", 1)],
    "text",
    5,
]


@in_memory
@pytest.mark.parametrize("metadata", GOOD_METADATA, ids=range(len(GOOD_METADATA)))
def test_good_metadata_comes_out_as_it_went_in(store, metadata):
    store.remember("a", "k", 1, metadata=metadata)
    assert exact(store.recall("a", "k")["metadata"]) == exact(metadata)


@in_memory
@pytest.mark.parametrize("metadata", BAD_METADATA, ids=range(len(BAD_METADATA)))
def test_bad_metadata_is_refused(store, metadata):
    store.remember("a", "k", 1, metadata={"m": 1})
    with refused():
        store.remember("a", "k", 2, metadata=metadata)
    with refused():
        store.update("a", "k", metadata=metadata)
    assert store.recall("a", "k")["metadata"] == {"m": 1}


@in_memory
@pytest.mark.parametrize(("field", "limit"), [("label", 1024), ("description", 16_384)])
def test_labels_and_descriptions_have_their_limits(store, field, limit):
    for good in ("x" * (limit - 1), "x" * limit, "é" * (limit // 2)):
        store.remember("a", "k", 1, **{field: good})
        assert store.recall("a", "k")[field] == good
    for bad in ("x" * (limit + 1), "é" * (limit // 2 + 1), 5, b"x", ["x"], True):
        with refused():
            store.remember("a", "k", 1, **{field: bad})


@in_memory
@pytest.mark.parametrize("option", ["limit", "offset"])
@pytest.mark.parametrize("text", [None, "walnut"])
def test_limit_and_offset_are_counts(store, text, option):
    store.remember("a", "k", "walnut")
    for wrong in (-1, True, False, 1.0, "1", float("inf"), float("nan"), b"1"):
        with refused():
            store.search("a", text, **{option: wrong})
    assert keys(store.search("a", text, limit=2**70)) == ["k"]
    assert store.search("a", text, offset=2**70) == []
    assert store.search("a", text, limit=0) == []


def test_everything_may_be_empty_that_may_be(store):
    for value in ("", [], {}, [[]], [{}], {"": ""}, {"": []}):
        store.remember("a", "k", value, tags=None, metadata=None)
        assert exact(store.recall("a", "k")["value"]) == exact(value)
        assert keys(store.search("a")) == ["k"]
