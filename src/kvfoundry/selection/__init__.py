"""Which rows stay: scores, budgets, protection and schedule, as pure functions on tensors."""
