"""Routers: from a token to the experts that see it. One file a strategy, one interface (`base.Router`)."""
