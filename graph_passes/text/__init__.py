"""Graphs as text: listings to read, fingerprints to compare, labels that survive lowering."""
