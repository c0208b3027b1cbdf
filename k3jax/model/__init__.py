"""The model: pure functions over parameter structs."""
