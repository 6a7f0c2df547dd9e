"""Serves scores over TEI's gRPC interface, in the gateway's process."""
