"""Threads: messages, state, checkpoints, rewind, branches, forks, search, and what is refused."""

import json

import pytest
from helpers import refused
from hypothesis import given
from hypothesis import strategies as st

import criomem


def contents_of(thread, **options):
    return [message["content"] for message in thread.messages(**options)]


@pytest.fixture
def chat(store):
    return store.thread("chat", namespace="users/42")


# ---- Messages and state -------------------------------------------------------------------------


def test_a_thread_is_made_at_the_first_save_and_a_handle_makes_nothing(store, chat):
    assert (chat.exists(), chat.info(), chat.state(), chat.messages()) == (False, None, {}, [])
    assert (chat.history(), chat.branches(), chat.tree(), store.threads()) == ([], [], "", [])
    chat.save()
    assert chat.exists()
    assert chat.info()["message_count"] == 0


def test_records_have_exactly_the_fields_of_the_contract(chat, clock):
    clock.advance(1)
    message = chat.append("user", "hello", id="m1", name="Ada", tags=["t"], metadata={"n": 1})
    checkpoint = chat.history()[0]
    stamps = {"created_at_ms": clock.ms, "updated_at_ms": clock.ms}
    assert message == {
        "id": "m1", "role": "user", "content": "hello", "name": "Ada", "tags": ["t"],
        "metadata": {"n": 1}, "checkpoint": checkpoint["id"], **stamps,
    }  # fmt: skip
    assert chat.messages() == [message]
    assert checkpoint == {
        "id": checkpoint["id"], "thread_id": "chat", "namespace": "users/42", "parent": None,
        "created_at_ms": clock.ms, "message_count": 1,
    }  # fmt: skip
    assert chat.info() == {
        "namespace": "users/42", "id": "chat", "status": "active", "running": False,
        "head": checkpoint["id"], "message_count": 1, "saved_at_ms": clock.ms, **stamps,
    }  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "plain"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "u"}]},
        {"role": "user", "content": {"parts": ["a", {"b": 1}]}},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "args": {"q": "x"}}]},
        {"role": "assistant", "content": "", "reasoning": "why", "refusal": None},
        {"role": "assistant", "tool_calls": []},
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "search"},
    ],
    ids=["text", "parts", "dict", "tool calls", "empty with more", "no content", "tool result"],
)
def test_messages_of_the_usual_clients_come_out_as_they_went_in(chat, message):
    chat.save(messages=[message])
    record = dict(chat.messages()[0])
    for added in ("id", "created_at_ms", "updated_at_ms", "checkpoint"):
        record.pop(added)
    assert record == message
    chat.save(messages=[{**chat.messages()[0], "id": "again"}])  # a record may be saved again
    assert contents_of(chat)[0] == contents_of(chat)[1] if "content" in message else True


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"}, {"role": "", "content": "x"}, {"role": 5, "content": "x"},
        {"role": "user"}, {"role": "user", "content": ""}, {"role": "user", "content": None},
        {"role": "user", "content": None, "name": "Ada"}, {"role": "user", "content": []},
        {"role": "user", "content": ["text"]}, {"role": "user", "content": 5},
        {"role": "user", "content": "x", "extra": {1}}, {"role": "user", "content": "x", "id": ""},
        {"role": "user", "content": "x", "id": "a\x00"},
        {"role": "user", "content": "x", "name": 5},
        {"role": "user", "content": "x", "tags": "t"}, {"role": "user", "content": "x" * 1_048_577},
        {"role": "user", "content": "x", "metadata": {"a": None}}, "text", None,
    ],
)  # fmt: skip
def test_a_bad_message_is_refused_by_its_place_and_nothing_is_saved(locked_out, message):
    thread = locked_out.thread("t")
    with refused() as caught:
        thread.save(messages=[{"role": "user", "content": "good"}, message])
    assert "messages[1]" in str(caught.value)


@pytest.mark.parametrize("state", [[], "x", 5, {1: 2}, {"a": {1}}, {"a": float("nan")}])
def test_a_state_must_be_a_json_object(locked_out, state):
    with refused():
        locked_out.thread("t").save(state=state)


def test_a_state_holds_16_mib_and_no_more(chat):
    text = "x" * (16_777_216 - len('{"a":""}'))
    chat.save(state={"a": text})
    assert chat.state() == {"a": text}
    with refused():
        chat.save(state={"a": text + "x"})


def test_the_state_is_a_fresh_copy_and_stays_until_another_is_given(chat):
    chat.append("user", "a", state={"list": [1]})
    chat.state()["list"].append(2)
    chat.append("user", "b")
    assert chat.state() == {"list": [1]}
    chat.save(state={})
    assert chat.state() == {}


def test_a_state_is_stored_only_when_its_text_changed(file_store):
    thread = file_store.thread("t")
    for state in ({"n": 1}, {"n": 1}, {"n": 1.0}, {"n": True}, {"n": True}):
        thread.save(state=state)
    with file_store._db.read() as connection:
        assert connection.execute("SELECT count(*) FROM state").fetchone()[0] == 3
    assert [type(thread.get_checkpoint(c["id"])["state"]["n"]) for c in thread.history()] == [
        bool, bool, float, int, int,
    ]  # fmt: skip


def test_limit_takes_the_newest_and_before_goes_on_from_there(chat):
    ids = [chat.append("user", str(n))["id"] for n in range(10)]
    assert contents_of(chat, limit=3) == ["7", "8", "9"]
    assert contents_of(chat, limit=3, before=ids[7]) == ["4", "5", "6"]
    assert contents_of(chat, limit=0) == []
    assert contents_of(chat, before=ids[0]) == []
    with refused(criomem.NotFoundError):
        chat.messages(before="nobody")


def test_an_id_that_the_branch_has_is_a_duplicate_and_nothing_is_saved(chat):
    chat.append("user", "a", id="m")
    for messages in ([{"role": "user", "content": "b", "id": "m"}],
                     [{"role": "user", "content": "b", "id": "x"}] * 2):  # fmt: skip
        with refused(criomem.DuplicateError):
            chat.save(messages=messages)
    assert contents_of(chat) == ["a"]


def test_ids_made_by_the_store_sort_by_time(chat, clock):
    ids = []
    for n in range(30):
        clock.advance(n % 2)
        ids += [m["id"] for m in [chat.append("user", "x")]]
    chat.save(messages=[{"role": "user", "content": str(n)} for n in range(30)])
    assert sorted(ids) == ids or len({i[:12] for i in ids}) < len(ids)
    batch = [m["id"] for m in chat.messages(limit=30)]
    assert sorted(batch) == batch


def test_expected_head_lets_only_one_of_two_writers_in(chat):
    first = chat.save(expected_head=None)
    with refused(criomem.ConflictError):
        chat.save(expected_head=None)
    second = chat.save(expected_head=first["id"])
    with refused(criomem.ConflictError):
        chat.save(messages=[{"role": "user", "content": "x"}], expected_head=first["id"])
    assert (chat.info()["head"], chat.messages()) == (second["id"], [])


def test_an_ended_thread_takes_no_messages_but_its_state_may_change(chat, clock):
    chat.append("user", "a")
    clock.advance(1)
    chat.update(status="ended")
    assert chat.info()["ended_at_ms"] == clock.ms
    with refused(criomem.ConflictError):
        chat.append("user", "b")
    chat.save(state={"n": 1})
    chat.update(status="active")
    assert "ended_at_ms" not in chat.info()
    chat.append("user", "b")


def test_update_changes_only_what_is_given(chat, clock):
    chat.save()
    saved = chat.info()["saved_at_ms"]
    clock.advance(5)
    chat.update(label="a label", tags=["x"], metadata={"k": 1})
    chat.update(tags=None)
    info = chat.info()
    assert (info["label"], info["metadata"], info.get("tags")) == ("a label", {"k": 1}, None)
    assert (info["saved_at_ms"], info["updated_at_ms"]) == (saved, clock.ms)
    with refused(criomem.NotFoundError):
        chat._storage.thread("none").update(label="x")
    with refused():
        chat.update(status="asleep")


# ---- Rewind, branches, forks --------------------------------------------------------------------


def branched(chat):
    """1 (a) - 2 (b) - 3 (c), and 1 - 4 (d) with the head on 4."""
    a, b, c = (chat.append("user", word, state={"at": word}) for word in ("a", "b", "c"))
    chat.rewind(a["checkpoint"])
    d = chat.append("user", "d", state={"at": "d"})
    return [m["checkpoint"] for m in (a, b, c, d)]


def test_a_rewind_moves_the_head_and_leaves_a_branch(store, chat):
    a, _b, c, d = branched(chat)
    assert (contents_of(chat), chat.state()) == (["a", "d"], {"at": "d"})
    assert [(x["head"], x["fork"], x["checkpoints"], x["current"]) for x in chat.branches()] == [
        (d, None, 2, True),
        (c, a, 2, False),
    ]
    assert [x["id"] for x in chat.history()] == [d, a]
    assert contents_of(chat, checkpoint=c) == ["a", "b", "c"]
    assert store.search_messages("b") == []
    back = chat.rewind(c)
    assert (back["id"], contents_of(chat), chat.state()) == (c, ["a", "b", "c"], {"at": "c"})
    assert [m["content"] for m in store.search_messages("b")] == ["b"]
    assert store.search_messages("d") == []


def test_a_rewind_to_another_thread_s_checkpoint_or_to_nothing_is_not_found(store, chat):
    other = store.thread("other").save()["id"]
    for wrong in (other, 10**9, -1, 2**70, "1", None):
        with refused(criomem.NotFoundError):
            chat.rewind(wrong)
    chat.save()
    for wrong in (other, 10**9):
        with refused(criomem.NotFoundError):
            chat.rewind(wrong)


def test_a_retry_after_a_rewind_may_use_the_same_id(chat):
    before = chat.append("user", "a", id="1")["checkpoint"]
    chat.append("user", "b", id="2")
    chat.rewind(before)
    chat.append("user", "c", id="2")
    assert contents_of(chat) == ["a", "c"]


def test_the_tree_is_drawn_with_its_head_and_labels(chat):
    a, b, c, d = branched(chat)
    chat.save(label="a name")
    assert chat.tree() == f"{a}\n|\\\n| {b}\n| {c}\n{d}\n{d + 1}  a name  <- head"
    page = chat.tree("mermaid")
    assert page.startswith("graph TD\n")
    assert f"c{a} --> c{b}" in page
    assert f'c{d + 1}(["{d + 1} a name (head)"])' in page
    with refused():
        chat.tree("dot")


def test_a_fork_is_a_thread_of_its_own_with_the_path_so_far(store, chat):
    _a, b, _c, _d = branched(chat)
    chat.update(label="the label", tags=["x"])
    copy = chat.fork("copy", checkpoint_id=b)
    assert (copy.namespace, contents_of(copy), copy.state()) == (
        "users/42",
        ["a", "b"],
        {"at": "b"},
    )
    assert [x["message_count"] for x in copy.history()] == [2, 1]
    assert copy.info()["label"] == "the label"
    copy.append("user", "only here")
    assert contents_of(chat) == ["a", "d"]
    assert {m["thread_id"] for m in store.search_messages("a")} == {"chat", "copy"}
    with refused(criomem.DuplicateError):
        chat.fork("copy")
    with refused(criomem.NotFoundError):
        store.thread("nothing").fork()
    assert chat.fork().id != chat.fork().id


def test_deep_nests_of_branches_read_as_they_were_written(chat):
    said = []
    for n in range(60):
        kept = chat.append("user", f"kept {n}")["checkpoint"]
        chat.append("user", f"dropped {n}")
        chat.rewind(kept)
        said.append(f"kept {n}")
    assert contents_of(chat) == said
    assert len(chat.branches()) == 61
    assert len(chat.tree().splitlines()) == 120 + 59


# ---- Deleting -----------------------------------------------------------------------------------


def test_a_deleted_message_is_gone_from_all_branches_and_counts(store, chat):
    a, b, c, d = branched(chat)
    first = chat.messages()[0]["id"]
    chat.delete_message(first)
    assert (contents_of(chat), chat.info()["message_count"]) == (["d"], 1)
    assert [chat.get_checkpoint(x)["message_count"] for x in (a, b, c, d)] == [0, 1, 2, 1]
    assert contents_of(chat, checkpoint=c) == ["b", "c"]
    assert store.search_messages("a") == []
    with refused(criomem.NotFoundError):
        chat.delete_message(first)
    chat.rewind(c)
    assert contents_of(chat, limit=5) == ["b", "c"]
    chat.append("user", "again", id=first)  # the id is free again


def test_tags_of_a_message_change_for_every_branch_and_count_as_a_write(store, chat, clock):
    branched(chat)
    message = chat.messages()[0]
    clock.advance(1)
    chat.set_message_tags(message["id"], ["seen", "seen"])
    changed = chat.messages()[0]
    assert changed == {**message, "tags": ["seen"], "updated_at_ms": clock.ms}
    assert [m["content"] for m in store.search_messages(tags=["seen"])] == ["a"]
    chat.set_message_tags(message["id"], None)
    assert store.search_messages(tags=["seen"]) == []
    with refused(criomem.NotFoundError):
        chat.set_message_tags("nobody", [])


def test_a_deleted_thread_leaves_nothing(store, chat):
    branched(chat)
    assert chat.delete() is True
    assert chat.delete() is False
    assert (chat.exists(), store.threads(), store.search_messages("a")) == (False, [], [])
    stats = store.stats()
    assert (stats["threads"], stats["messages"], stats["checkpoints"]) == (0, 0, 0)


def test_forget_all_takes_the_threads_of_a_person_only_when_asked(store, chat):
    store.remember("users/42", "k", "walnut")
    chat.append("user", "walnut")
    other = store.thread("chat", namespace="users/421")
    other.append("user", "walnut")
    assert store.forget_all("users/42") == 1
    assert chat.exists()
    store.remember("users/42", "k", "walnut")
    assert store.forget_all("users/42", threads=True) == 1
    assert (chat.exists(), other.exists()) == (False, True)


# ---- Lists and search ---------------------------------------------------------------------------


def test_create_thread_makes_an_empty_one_or_one_with_a_first_save(store):
    empty = store.create_thread()
    assert (empty.info()["head"], empty.namespace) == (None, "default")
    full = store.create_thread(
        "full", namespace="n", thread_of=empty.id, label="l", tags=["t"], metadata={"m": 1},
        state={"s": 1}, messages=[{"role": "user", "content": "hello"}],
    )  # fmt: skip
    info = full.info()
    assert [info[k] for k in ("label", "tags", "metadata", "thread_of")] == [
        "l", ["t"], {"m": 1}, empty.id,
    ]  # fmt: skip
    assert (full.state(), contents_of(full), len(full.history())) == ({"s": 1}, ["hello"], 1)
    with refused(criomem.DuplicateError):
        store.create_thread("full", namespace="n")
    with refused():
        store.create_thread("bad", messages=[{"role": "user"}])
    assert not store.thread("bad").exists()
    assert [t["id"] for t in store.threads(thread_of=empty.id)] == ["full"]


def test_threads_are_listed_last_saved_first_and_page_by_keyset(store, clock):
    for n in range(7):
        clock.advance(n % 2)
        store.create_thread(str(n), namespace=f"n/{n % 2}", tags=["even"] if n % 2 == 0 else None)
    store.thread("3", namespace="n/1").save()
    order = ["3", "6", "5", "4", "2", "1", "0"]
    everything = [t["id"] for t in store.threads()]
    assert sorted(everything) == sorted(order)
    assert [t["id"] for t in store.threads(order="asc")] == everything[::-1]
    pages, after = [], None
    while page := store.threads(limit=2, after=after):
        pages += [t["id"] for t in page]
        after = page[-1]
    assert pages == everything
    assert {t["id"] for t in store.threads("n/0")} == {"0", "2", "4", "6"}
    assert {t["id"] for t in store.threads(tags=["even"])} == {"0", "2", "4", "6"}
    store.thread("2", namespace="n/0").update(status="ended")
    assert [t["id"] for t in store.threads(status="ended")] == ["2"]


def test_messages_are_searched_by_words_filters_thread_and_role(store, clock):
    for name in ("one", "two"):
        thread = store.thread(name, namespace=f"n/{name}")
        thread.append("user", "flights to lisbon", tags=["travel"], metadata={"n": 1})
        clock.advance(1)
        thread.append("assistant", "the lisbon flight leaves on monday")
    found = store.search_messages("lisbon flights")
    assert [(m["thread_id"], m["role"], m["score"]) for m in found] == [
        ("two", "assistant", 1.0), ("two", "user", 1.0), ("one", "assistant", 1.0),
        ("one", "user", 1.0),
    ]  # fmt: skip
    assert [m["thread_id"] for m in store.search_messages("monday", namespace="n/one")] == ["one"]
    assert len(store.search_messages("lisbon", role="user")) == 2
    assert len(store.search_messages("lisbon", tags=["travel"], metadata={"n": {"$gte": 1}})) == 2
    one = store.search_messages("lisbon", thread_id="one", namespace="n/one")
    assert {m["namespace"] for m in one} == {"n/one"}
    assert store.search_messages("lisbon", thread_id="one") == []  # of "default"
    newest = store.search_messages(limit=1)
    assert (newest[0]["thread_id"], "score" in newest[0]) == ("two", False)


def test_a_message_made_of_another_thread_s_terms_is_found_only_in_its_own(store):
    terms = [criomem._thread_term("n", "victim"), criomem._namespace_term("n")]
    store.thread("victim", namespace="n").append("user", "walnut")
    store.thread("forger", namespace="m").append("user", " ".join(["walnut", *terms]))
    found = store.search_messages("walnut", namespace="n", thread_id="victim")
    assert [m["thread_id"] for m in found] == ["victim"]


# ---- Export -------------------------------------------------------------------------------------


def test_export_and_import_carry_whole_threads(store, chat, clock):
    _a, _b, c, _d = branched(chat)
    chat.delete_message(chat.messages(checkpoint=c)[1]["id"])
    chat.update(label="l", tags=["t"], metadata={"m": [("x")]}, status="ended")
    store.create_thread("empty")
    text = json.dumps(list(store.export()))
    with criomem.Storage(clock=clock) as other:
        for _ in range(2):  # the second replaces the first
            assert other.import_items(json.loads(text)) == 2
            copy = other.thread("chat", namespace="users/42")
            assert copy.messages()[0]["content"] == chat.messages()[0]["content"]
            infos = [{k: v for k, v in t.info().items() if k != "head"} for t in (copy, chat)]
            assert infos[0] == infos[1]
            assert len(copy.branches()) == 2
            assert [m["content"] for m in other.search_messages("d")] == ["d"]
            assert other.check() == []
        left = next(x["head"] for x in copy.branches() if not x["current"])
        assert contents_of(copy, checkpoint=left) == contents_of(chat, checkpoint=c)
        assert copy.get_checkpoint(left)["state"] == {"at": "c"}


@pytest.mark.parametrize("part", ["segments", "states", "checkpoints", "status", "created_at_ms"])
def test_a_broken_export_of_a_thread_is_refused_and_changes_nothing(store, chat, part):
    branched(chat)
    broken = next(iter(store.export()))
    del broken[part]
    with refused():
        store.import_items([broken])
    assert contents_of(chat) == ["a", "d"]


# ---- Size ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_saves_make_a_file_of_under_five_times_the_text(path):
    words = [f"word{n % 700}" for n in range(40_000)]
    with criomem.Storage(path, durable=False) as store:
        thread, size = store.thread("t"), 0
        for n in range(1_000):
            text = " ".join(words[n * 25 : n * 25 + 40])[:200]
            size += len(text)
            thread.append("user", text)
    assert path.stat().st_size < 5 * size


@given(st.lists(st.sampled_from(["save", "rewind", "delete", "tag"]), max_size=25), st.data())
def test_checks_stay_clean_whatever_is_done(steps, data):
    with criomem.Storage() as store:
        thread = store.thread("t")
        for step in steps:
            ids = [m["id"] for m in thread.messages()]
            if step == "save" or not ids:
                thread.append("user", "walnut")
            elif step == "rewind":
                with store._db.read() as connection:
                    rows = connection.execute("SELECT id FROM checkpoint").fetchall()
                thread.rewind(data.draw(st.sampled_from([id for (id,) in rows])))
            elif step == "delete":
                thread.delete_message(data.draw(st.sampled_from(ids)))
            else:
                thread.set_message_tags(data.draw(st.sampled_from(ids)), ["t"])
        assert store.check() == []
        found = store.search_messages("walnut", limit=None)
        assert {m["id"] for m in found} == {m["id"] for m in thread.messages()}
