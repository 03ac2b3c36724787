"""``gtrain doctor``: the capabilities of this machine and installation, and their problems.

It neither composes a configuration nor starts a rank: ``machine`` reads the machine's resources, ``packages`` the
installed versions, ``probe`` imports the heavy packages and every strategy in a child process, which may crash, and
``report`` judges the facts and prints.
"""
