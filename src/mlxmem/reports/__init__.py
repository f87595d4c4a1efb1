"""Answers from a recording: one module per report, all read a `history.History`."""
