"""Modules that are made of several layers: attention with its projections, gated MLPs."""
