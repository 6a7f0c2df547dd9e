"""Scripts that move a submitted run from one state to the next: each is one step, whole or not at all.

A runner holds a run by an entry in RQ's registry of started jobs: ``<run>:<claim>``, with the time at which
it expires by the server's clock. Whoever takes this entry away is the only one who may write the record.
"""

from rankmill.jobs.protocol.leases import BOUND
from rankmill.jobs.protocol.script import Script

CLAIM = Script("jobs/protocol/submitted/lua/claim.lua")
RENEW = Script("jobs/protocol/submitted/lua/renew.lua")
END = Script("jobs/protocol/submitted/lua/end.lua")
HAND_BACK = Script("jobs/protocol/submitted/lua/hand_back.lua")
RECOVER = Script("jobs/protocol/submitted/lua/recover.lua", BOUND)
CANCEL = Script("jobs/protocol/submitted/lua/cancel.lua")
TAKE_WEBHOOK = Script("jobs/protocol/submitted/lua/take_webhook.lua")
