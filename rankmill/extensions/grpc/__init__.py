"""The gateway's gRPC port: the services of TEI (text-embeddings-inference), health and reflection."""
