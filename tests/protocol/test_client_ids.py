"""Client ids: allowed ones are returned, others named in the error."""

import pytest

from fedbranch.protocol.client_ids import LONGEST_ID, checked_ids, shown_id, some_of


@pytest.mark.parametrize(
    "client_ids", [[], ["a"], ("b", "a"), {"x": 1}, ["a b", "ä", "客户"], ["x" * LONGEST_ID]]
)
def test_allowed_ids_are_listed_in_their_order(client_ids):
    assert checked_ids(client_ids) == list(client_ids)


def test_an_iterator_is_read_once():
    assert checked_ids(f"c{n}" for n in range(3)) == ["c0", "c1", "c2"]


def test_two_ids_that_only_look_alike_are_two_clients():
    assert checked_ids(["é", "e\u0301", "A", "a"]) == ["é", "e\u0301", "A", "a"]


@pytest.mark.parametrize("client_ids", ["abc", [1, 2], [""], ["a", None]])
def test_what_is_no_list_of_strings_is_a_type_error(client_ids):
    with pytest.raises(TypeError, match="pass a list of non-empty strings"):
        checked_ids(client_ids)


@pytest.mark.parametrize(
    ("client_id", "problem"),
    [
        ("a ", "begins or ends with a blank"),
        ("a\u200b", "cannot be seen"),
        ("a\x1b[2J", "cannot be seen"),
        ("\ud83d", "not valid Unicode"),
        ("x" * (LONGEST_ID + 1), "has 1001 characters; use at most 1000"),
    ],
)
def test_an_id_that_is_not_allowed_is_named_with_the_problem(client_id, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        checked_ids(["good", client_id])

    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_ids_that_are_there_twice_are_named():
    with pytest.raises(ValueError, match=r"\['b', 'a'\] are named more than once; name each once"):
        checked_ids(["b", "a", "b", "a", "c"])


def test_of_many_clients_the_first_are_named_and_the_others_counted():
    ids = [f"c{n}" for n in range(2012)]

    assert some_of(ids[:10]) == str(ids[:10])
    assert some_of(ids).endswith("'c9'] and 2,002 more")
    assert some_of(set(ids[:1])) == "['c0']"


def test_a_record_names_what_calls_itself_a_client():
    assert shown_id("a") == "a"
    assert shown_id(3) == "3"
    assert shown_id(None) == "None"
    assert len(shown_id([0] * 10**6)) <= 80
