"""Integrations of shoestring into other libraries."""
