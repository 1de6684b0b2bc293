"""The named cases, and the contenders of each."""
