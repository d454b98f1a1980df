"""Replays of request traces: policies side by side, and real bytes through a pool."""
