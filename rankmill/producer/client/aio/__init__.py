"""The client for asyncio: it runs the code of the plain client, and waits in the event loop."""
