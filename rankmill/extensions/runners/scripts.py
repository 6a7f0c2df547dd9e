"""Lua scripts that move a submitted run from one state to the next; each is atomic.

A runner holds a run as long as it has an entry in RQ's registry of started jobs. The entry is
``<run>:<claim>``; its score is the time at which it expires, by the server's clock. While a run is held, only
its holder writes its record.
"""

from rankmill.jobs.protocol.leases import BOUND
from rankmill.jobs.protocol.script import Script

CLAIM = Script("extensions/runners/lua/claim.lua")
RENEW = Script("extensions/runners/lua/renew.lua")
END = Script("extensions/runners/lua/end.lua")
HAND_BACK = Script("extensions/runners/lua/hand_back.lua")
RECOVER = Script("extensions/runners/lua/recover.lua", BOUND)
CANCEL = Script("extensions/runners/lua/cancel.lua")
TAKE_WEBHOOK = Script("extensions/runners/lua/take_webhook.lua")
