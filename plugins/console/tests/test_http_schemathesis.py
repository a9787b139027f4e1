"""Requests that schemathesis makes from the OpenAPI document of the JSON API."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio
from browsing import USERS, site

pytestmark = [pytest.mark.req("G6"), pytest.mark.slow]

LONG = os.environ.get("AMQP_RT_LONG") == "1"
#: What each answer has to fulfil.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
#: They would end the session of the one who asks, and with it the answer.
EXCLUDED = ("delete_connections", "delete_users", "update_users")


async def test_answers_are_as_the_document_says(tmp_path: Path) -> None:
    async with site(journal=True) as web:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            f"{web.url}/api/v1/openapi.json",
            f"--auth=root:{USERS['root']}",
            *("--phases=fuzzing", "--generation-deterministic", "--no-color"),
            *("--continue-on-failure", "--workers=1"),
            f"--max-examples={4 if LONG else 1}",
            f"--checks={','.join(CHECKS)}",
            *(f"--exclude-operation-id={each}" for each in EXCLUDED),
        ]
        call = partial(subprocess.run, command, capture_output=True, text=True, cwd=tmp_path)
        ended = await trio.to_thread.run_sync(call)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        # The user was let in, and the requests have done something.
        assert "49 selected / 52 total" in ended.stdout, ended.stdout
        assert web.broker.container.connections
