"""What a run did, found out again from its log, without its GPUs: the core's decisions (`deciding`), and what one kind
of its workers answers today to what it was asked then (`peers`)."""
