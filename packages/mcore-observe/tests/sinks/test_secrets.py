import argparse
import json
import shlex
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe import (
    ConfigContainer,
    LoggerConfig,
    RunLog,
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
        ("AccountKey", "x", True),
        ("signing_key", "x", True),
        ("smtp.pwd", "x", True),
        ("sig", "x", True),
        ("X-Amz-Signature", "x", True),
        ("slack_webhook", "x", True),
        ("GITHUB_TOKEN", "x", True),
        ("tokenSecret", "x", True),
        ("token_ids", [1, 2], False),
        ("eos_token", "</s>", False),
        ("model.pad_token", "<pad>", False),
        ("max_new_tokens", 128, False),
        ("special_tokens", ["<a>"], False),
        ("token_dispatcher", "alltoall", False),
        ("text_key", "content", False),
        ("key", "x", False),
        ("signature", "(x, y)", False),
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
        ("run --api-key VALUE --n 1", "run --api-key *** --n 1"),
        ("run --api-key=VALUE --n 1", "run --api-key=*** --n 1"),
        ("run --secret -abc123XYZ --n 1", "run --secret *** --n 1"),
        ("run --use-api-key --verbose -v", "run --use-api-key --verbose -v"),
        ("run --use-api-key -n 12345678", "run --use-api-key -n 12345678"),
        ("['--api-key', 'VALUE', '--n', '1']", "['--api-key', '***', '--n', '1']"),
        ('["--hf_token","a, b"]', '["--hf_token","***"]'),
        (shlex.join(["--password", "it's 'a' b", "--n", "1"]), "--password '***' --n 1"),
        ("--use-token --eos-token </s> x", "--use-token --eos-token </s> x"),
        ("password='two words, a comma' n=1", "password='***' n=1"),
        ('{"secret": "a\\"b c", "n": 1}', '{"secret": "***", "n": 1}'),
        ('"{\\"token\\": \\"a b\\"}"', '"{\\"token\\": \\"***\\"}"'),
        ("password=b'abc' n=1", "password=b'***' n=1"),
        ("passwords: ['a', 'b'], n", "passwords: ***], n"),
        ("secret='never closed, n=1", "secret='***"),
        ("token=None, secret: True, n=1", "token=None, secret: True, n=1"),
        (
            "AccountName=a;AccountKey=ab+/c==;EndpointSuffix=b",
            "AccountName=a;AccountKey=***;EndpointSuffix=b",
        ),
        ("https://b/o?se=1&sig=a%2Bb%3D&sv=2", "https://b/o?se=1&sig=***&sv=2"),
        ("s3?X-Amz-Date=1&X-Amz-Signature=abc&x=1", "s3?X-Amz-Date=1&X-Amz-Signature=***&x=1"),
        ("Server=x;Uid=me;Pwd=abc;", "Server=x;Uid=me;Pwd=***;"),
        ("https://hooks.slack.com/services/T0/B0/abc ok", "https://hooks.slack.com/*** ok"),
        ("https://discord.com/api/webhooks/1/a-b", "https://discord.com/***"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nab\n-----END RSA PRIVATE KEY----- end",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY----- end",
        ),
        ("-----BEGIN PRIVATE KEY-----\nab", "-----BEGIN PRIVATE KEY-----***"),
        ("eos_token='</s>', token_ids=[1, 2]", "eos_token='</s>', token_ids=[1, 2]"),
        ("max_new_tokens=128 --max-new-tokens 5", "max_new_tokens=128 --max-new-tokens 5"),
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


@pytest.mark.parametrize(
    "unit",
    ["x", "token", "token=", "a=", "'", '"', "token='", 'token="', "token=\\\"", "\\", "://",
     "[", "token=[", "--api-key ", "-----BEGIN PRIVATE KEY-----", "eyJ", "http://", "webhook",
     "0:", " "],
)  # fmt: skip
def test_the_time_is_proportional_to_the_length(unit):
    def time_of(size):
        text = unit * (size // len(unit)) + " end"
        began = time.thread_time()
        mask_secrets(text)
        return time.thread_time() - began

    time_of(1000)
    assert time_of(100_000) < 10  # a quadratic pattern takes minutes


_FORMS = {
    "AWSKeyDetector": 1,
    "AzureStorageKeyDetector": 1,
    "DiscordBotTokenDetector": 1,
    "GitHubTokenDetector": 1,
    "GitLabTokenDetector": 5,
    "JwtTokenDetector": 1,
    "MailchimpDetector": 1,
    "NpmDetector": 1,
    "OpenAIDetector": 1,
    "PypiTokenDetector": 2,
    "SendGridDetector": 1,
    "SlackDetector": 2,
    "SquareOAuthDetector": 1,
    "StripeDetector": 1,
    "TelegramBotTokenDetector": 1,
    "TwilioKeyDetector": 2,
}


@pytest.mark.parametrize("name", _FORMS)
def test_no_secret_stays_that_a_scanner_finds(name):
    """Texts of detect-secrets' own patterns, and its scan of the masked text."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    found = get_mapping_from_secret_type_to_class().values()
    plugin = next(one for one in found if one.__name__ == name)()
    # The pattern of a word near a quoted text is left out: it has no sign of an assignment.
    patterns = [one for one in plugin.denylist if not one.pattern.startswith("aws")]
    assert len(patterns) >= _FORMS[name]
    printable = st.characters(min_codepoint=32, max_codepoint=126)

    @settings(deadline=None, max_examples=50)
    @given(st.one_of(*(st.from_regex(one, fullmatch=True, alphabet=printable) for one in patterns)))
    def check(text):
        masked = mask_secrets(f"cannot send {text} now")
        for secret in plugin.analyze_string(text):
            assert len(secret) < 4 or secret not in masked

    check()


def test_names_of_a_scanner_are_secret():
    from detect_secrets.plugins import keyword

    for name in (one for one in keyword.DENYLIST if one.isascii()):
        for spelled in (name.replace("_?", "_"), name.replace("_?", "")):
            assert mask_secrets(f"{spelled}=abc") == f"{spelled}=***", spelled
            assert config_params({spelled.upper(): "abc"}) == {spelled.upper(): "***"}, spelled


def test_secrets_of_the_caller_and_the_environment(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", " keyfromenvironment ")
    monkeypatch.setenv("SOME_TOKEN", "short")
    text = "bad key keyfromenvironment or known, in short"
    assert mask_secrets(text, ["known", ""]) == "bad key *** or ***, in short"


def test_the_working_folder_is_no_secret(monkeypatch):
    """Shells keep it in a variable that is named like a password."""
    monkeypatch.setenv("PWD", "/home/me/project")
    monkeypatch.setenv("DB_PWD", "abcdefgh")
    assert mask_secrets("/home/me/project/run abcdefgh") == "/home/me/project/run ***"
    assert config_params({"dir": "/home/me/project/run"}) == {"dir": "/home/me/project/run"}


def test_a_configuration_that_was_read_back_keeps_its_missing_values():
    """A missing key was the text None, and every None of the page was masked."""
    params = config_params({"comet_api_key": None, "db_password": "abcd", "n": None, "x": "abcd"})
    assert params == {"comet_api_key": "None", "db_password": "***", "n": "None", "x": "***"}
    assert config_params(params) == params


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


class Wordless:
    def __repr__(self):
        raise ValueError("no text")


class Closed(dict):
    def items(self):
        raise ValueError("no items")


def make_odd_values():
    space, inside = SimpleNamespace(), []
    space.me = space
    inside += [inside, inside, {"step": 1}]
    names = argparse.Namespace(password="hunter2hunter2")
    names.me = names
    return {
        "wordless": Wordless(), "closed": Closed(a=1), "names": names, "space": space,
        "inside": inside, "tensors": [torch.ones(2), Wordless()], "rate": 0.5,
        "note": "uses hunter2hunter2",
    }  # fmt: skip


def test_values_without_a_text_leave_the_other_values():
    params = config_params(make_odd_values())
    assert params["wordless"] == "<Wordless: ValueError>"
    assert params["tensors"] == "<list: ValueError>"
    assert params["closed"] == "<Closed: ValueError>"
    assert params["rate"] == "0.5"
    assert params["names.password"] == "***"
    assert params["note"] == "uses ***"
    assert config_params(Wordless()) == {}
    assert config_params({"model": Wordless()}) == {"model": "<Wordless: ValueError>"}


def test_a_run_goes_on_if_a_value_of_its_configuration_has_no_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, config=make_odd_values(), log_every=1, tensorboard=True) as log:
        log.log_step(torch.tensor(1.0))
        log.log_step(torch.tensor(2.0))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model.rate"] == "0.5"
    assert written["model.wordless"] == "<Wordless: ValueError>"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "_hparams_/session_start_info" in events.summary_metadata
