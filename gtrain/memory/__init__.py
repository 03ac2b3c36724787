"""Memory of a process: large pages (:mod:`.pages`), and what the C library keeps of freed memory (:mod:`.heap`)."""
