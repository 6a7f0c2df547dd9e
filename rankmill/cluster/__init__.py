"""The cluster for people and for Prometheus: snapshot, tables, page, exporter."""
