"""``kvxfer bench``: what transfers reach between two processes or two hosts."""
