"""Problems from files: rows, columns, splits."""
