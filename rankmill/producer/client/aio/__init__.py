"""Parts of the asyncio client: it runs the code of the synchronous `Client`, but waits in the event loop."""
