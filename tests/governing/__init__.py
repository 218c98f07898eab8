"""A worker's slots and its governor over recorded traffic, in virtual time: hours in seconds, the same every run."""
