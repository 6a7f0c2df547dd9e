"""Views of the cluster for people and for Prometheus: snapshot, tables, live page, exporter."""
