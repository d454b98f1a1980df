"""Measurements that `kvpool bench` prints, each beside its floor from the same run."""
