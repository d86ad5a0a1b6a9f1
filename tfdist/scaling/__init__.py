"""Scaling: sweeps over numbers of replicas, the laws that fit them, what holds a job up, and the report."""
