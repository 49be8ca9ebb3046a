#!/usr/bin/env python3
"""The wire between a server and the manager: relay.py LISTEN TARGET, two Unix sockets' paths. What comes from one side is
passed on to the other until one of them closes. A test stops it (a partition: all is late) or kills it (connections end)."""
import asyncio
import contextlib
import os
import signal
import sys


async def carry(reader, writer):
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def relay(target, reader, writer):
    try:
        there_reader, there_writer = await asyncio.open_unix_connection(target)
    except OSError:
        return writer.close()
    await asyncio.gather(carry(reader, there_writer), carry(there_reader, writer))


async def main(listen, target):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(listen)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    await asyncio.start_unix_server(lambda *ends: relay(target, *ends), listen)
    await over.wait()
    os.unlink(listen)


asyncio.run(main(*sys.argv[1:]))
