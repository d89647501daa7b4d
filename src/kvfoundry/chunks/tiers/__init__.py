"""Where entries lie: one file per kind of place, all under the contract of `Tier`."""
