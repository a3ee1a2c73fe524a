"""An AI client as others write it: the protocol's own Python library, against one address, in one of its two modes.

Arguments: mode (`auto`: the present revision; `legacy`: the handshake of older ones), then a URL (with `TOKEN` in the environment), or
`stdio` and a command. Prints one JSON object of what it saw; any surprise is a traceback and a failure.
"""

import json
import os
import sys

import anyio
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client


def text(result):
    return "\n".join(block.text for block in result.content)


async def talk(client):
    seen = {"server": client.server_info.name, "revision": str(client.protocol_version)}
    tools = (await client.list_tools()).tools
    seen["tools"] = [tool.name for tool in tools]
    start = next(tool for tool in tools if tool.name == "sandbox_start")
    seen["required"] = start.input_schema["required"]

    # An error is a result that a model reads.
    missing = await client.call_tool("sandbox_start", {})
    assert missing.is_error and text(missing).startswith("goal is required: "), missing
    try:
        await client.call_tool("no_such_tool", {})
    except MCPError as error:
        seen["unknown_tool"] = error.error.code

    # The library checks structured content against the tool's output schema.
    started = await client.call_tool("sandbox_start", {"goal": "a client of others", "name": "Python"})
    assert not started.is_error, started
    id = started.structured_content["id"]
    ran = await client.call_tool("sandbox_exec", {"id": id, "command": "echo $((6 * 7))"})
    assert not ran.is_error, ran
    seen["ran"] = text(ran)
    page = await client.call_tool("sandbox_get", {"id": id, "path": "/etc/hostname"})
    assert not page.is_error, page
    for name in ("sandbox_status", "sandbox_procs"):
        result = await client.call_tool(name, {"id": id})
        assert not result.is_error, result
    if os.environ.get("SYNC"):
        synced = await client.call_tool("sandbox_sync", {"id": id, "from": os.environ["SYNC"]})
        assert not synced.is_error, synced
        seen["sent"] = synced.structured_content["sent"]

    # Room for no second box: the start waits, and says so.
    lines = []

    async def progress(done, total, message):
        lines.append(message)

    waiting = {"goal": "too many", "waitForCapacitySec": 60}
    full = await client.call_tool("sandbox_start", waiting, progress_callback=progress)
    assert full.is_error, full
    seen["progress"], seen["full"] = lines, text(full)
    stopped = await client.call_tool("sandbox_stop", {"id": id})
    assert stopped.structured_content == {"id": id, "status": "terminated"}, stopped
    return seen


async def main():
    mode, where, *command = sys.argv[1:]
    if where == "stdio":
        server = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
        async with Client(server, mode=mode) as client:
            seen = await talk(client)
    else:
        headers = {"Authorization": f"Bearer {os.environ['TOKEN']}"}
        http = create_mcp_http_client(headers=headers)
        transport = streamable_http_client(where, http_client=http)
        async with Client(transport, mode=mode) as client:
            seen = await talk(client)
    print(json.dumps(seen))


anyio.run(main)
