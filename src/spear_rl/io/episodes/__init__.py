"""Episodes of training as compressed columns: parquet parts in trajectories/, one row per turn.

columns.py  what a row holds, and episodes as rows
parts.py    files: their names, atomic writing, merging, the bound on disk use
index.py    reading: one row per episode in memory, turns on demand; JSON lines of earlier versions too
"""
