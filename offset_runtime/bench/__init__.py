"""What domains cost, measured on a user's own model: ``offset-runtime bench``."""
