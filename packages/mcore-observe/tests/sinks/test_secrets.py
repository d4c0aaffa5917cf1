import argparse
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe import (
    ConfigContainer,
    LoggerConfig,
    TrainingConfig,
    config_params,
    mask_secrets,
)
from mcore.observe.sinks.secrets import without_secrets


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
def test_secret_names(name, value, secret):
    assert config_params({name: value}) == {name: "***" if secret else str(value)}


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
def test_secret_texts(text, masked):
    assert mask_secrets(text) == masked
    assert mask_secrets(masked) == masked


def test_a_long_word_takes_no_longer_than_its_length():
    """A text of 20,000 letters without a space took a minute."""
    began = time.thread_time()
    for word in ("x", "token", "my-secret-"):
        assert mask_secrets(word * 20_000) == word * 20_000
    text = f"{'a' * 50_000}_token=abcdefgh {'b' * 50_000}"
    assert mask_secrets(text) == text.replace("abcdefgh", "***")
    assert time.thread_time() - began < 10


def test_secrets_of_the_caller_and_the_environment(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", " keyfromenvironment ")
    monkeypatch.setenv("SOME_TOKEN", "short")
    text = "bad key keyfromenvironment or known, in short"
    assert mask_secrets(text, ["known", ""]) == "bad key *** or ***, in short"


@settings(deadline=None)
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


def test_a_configuration_becomes_flat_texts_without_secrets():
    config = ConfigContainer(
        logger=LoggerConfig(comet_api_key="secret", mlflow_tags={"team": "a"}),
        train=TrainingConfig(train_iters=10),
        model=SimpleNamespace(num_layers=2, sizes=[1, 2]),
    )
    params = config_params(config)
    assert params["logger.comet_api_key"] == "***"
    assert params["logger.mlflow_tags.team"] == "a"
    assert params["train.train_iters"] == "10"
    assert params["model.sizes"] == "[1, 2]"
    assert params["optimizer"] == "None"
    assert "secret" not in str(params)


def test_masked_settings():
    params = config_params(
        {
            "WANDB_API_KEY": "x",
            "apikey": "x",
            "db_password": "x",
            "client_secret": 5,
            "hf_token": "x",
            "num_tokens": 2048,
            "tokenizer_model": "gpt2",
            "comet_api_key": None,
        }
    )
    assert params == {
        "WANDB_API_KEY": "***",
        "apikey": "***",
        "db_password": "***",
        "client_secret": "***",
        "hf_token": "***",
        "num_tokens": "2048",
        "tokenizer_model": "gpt2",
        "comet_api_key": "None",
    }


def test_no_configuration():
    assert config_params(None) == {}


def test_secrets_inside_sequences_namespaces_and_texts():
    params = config_params(
        {
            "sources": [{"path": "a", "password": "x"}, SimpleNamespace(api_key="y", n=1)],
            "args": argparse.Namespace(hf_token="z", size=5),
            "secrets": {"db": "w"},
            "uri": "postgresql://me:pw@host/db",
            "note": "the key is abcdef",
            "api_key": "abcdef",
            "sizes": (1, 2),
        }
    )
    assert params == {
        "sources.0.path": "a",
        "sources.0.password": "***",
        "sources.1.api_key": "***",
        "sources.1.n": "1",
        "args.hf_token": "***",
        "args.size": "5",
        "secrets.db": "***",
        "uri": "postgresql://***@host/db",
        "note": "the key is ***",
        "api_key": "***",
        "sizes": "(1, 2)",
    }


def test_a_configuration_that_contains_itself_ends():
    config = {"a": 1}
    config["self"] = config
    assert config_params(config)["a"] == "1"
