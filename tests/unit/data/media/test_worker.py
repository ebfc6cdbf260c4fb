"""Media are read by processes that may hang, die or be lied to: each costs one row, named, and soon."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from erniekit.data.media.decode import MediaHeader, Medium, ReadHeader, ReadPatches
from erniekit.data.media.frames import FrameRules
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.place import MediaPlace
from erniekit.data.media.worker import MediaPool, MediaWorker
from erniekit.data.vision.layout import seen
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.vision_row import GivenMedium
from support.clock import PATIENCE_S, within
from support.media_work import Compute
from support.seen import LIMITS, MEDIA


def header_of(name: str, video: bool = False, limits: MediaLimits = LIMITS) -> ReadHeader:
    return ReadHeader(MediaPlace(str(MEDIA / name)), video, limits)


def test_a_hung_decoder_is_cut_off_in_time_and_the_next_medium_is_read() -> None:
    limits = MediaLimits(timeout=1)
    with MediaPool(1, limits) as pool:
        assert pool.run(header_of("a.png"), "a.png").width == 133
        os.kill(pool.workers[0].pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(MediaError, match=r"v.mp4: nothing was read for 1 s") as hung:
            pool.run(header_of("v.mp4", True), "v.mp4")
        assert hung.value.kind == "timeout"
        assert time.monotonic() - began < PATIENCE_S, "for ever where nobody ends it"
        assert pool.run(header_of("v.mp4", True), "v.mp4").frames == 24
    assert MediaLimits().timeout < 10


BUSY = """
print("busy", flush=True)
while True: pass
"""


def test_a_decoder_that_a_busy_machine_keeps_waiting_is_not_hung_and_one_that_computes_for_ever_is() -> None:
    """Beside four others, and up to twenty more: ten times its own time may pass on the clock."""
    limits = MediaLimits(timeout=1)
    with MediaPool(1, limits) as pool, ExitStack() as stack:
        pool.run(header_of("a.png"), "a.png")
        busy = {min(os.sched_getaffinity(0))}
        os.sched_setaffinity(pool.workers[0].pid, busy)
        for _ in range(4):
            other = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
            stack.enter_context(other)
            stack.callback(other.kill)
            os.sched_setaffinity(other.pid, busy)
            assert other.stdout is not None
            assert other.stdout.readline() == "busy\n"
        began = time.monotonic()
        assert pool.run(Compute(0.4), "slow.mp4") >= 0.4
        assert time.monotonic() - began > limits.timeout
    with MediaPool(1, limits) as pool, pytest.raises(MediaError, match="nothing was read") as hung:
        pool.run(Compute(600), "hung.mp4")
    assert hung.value.kind == "timeout"


def test_a_decoder_that_dies_is_told_and_replaced() -> None:
    with MediaPool(1, LIMITS) as pool:
        pool.run(header_of("a.png"), "a.png")
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        with pytest.raises(MediaError, match="ended"):
            pool.run(header_of("a.png"), "a.png")
        assert pool.run(header_of("a.png"), "a.png").height == 153


def test_a_long_video_that_makes_progress_is_not_hung_yet_has_a_bound() -> None:
    worker = MediaWorker()
    try:
        work = ReadPatches(Medium((MediaPlace(str(MEDIA / "long.mp4")),), (80, 16, 16), True, tuple(range(80))), LIMITS)
        assert worker.run(work, MediaLimits(timeout=0.9), "long.mp4").shape == (80 * 256, 588)
        with pytest.raises(MediaError, match=r"not read within 0\.0001 s"):
            worker.run(work, MediaLimits(timeout=5, total=0.0001), "long.mp4")
    finally:
        worker.stop()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + chunk(b"IEND", b"")


def bomb(side: int) -> bytes:
    line = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return png(side, side, (b"IDAT", line))


def gif(frames: int) -> bytes:
    """Of 1 x 1 pixels, all alike."""
    image = (
        b"\x21\xf9\x04\x00\x00\x00\x00\x00" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    )
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + image * frames + b"\x3b"


def saved(format: str, size: tuple[int, int] = (64, 48), **options) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (size[1], size[0], 3), np.uint8)).save(
        out, format, **options
    )
    return out.getvalue()


HOSTILE = {
    "30,000 x 30,000 PNG": (bomb(30_000), False, "too_many_pixels"),
    "truncated JPEG": (saved("JPEG")[:700], False, "bad_picture"),
    "empty file": (b" ", False, "bad_picture"),
    "GIF of 10,000 frames as a picture": (gif(10_000), False, "animated"),
    "GIF of 10,000 frames as a video": (gif(10_000), True, "too_many_frames"),
    "SVG named .png": (b'<svg xmlns="http://www.w3.org/2000/svg"><script/></svg>', False, "bad_picture"),
    "FITS named .png": (b"SIMPLE  =                    T" + bytes(2880), False, "bad_picture"),
    "EXIF junk": (saved("JPEG", exif=b"Exif\0\0" + os.urandom(4000)), False, ""),
    "1 x 100,000 strip": (png(100_000, 1, (b"IDAT", zlib.compress(bytes(12_502)))), False, "strip"),
    "a text as a video": (b"no video at all " * 100, True, "bad_video"),
    "a playlist as a video": (b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1/a.ts\n", True, "bad_video"),
    "a picture's name with a script": (b"#!/bin/sh\nreboot\n", False, "bad_picture"),
}


def spent(process: psutil.Process) -> float:
    """Its processor time so far: what it would take on a machine that nothing else wants."""
    return sum(process.cpu_times()[:2])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_within_half_a_second_and_little_memory(name: str, tmp_path: Path) -> None:
    content, video, kind = HOSTILE[name]
    path = tmp_path / "x.png"
    path.write_bytes(content)
    limits = MediaLimits(frames=5000)
    with MediaPool(1, limits) as pool:
        pool.run(header_of("v.mov", True), "v.mov")
        pool.run(header_of("a.png"), "a.png")
        process = psutil.Process(pool.workers[0].pid)
        before, used = process.memory_info().rss, spent(process)

        def ask(given: GivenMedium, index: int) -> MediaHeader:
            return pool.run(ReadHeader(given.sources[index], video, limits), "x.png")

        began, found = time.process_time(), ""
        try:
            [one] = seen([GivenMedium((MediaPlace(str(path)),), video)], VisionRules(limits=limits), ask)
            pool.run(ReadPatches(one.medium, limits), "x.png")
        except MediaError as error:
            found = error.kind
        assert found == kind
        assert within(spent(process) - used + time.process_time() - began, 0.5)
        assert process.memory_info().rss - before < 200 << 20


def test_a_playlist_opens_no_connection_and_no_other_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, MediaPool(1, LIMITS) as pool:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a.ts"
        for content in (
            f"#EXTM3U\n#EXTINF:10,\n{url}\n#EXT-X-ENDLIST\n",
            f"ffconcat version 1.0\nfile {MEDIA / 'v.mov'}\n",
        ):
            work = ReadHeader(MediaPlace(content=content.encode(), label="list"), True, LIMITS)
            with pytest.raises(MediaError) as refused:
                pool.run(work, "list")
            assert refused.value.kind == "bad_video"
        assert not select.select([server], [], [], 0)[0]


def test_a_photograph_with_a_second_picture_inside_is_no_animation() -> None:
    pictures = [Image.fromarray(np.full((48, 64, 3), level, np.uint8)) for level in (10, 200)]
    kinds = {}
    for format in ("MPO", "GIF", "WEBP", "PNG"):
        out = io.BytesIO()
        pictures[0].save(out, format, save_all=True, append_images=pictures[1:])
        work = ReadHeader(MediaPlace(content=out.getvalue(), label=format), False, LIMITS)
        kinds[format] = work.work(lambda: None).animated
    assert kinds == {"MPO": False, "GIF": True, "WEBP": True, "PNG": True}


def test_pages_are_refused_and_smaller_copies_of_a_picture_are_none() -> None:
    def tiff(*sides: int, copies: bool = False) -> GivenMedium:
        first, *more = [Image.fromarray(np.full((side, side, 3), 9, np.uint8)) for side in sides]
        out = io.BytesIO()
        for one in more if copies else ():
            one.encoderinfo = {"tiffinfo": {254: 1}}  # TIFF's mark of a picture in a lower resolution
        first.save(out, "TIFF", save_all=True, append_images=more)
        return GivenMedium((MediaPlace(content=out.getvalue(), label="a.tiff"),))

    def ask(given: GivenMedium, index: int) -> MediaHeader:
        return ReadHeader(given.sources[index], False, LIMITS).work(lambda: None)

    rules = VisionRules()
    for fine in (tiff(56), tiff(56, 28, 14, copies=True)):
        assert len(seen([fine], rules, ask)) == 1
    for frames in (1, 2):
        pages = tiff(56, 28)
        given = GivenMedium(pages.sources * frames, frames > 1, (0.0, 0.5)[: frames * (frames > 1)])
        with pytest.raises(MediaError, match="several pages") as refused:
            seen([given], rules, ask)
        assert refused.value.kind == "pages"


@pytest.mark.parametrize("level", [0.5, 200, 40_000])
def test_a_picture_of_wide_numbers_keeps_its_brightness_or_is_refused(level: float, tmp_path: Path) -> None:
    kind = {0.5: np.float32, 200: np.int32, 40_000: np.uint16}[level]
    for name in ("a.tiff", "a.png") if kind is np.uint16 else ("a.tiff",):
        Image.fromarray(np.full((56, 56), level, kind)).save(tmp_path / name)
        work = ReadPatches(Medium((MediaPlace(str(tmp_path / name)),), (1, 4, 4)), LIMITS)
        if kind is np.uint16:
            assert work.work(lambda: None).min() == 40_000 >> 8
        else:
            for ask in (work, ReadHeader(MediaPlace(str(tmp_path / name)), False, LIMITS)):
                with pytest.raises(MediaError, match="8 or 16 bits"):
                    ask.work(lambda: None)


def test_a_fault_of_a_file_is_told_in_words_and_alike_each_time(tmp_path: Path) -> None:
    text = png(8, 8, (b"zTXt", b"a\0\0" + zlib.compress(bytes(40 << 20), 9)))
    locked = tmp_path / "locked.zip"
    with zipfile.ZipFile(locked, "w") as archive:
        archive.writestr("a.png", b"x" * 40)
    raw = bytearray(locked.read_bytes())
    raw[6] |= 1  # the bit that says encrypted, in the member's head and in the list of members
    raw[raw.index(b"PK\1\2") + 8] |= 1
    locked.write_bytes(raw)
    torn = MediaPlace(content=(MEDIA / "v.mp4").read_bytes()[:900], label="v.mp4")
    faults = [
        ReadHeader(MediaPlace(content=b"no picture", label="a.png"), False, LIMITS),
        ReadHeader(MediaPlace(content=text, label="a.png"), False, LIMITS),
        ReadHeader(MediaPlace(str(locked), "a.png"), False, LIMITS),
        ReadHeader(torn, True, LIMITS),
    ]
    for work in faults:
        reasons = set()
        for _ in range(2):
            with pytest.raises(MediaError) as told:
                work.work(lambda: None)
            reasons.add(told.value.reason)
        [reason] = reasons
        assert not re.search(r"Error|Errno|0x|<|Plugin|\w_\w|None", reason.replace(str(tmp_path), "")), reason


@pytest.mark.parametrize("codec", ["mpeg4", "libx264", "libvpx-vp9", "gif", "mjpeg"])
def test_a_video_of_each_usual_kind_is_counted_and_read(codec: str, tmp_path: Path) -> None:
    import av

    container = {"libvpx-vp9": "webm", "gif": "gif", "mjpeg": "avi"}.get(codec, "mp4")
    path = tmp_path / f"x.{container}"
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=10)
        stream.width, stream.height = 64, 48
        stream.pix_fmt = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        for level in range(0, 240, 10):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), level, np.uint8), format="rgb24")
            out.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
        out.mux(stream.encode())
    place = MediaPlace(str(path))
    told = ReadHeader(place, True, LIMITS).work(lambda: None)
    assert (told.width, told.height, told.frames) == (64, 48, 24)
    assert told.rate == pytest.approx(10, rel=0.05)
    pixels = ReadPatches(Medium((place,), (2, 4, 4), True, (0, 20)), LIMITS).work(lambda: None)
    first, later = pixels.reshape(2, -1).mean(1)
    assert first < 20
    assert abs(later - 200) < 40


def test_a_decoder_that_hangs_ends_with_its_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANING],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    worker.wait(timeout=PATIENCE_S)


ORPHANING = """
import threading, time
from erniekit.data.media.limits import MediaLimits
from erniekit.data.media.worker import MediaPool
from support.media_work import Compute
pool = MediaPool(1, MediaLimits(timeout=300))
threading.Thread(target=lambda: pool.run(Compute(120), "x"), daemon=True).start()
while pool.workers[0].pid is None:
    time.sleep(0.1)
time.sleep(2)
print(pool.workers[0].pid, flush=True)
time.sleep(60)
"""


def test_frames_of_a_large_video_are_not_kept_all_at_once(tmp_path: Path) -> None:
    import av

    side, count = 1024, 60
    with av.open(str(tmp_path / "v.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((side, side, 3), np.uint8))
        for _ in range(count):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    given = GivenMedium((MediaPlace(str(tmp_path / "v.mp4")),), video=True)
    rules = VisionRules(video_max_pixels=3136, frames=FrameRules(target=count))
    [found] = seen([given], rules, lambda one, i: ReadHeader(one.sources[i], True, LIMITS).work(lambda: None))
    tracemalloc.start()
    patches = ReadPatches(found.medium, LIMITS).work(lambda: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert patches.shape[0] == count * 16
    assert peak < 20 * side * side * 3, "bytes of a third of its frames"
