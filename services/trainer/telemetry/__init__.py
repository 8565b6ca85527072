"""What people see of a run: metrics, trackers, samples, alarms, pictures and pages."""
