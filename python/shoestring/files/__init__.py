"""Atomic replacement of files and folders, checked readers of files, and locks of folders."""
