"""Host bookkeeping of device state, in integers: pools, the prefix tree, the host tier."""
