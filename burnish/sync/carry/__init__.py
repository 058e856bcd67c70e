"""How arrays get to a process that shares no mesh with this one: an offer here, a fetch there, each within its time."""
