"""Who owns what, who shares a machine, and the ranks as each other's servers."""
