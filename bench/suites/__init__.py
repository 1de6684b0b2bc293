"""The named cases, and what they let run against each other."""
