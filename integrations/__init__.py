"""Adapters between kvxfer and serving engines; installed as kvxfer.integrations."""
