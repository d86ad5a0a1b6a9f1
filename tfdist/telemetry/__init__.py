"""Telemetry: what each step spends where, who holds whom up, and the TensorBoard log that shows it."""
