"""Modules that combine several layers: attention with its projections, and gated MLPs."""
