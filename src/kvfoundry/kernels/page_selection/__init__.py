"""Which pages a query should read, by the bounds of their keys (Quest): tables of fixed width, chosen on the device."""
