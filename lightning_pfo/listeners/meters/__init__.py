"""How much time and energy things take: `instructions` for a profile, `iterations` for a run under a plan."""
