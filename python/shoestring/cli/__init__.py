"""The `shoestring` command."""
