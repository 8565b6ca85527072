"""The telemetry of a run: metrics, trackers, samples, alarms, plots and pages."""
