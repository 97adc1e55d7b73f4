"""Files that are replaced in one step, readers that check what they read, locks of folders."""
