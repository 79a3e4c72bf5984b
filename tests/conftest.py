"""Puts this folder on the path, where tiny.py and other helpers are."""
