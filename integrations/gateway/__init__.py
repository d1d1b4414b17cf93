"""The gateway: one address in front of prefill and decode engines (docs/serving.md).

`kvxfer gateway` runs it. Needs aiohttp: ``pip install 'kvxfer[gateway]'``.
"""
