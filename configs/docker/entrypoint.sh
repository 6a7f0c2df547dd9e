#!/bin/sh
# Makes the server's URL from its host and a file that holds its password; rq and rankmill read
# different variables. A password in a file is in no listing of processes or environments.
set -eu
if [ -n "${REDIS_PASSWORD_FILE:-}" ]; then
    REDIS_URL="redis://:$(cat "$REDIS_PASSWORD_FILE")@${REDIS_HOST:-valkey:6379}/0"
    RQ_REDIS_URL="$REDIS_URL"
    export REDIS_URL RQ_REDIS_URL
fi
exec "$@"
