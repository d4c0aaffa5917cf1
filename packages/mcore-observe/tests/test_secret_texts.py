import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore.observe.secret_texts import is_secret_name, mask_secrets, without_secrets


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("comet_api_key", "x", True),
        ("WANDB_API_KEY", "x", True),
        ("apikey", 5, True),
        ("aws.access-key.id", "x", True),
        ("db.Password", "x", True),
        ("passwd", "x", True),
        ("secrets.db", "x", True),
        ("headers.Authorization", "x", True),
        ("hf_token", "x", True),
        ("tokens", ["x"], True),
        ("num_tokens", 2048, False),
        ("tokenizer_model", "gpt2", False),
        ("keyboard", "x", False),
        ("monkey", "x", False),
        ("passes", "x", False),
    ],
)
def test_names(name, value, secret):
    assert is_secret_name(name, value) is secret


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:pw@host:5000/api failed", "https://***@host:5000/api failed"),
        ("mysql+pymysql://u:p@ss@host/db", "mysql+pymysql://***@host/db"),
        ("http://only-a-token@host", "http://***@host"),
        ("see http://host/a@b", "see http://host/a@b"),
        ("pg://host/db?user=u&password=pw&n=1", "pg://host/db?user=u&password=***&n=1"),
        ("{'api_key': 'abc', 'n': 1}", "{'api_key': '***', 'n': 1}"),
        ('{"hf_token": "abc"}', '{"hf_token": "***"}'),
        ("Namespace(secret='abc', n=1)", "Namespace(secret='***', n=1)"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("sent 'Basic dXNlcjpwYXNz'", "sent 'Basic ***'"),
        ("tokenizer=gpt2 and a basic idea", "tokenizer=gpt2 and a basic idea"),
        ("", ""),
    ],
)
def test_texts(text, masked):
    assert mask_secrets(text) == masked
    assert mask_secrets(masked) == masked


def test_what_the_caller_and_the_environment_know(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", " keyfromenvironment ")
    monkeypatch.setenv("SOME_TOKEN", "short")
    text = "bad key keyfromenvironment or known, in short"
    assert mask_secrets(text, ["known", ""]) == "bad key *** or ***, in short"


@given(
    st.text(), st.text(st.characters(exclude_characters="/'\"@ \n\t\r\x0b\x0c", max_codepoint=500))
)
def test_a_password_in_a_uri_never_stays(text, password):
    password = f"x{password.strip()}Qq"
    if not any(c.isspace() for c in password):
        assert password not in mask_secrets(f"{text} pg://me:{password}@host/db").split("://")[-1]


def test_exceptions_without_secrets_leave_as_they_are():
    original = KeyError("name")
    with pytest.raises(KeyError) as caught, without_secrets("MLflow"):
        raise original
    assert caught.value is original


def test_exceptions_with_secrets_are_replaced_and_not_chained():
    with pytest.raises(RuntimeError) as caught, without_secrets("Comet", ["the-key"]):
        raise ValueError("the-key is not valid")
    assert str(caught.value) == "Comet: ValueError: *** is not valid"
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None
