"""Routes over several containers: links joined end to end along a path that the first node chooses."""
