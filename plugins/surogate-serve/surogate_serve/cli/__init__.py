"""Verbs of the `surogate` command that serving brings, one file each."""

from __future__ import annotations
