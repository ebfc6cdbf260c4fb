"""Pictures and videos: where they are, how large, and their pixels as patches.

place.py opens, probe.py reads headers, decode.py makes patches, worker.py does both in processes that can be killed.
Pillow is imported by picture.py and stamp.py alone, PyAV by video.py alone (extra `vision`).
"""
