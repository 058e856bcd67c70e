"""How weights get from one sharding to another: what moves (`plan`), and moving it (`reshard`)."""
