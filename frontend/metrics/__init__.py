"""Counters and histograms, Prometheus exposition, OpenTelemetry traces."""
