"""The loop: configuration, experience, updates, the reference policy, checkpoints, evaluation, logging."""
