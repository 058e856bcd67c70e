"""What a run will cost and where it would fail, told before weights are loaded. `report.forecast` is the way in."""
