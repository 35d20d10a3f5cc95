"""Programs in the style of the callers that exist; run by ``test_callers``."""
