import argparse
from types import SimpleNamespace

from mcore.observe import ConfigContainer, LoggerConfig, TrainingConfig
from mcore.observe.config_params import config_params


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


def test_what_is_a_secret():
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
