"""The caching allocator's rules once more, in the plainest form, for the tests to compare with."""

from __future__ import annotations

from autobatch.prediction.allocator import AllocatorPeak

MIB = 2**20


class PlainAllocator:
    """The rules written down once more with nothing but intervals of bytes, as slowly as they read.

    Mapped bytes that are not live are free. Fixed segments lie apart; the pages of a range lie side by side.
    """

    def __init__(self, capacity, expandable):
        self.capacity = capacity
        self.expandable = expandable
        self.page = {True: 2 * MIB, False: 20 * MIB}
        self.segments = {True: [], False: []}  # (start, end), in order
        self.live = {}
        self.next_address = 0
        self.retries = 0
        self.peak_reserved = 0

    def round(self, size):
        return max(512, (size + 511) // 512 * 512)

    def reserved(self):
        return sum(end - start for pool in self.segments.values() for start, end in pool)

    def extents(self, small):
        joined = []
        for start, end in sorted(self.segments[small]):
            if self.expandable and joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        return joined

    def holes(self, small):
        found = []
        live = sorted((start, end) for pool, start, end in self.live.values() if pool == small)
        for start, end in self.extents(small):
            at = start
            for first, last in live:
                if start <= first < end:
                    if at < first:
                        found.append((first - at, at))
                    at = last
            if at < end:
                found.append((end - at, at))
        return sorted(found)

    def gap_at(self, small, address):
        """Bytes that are not mapped from here on."""
        starts = [start for start, _ in self.segments[small]]
        if any(start <= address < end for start, end in self.segments[small]):
            return 0
        return min((start for start in starts if start >= address), default=float("inf")) - address

    def find(self, small, size):
        holes = [hole for hole in self.holes(small) if hole[0] >= size]
        if not holes:
            return None
        choice = 0
        if self.expandable:
            growable = [length + self.gap_at(small, start + length) for length, start in holes]
            while choice + 1 < len(holes) and growable[choice + 1] < growable[choice]:
                choice += 1
        length, start = holes[choice]
        return start, length

    def map(self, small, start, size):
        if self.capacity is not None and self.reserved() + size > self.capacity:
            return False
        self.segments[small].append((start, start + size))
        self.peak_reserved = max(self.peak_reserved, self.reserved())
        return True

    def grow_fixed(self, small, size):
        if small:
            segment = 2 * MIB
        elif size < 10 * MIB:
            segment = 20 * MIB
        else:
            segment = (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        start = self.next_address
        self.next_address += segment + 1
        return (start, segment) if self.map(small, start, segment) else None

    def grow_expandable(self, small, size):
        page = self.page[small]
        at = 0
        while True:  # every page and every hole before a page that is not mapped is a place to begin
            if self.gap_at(small, at):
                begin = next((start for length, start in self.holes(small) if start + length == at), at)
                if self.spans(small, begin, size):
                    break
            at += page
        while True:
            held = next((length for length, start in self.holes(small) if start == begin), 0)
            if held >= size:
                return begin, held
            missing = (size - held + page - 1) // page * page
            length = min(missing, self.gap_at(small, begin + held))
            if self.capacity is not None and self.reserved() + length > self.capacity:
                return None
            for offset in range(0, length, page):
                assert self.map(small, begin + held + offset, page)

    def spans(self, small, begin, size):
        at = begin
        while at < begin + size:
            step = self.gap_at(small, at) or next((length for length, start in self.holes(small) if start == at), 0)
            if not step:
                return False
            at += step
        return True

    def grow(self, small, size):
        return self.grow_expandable(small, size) if self.expandable else self.grow_fixed(small, size)

    def free_segment(self, small, segment):
        start, end = segment
        return not any(pool == small and first < end and last > start for pool, first, last in self.live.values())

    def release(self):
        for small, pool in self.segments.items():
            self.segments[small] = [segment for segment in pool if not self.free_segment(small, segment)]

    def allocate(self, block, size):
        size = self.round(size)
        small = size <= MIB
        found = self.find(small, size) or self.grow(small, size)
        if not found:
            self.release()
            self.retries += 1
            found = self.grow(small, size)
        if not found:
            return False
        start, length = found
        rest = length - size
        split = rest >= 512 if small or self.expandable else rest > MIB
        self.live[block] = (small, start, start + (size if split else length))
        return True

    def allocated(self):
        return sum(end - start for _, start, end in self.live.values())

    def run(self, order, sizes, released_at=0):
        peak = 0
        where = None
        for position, entry in enumerate(order):
            if position == released_at:
                self.release()
                peak, where, self.peak_reserved = self.allocated(), None, self.reserved()
            block = abs(entry) - 1
            if sizes[block] == 0:
                continue
            if entry < 0:
                del self.live[block]
            elif not self.allocate(block, sizes[block]):
                return self.summary(peak, where, position)
            if self.allocated() > peak:
                peak, where = self.allocated(), position
        return self.summary(peak, where, None)

    def summary(self, peak, where, oom):
        return AllocatorPeak(
            allocated=peak,
            reserved=self.peak_reserved,
            alloc_retries=self.retries,
            peak_position=where,
            oom_position=oom,
            allocated_at_end=self.allocated(),
        )
