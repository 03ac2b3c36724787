"""Memory of a process: huge pages (:mod:`.pages`), and the C library's handling of freed memory (:mod:`.heap`)."""
