"""The loss to look at: one page on which every choice moves its curves. The page runs the library's own source."""
