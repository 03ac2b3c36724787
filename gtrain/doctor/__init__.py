"""``gtrain doctor``: what this machine and this installation can do, and what is wrong with them.

It composes no configuration and starts no rank: ``machine`` reads what the machine has, ``packages`` what is installed,
``probe`` imports the heavy packages and every strategy in a process of its own, which may fail or crash, ``findings``
judges, and ``report`` prints.
"""
