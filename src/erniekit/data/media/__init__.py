"""Pictures and videos: where they are, how large, and their pixels as patches.

place.py opens, probe.py reads headers, decode.py makes patches, worker.py does both in processes that can be killed.
Only picture.py and stamp.py import Pillow, only video.py PyAV (extra `vision`).
"""
