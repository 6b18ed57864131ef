"""`spear view` and `spear report`: a run as pages, live from a local server or as one file.

runs.py    what the pages read: metrics, evaluations, draws and episodes of the runs in a folder
curves.py  which curves are drawn, and their numbers
pages.py   pages as HTML, the same for server and report
server.py  the server's addresses; io/http has the server itself, and the look
report.py  one self-contained file
"""
