"""What a node tells of itself: one report, shown as metrics, pages, tables and curves."""
