"""What a run will cost and where it would fail, told before weights are loaded. The way in is `report.forecast`; `burnish check` prints it."""
