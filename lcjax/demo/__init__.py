"""The demonstration behind ``lcjax demo``: a transformer that survives being killed."""
