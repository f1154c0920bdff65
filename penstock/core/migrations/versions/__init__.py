"""One file per step, named by its number. A step that was released is never changed."""
