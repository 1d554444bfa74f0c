"""What runs inside a vLLM server's worker: the weight transfer engine `areal_file` (see `plugin`)."""
