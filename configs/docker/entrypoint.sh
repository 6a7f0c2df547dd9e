#!/bin/sh
# Makes the server's URL from its host and the password in a file, and sets it for rankmill (REDIS_URL) and for rq
# (RQ_REDIS_URL). A password in a file is not shown by lists of processes or by docker inspect.
set -eu
if [ -n "${REDIS_PASSWORD_FILE:-}" ]; then
    REDIS_URL="redis://:$(cat "$REDIS_PASSWORD_FILE")@${REDIS_HOST:-valkey:6379}/0"
    RQ_REDIS_URL="$REDIS_URL"
    export REDIS_URL RQ_REDIS_URL
fi
exec "$@"
