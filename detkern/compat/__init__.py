"""What users of other deterministic libraries call: det_gemm's operator objects and an engine on raw pointers."""
