"""Scores over TEI's gRPC, beside the gateway's HTTP."""
