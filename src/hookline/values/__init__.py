"""Values as modules take and return them: tensors in containers, their dtypes, rows of a batch."""
