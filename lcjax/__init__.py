"""lcjax."""
