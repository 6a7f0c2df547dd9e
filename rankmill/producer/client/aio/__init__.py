"""The client for asyncio: the code of the plain client, whose waits are the event loop's."""
