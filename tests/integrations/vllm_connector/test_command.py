"""`kvfoundry vllm-config`, and what it refuses."""

import json
import shlex
import sys

import pytest

from kvfoundry.cli import main
from kvfoundry.integrations.vllm import CONNECTOR, MODULE_PATH
from kvfoundry.integrations.vllm.settings import connector_settings

from .test_worker import saved


def test_the_command_holds_what_the_connector_reads(capsys):
    assert main(["vllm-config", "host:1GiB,redis://cache:6379/0", "--model", "m", "--method", "kivi(bits=4)"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["vllm", "serve", "m"] and words[3] == "--kv-transfer-config"
    told = json.loads(words[4])
    assert (told["kv_connector"], told["kv_connector_module_path"]) == (CONNECTOR, MODULE_PATH)
    assert told["kv_role"] == "kv_both" and told["kv_load_failure_policy"] == "recompute"
    settings = connector_settings(told["kv_connector_extra_config"])
    assert settings.method == "kivi(bits=4)" and settings.span == 256 and len(settings.tiers.tiers) == 2
    assert [tier.kind for tier in settings.shared_tiers.tiers] == ["redis"]


def test_json_alone(capsys):
    assert main(["vllm-config", "disk:/kv:1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_connector_extra_config"] == {"store": "disk:/kv:1GiB"}


def test_window_layers_need_whole_blocks(capsys):
    assert main(["vllm-config", "disk:/kv:1GiB", "--windows"]) == 0
    assert "--disable-hybrid-kv-cache-manager" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["nonsense"], "is no tier"),
        (["disk:/kv"], "needs a size"),
        (["redis://:secret@host"], "no password"),
        (["device:1GiB"], "device tier is vLLM's own"),
        (["host:1GiB", "--method", "snapkv(budget=64)"], "codecs only"),
        (["host:1GiB", "--method", "int9"], "int8"),
        (["host:1GiB", "--load", "later"], "'ahead' or 'layers'"),
        (["host:1GiB", "--span", "3"], "16"),
        (["host:1GiB", "--repair", "blend(ratio=0.15)"], "set documents to approximate too"),
        (["host:1GiB", "--documents", "approximate", "--repair", "blend(ratio=2)"], "ratio"),
        (["host:1GiB", "--documents", "approximate", "--repair", "all"], "blend("),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, says):
    assert main(["vllm-config", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "secret" not in error


def test_nothing_of_it_imports_vllm():
    assert "vllm" not in sys.modules


def test_the_store_s_commands_read_what_servers_wrote(tmp_path, capsys):
    saved(f"disk:{tmp_path}:1GiB", method="int8", namespace="tenant")
    shown = {"stats": "3 entries, 192 tokens", "ls": "int8", "verify": "all 3 entries are sound"}
    for command, line in shown.items():
        assert main(["store", command, f"disk:{tmp_path}"]) == 0
        assert line in capsys.readouterr().out
