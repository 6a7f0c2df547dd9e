"""Parts of the asyncio client, which runs the code of the synchronous `Client`, but waits in the event
loop.
"""
