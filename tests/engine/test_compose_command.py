"""vLLM's own parser takes the commands of `deploy/compose.yaml`."""

from __future__ import annotations

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.deploy.test_stacks import DEPLOY, GIVEN, SERVERS, compose_services

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", SERVERS)
def test_vllm_takes_a_command_of_compose(name: str) -> None:
    command = compose_services(DEPLOY / "compose.yaml", GIVEN)[name]["command"]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    assert (parsed.model_tag, parsed.port) == (GIVEN["MODEL"], 8000)
    transfer = parsed.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("HeteroConnector", "kv_both")
    assert transfer.kv_connector_extra_config["worker_name"] == name
