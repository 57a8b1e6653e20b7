// The byte map of a window: regions apart, aligned, and independent of the bound where S10 says so.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "layout/posts_map.h"
#include "layout/window_map.h"
#include "reference.h"

namespace tw {
namespace {

constexpr Shape kSmall{2, 4, 2, 3, 2, 2, {6, 5}, 10};

constexpr WindowMap made(const Shape& shape) {
  WindowMap map;
  WindowMap::make(shape, &map);
  return map;
}

// A device compiles the same map, and tables of offsets may be constants.
constexpr WindowMap kMap = made(kSmall);
static_assert(kSmall.fan_out() == 2);
static_assert(meta_bytes(3) == 32);
static_assert(kMap.bytes() > 2 * kMap.channel_bytes());
static_assert(kMap.signal(1, 0, 0) - kMap.signal(0, 0, 0) == kMap.channel_bytes());
static_assert(kMap.note(0, 1, 1) == kMap.signal(0, 1, 1) + kNoteOffset);

struct Region {
  uint64_t begin;
  uint64_t end;
  const char* what;
};

void expect_apart(std::vector<Region> regions, uint64_t bytes) {
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < regions.size(); ++i) {
    ASSERT_LE(regions[i].end, bytes) << regions[i].what;
    if (i == 0) continue;
    ASSERT_LE(regions[i - 1].end, regions[i].begin) << regions[i - 1].what << " and " << regions[i].what;
  }
}

void add_header(const WindowMap& map, std::vector<Region>* regions) {
  const Shape& shape = map.shape();
  regions->push_back({WindowMap::waiters(), WindowMap::waiters() + 4, "waiters"});
  for (int rank = 0; rank < shape.ranks; ++rank) {
    regions->push_back({WindowMap::abort_signal(rank), WindowMap::abort_signal(rank) + 8, "abort signal"});
  }
  for (int channel = 0; channel < shape.channels; ++channel) {
    for (int bank = 0; bank < 2; ++bank) {
      for (int source = 0; source < shape.ranks; ++source) {
        regions->push_back({map.signal(channel, bank, source), map.signal(channel, bank, source) + 8, "signal"});
        regions->push_back({map.note(channel, bank, source), map.note(channel, bank, source) + 8, "note"});
        const uint64_t rows = map.signal(channel, bank, source) + kRowsOffset;
        regions->push_back({rows, rows + 8, "rows signal"});
      }
    }
  }
}

void add_rows(const WindowMap& map, int channel, int bank, int bound, std::vector<Region>* regions) {
  const Shape& shape = map.shape();
  for (int source = 0; source < shape.ranks; ++source) {
    for (int p = 0; p < bound; ++p) {
      for (int q = 0; q < shape.payloads; ++q) {
        const uint64_t at = map.payload(channel, bank, q, source, p, bound);
        regions->push_back({at, at + shape.payload_bytes[q], "payload"});
      }
      const uint64_t meta = map.meta(channel, bank, source, p, bound);
      regions->push_back({meta, meta + meta_bytes(shape.top_k), "meta"});
    }
  }
}

void add_inbox(const WindowMap& map, int channel, int bank, std::vector<Region>* regions) {
  const Shape& shape = map.shape();
  for (int token = 0; token < shape.max_tokens; ++token) {
    for (int position = 0; position < shape.fan_out(); ++position) {
      const uint64_t at = map.inbox(channel, bank, token, position);
      regions->push_back({at, at + shape.combine_bytes, "inbox"});
    }
  }
}

int chunks_of(const Shape& shape) {
  return shape.chunk_rows == 0 ? 0 : (shape.max_tokens + shape.chunk_rows - 1) / shape.chunk_rows;
}

// What only devices have.
void add_device_regions(const WindowMap& map, std::vector<Region>* regions) {
  const Shape& shape = map.shape();
  for (int channel = 0; channel < shape.channels; ++channel) {
    for (int bank = 0; bank < 2; ++bank) {
      for (int source = 0; source < shape.ranks; ++source) {
        for (int chunk = 0; chunk < chunks_of(shape); ++chunk) {
          const uint64_t signal = map.chunk_signal(channel, bank, source, chunk);
          regions->push_back({signal, signal + 8, "chunk signal"});
        }
        for (int p = 0; p < shape.packet_tokens; ++p) {
          const uint64_t packet = map.packet(channel, bank, source, p);
          regions->push_back({packet, packet + map.packet_row(), "packets"});
        }
      }
      const WindowMap own = map.unpacked();
      const auto rows = static_cast<uint64_t>(shape.ranks) * static_cast<uint64_t>(shape.packet_tokens);
      for (int q = 0; q < shape.payloads && rows > 0; ++q) {
        const uint64_t begin = own.payload_row(channel, bank, q, 0);
        const uint64_t end = own.payload_row(channel, bank, q, rows);
        EXPECT_TRUE(map.in_unpacked(begin) && map.in_unpacked(end - 1));
        regions->push_back({begin, end, "unpacked rows"});
      }
    }
  }
}

template <class Visit>
void each_small_shape(Visit&& visit) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    for (int top_k = 1; top_k <= 4; top_k += 3) {
      for (int tokens = 1; tokens <= 4; tokens += 3) {
        for (int channels = 1; channels <= 3; channels += 2) {
          for (const uint64_t row : {1ull, 7ull, 300ull}) {
            for (const uint64_t combined : {2ull, 5000ull}) {
              visit(Shape{ranks, 8, top_k, tokens, channels, 2, {row, 3}, combined});
              visit(Shape{ranks, 8, top_k, tokens, channels, 8, {1, 2, 3, 4, 5, 6, 7, row}, combined});
            }
          }
        }
      }
    }
  }
}

// The shapes of each_small_shape with packets for some slots or all, and chunks that divide the rows or do not.
template <class Visit>
void each_device_shape(Visit&& visit) {
  each_small_shape([&](Shape shape) {
    for (const int packet_tokens : {0, 1, shape.max_tokens}) {
      for (const int chunk_rows : {0, 1, 3, 64}) {
        shape.packet_tokens = packet_tokens;
        shape.chunk_rows = chunk_rows;
        visit(shape);
      }
    }
  });
}

// A bank holds the rows of a dispatch or the inbox of a combine; every assignment of kinds to banks must be free of
// overlap, with every other channel and the header.
TEST(Layout, RegionsNeverOverlap) {
  each_device_shape([](const Shape& shape) {
    WindowMap map;
    ASSERT_TRUE(WindowMap::make(shape, &map));
    for (int bound = 1; bound <= shape.max_tokens; ++bound) {
      for (int kinds = 0; kinds < 4; ++kinds) {
        std::vector<Region> regions;
        add_header(map, &regions);
        add_device_regions(map, &regions);
        for (int channel = 0; channel < shape.channels; ++channel) {
          for (int bank = 0; bank < 2; ++bank) {
            if ((kinds >> bank & 1) != 0) add_inbox(map, channel, bank, &regions);
            if ((kinds >> bank & 1) == 0) add_rows(map, channel, bank, bound, &regions);
          }
        }
        ASSERT_NO_FATAL_FAILURE(expect_apart(std::move(regions), map.bytes()));
      }
    }
  });
}

// Whatever a call's rows consist of, they lie within the bank that the group's room has made: apart from each other,
// and from all that does not depend on them, which stays where it is.
TEST(Layout, OtherRowsMoveNothingOutsideABank) {
  const std::vector<std::vector<uint64_t>> types = {{40}, {1, 1, 1, 1, 1, 1, 1, 33}, {7, 33}, {8, 8, 8, 8, 8}, {3}};
  each_device_shape([&](Shape shape) {
    shape.dispatch_room = 40;
    shape.combine_room = 6000;
    if (shape.dispatch_bytes() > shape.dispatch_room) return;
    const WindowMap own = made(shape);
    for (const std::vector<uint64_t>& bytes : types) {
      const WindowMap rows = own.for_dispatch(static_cast<int32_t>(bytes.size()), bytes.data());
      for (const uint64_t combined : {uint64_t{1}, uint64_t{512}, uint64_t{6000}}) {
        const WindowMap sums = own.for_combine(combined);
        EXPECT_EQ(rows.bytes(), own.bytes());
        EXPECT_EQ(sums.bytes(), own.bytes());
        if (shape.packet_tokens > 0) {
          EXPECT_LE(kPacketBytes * packets_of(dispatch_words(rows.shape())), own.packet_row());
          EXPECT_LE(kPacketBytes * packets_of(words_of(combined)), own.packet_row());
        }
        std::vector<Region> regions;
        add_header(own, &regions);
        for (int channel = 0; channel < shape.channels; ++channel) {
          add_rows(rows, channel, 0, shape.max_tokens, &regions);
          add_inbox(sums, channel, 1, &regions);
        }
        add_device_regions(sums, &regions);
        ASSERT_NO_FATAL_FAILURE(expect_apart(std::move(regions), own.bytes()));
      }
    }
  });
}

// S3: what is told apart as unpacked rows is what no peer's step can write, whatever its rows are.
TEST(Layout, OnlyTheirReceiverWritesUnpackedRows) {
  each_device_shape([](const Shape& shape) {
    const WindowMap map = made(shape);
    const WindowMap grown = [&] {
      WindowMap larger;
      EXPECT_TRUE(map.grow(shape, &larger));
      return larger;
    }();
    for (const WindowMap& of : {map, grown}) {
      EXPECT_EQ(of.unpacked().bytes(), of.bytes());
      EXPECT_EQ(of.unpacked().meta(0, 1, 0, 0, 1), of.meta(0, 1, 0, 0, 1));
      EXPECT_FALSE(of.in_unpacked(of.signal(0, 1, 0)) || of.in_unpacked(of.bytes()));
      for (int channel = 0; channel < shape.channels; ++channel) {
        for (int bank = 0; bank < 2; ++bank) {
          const uint64_t begin = of.bank(channel, bank);
          EXPECT_FALSE(of.in_unpacked(begin));
          EXPECT_EQ(of.in_unpacked(begin - 1), bank == 1 && shape.packet_tokens > 0);
          EXPECT_FALSE(of.in_unpacked(begin + of.bank_bytes() - 1));
          EXPECT_EQ(of.in_unpacked(begin + of.bank_bytes()), shape.packet_tokens > 0);
          EXPECT_FALSE(of.in_unpacked(of.chunk_signal(channel, bank, 0, 0)));
          EXPECT_FALSE(of.in_unpacked(of.packet(channel, bank, 0, 0)));
        }
      }
    }
    EXPECT_FALSE(grown.in_unpacked(map.unpacked().payload(0, 0, 0, 0, 0, 1)));
  });
}

TEST(Layout, Alignment) {
  each_device_shape([](const Shape& shape) {
    const WindowMap map = made(shape);
    EXPECT_EQ(map.bytes() % kPageAlignment, 0u);
    EXPECT_EQ(map.channel_bytes() % kPageAlignment, 0u);
    EXPECT_EQ(WindowMap::waiters() % 4, 0u);
    EXPECT_EQ(WindowMap::abort_signal(shape.ranks - 1) % 8, 0u);
    for (int channel = 0; channel < shape.channels; ++channel) {
      for (int bank = 0; bank < 2; ++bank) {
        EXPECT_EQ(map.inbox(channel, bank, 0, 0) % kPageAlignment, 0u);
        EXPECT_EQ(map.meta(channel, bank, 0, 0, 1) % kRegionAlignment, 0u);
        for (int q = 0; q < shape.payloads; ++q) {
          EXPECT_EQ(map.payload(channel, bank, q, 0, 0, 1) % kRegionAlignment, 0u);
          EXPECT_EQ(map.unpacked().payload(channel, bank, q, 0, 0, 1) % kRegionAlignment, 0u);
        }
        for (int source = 0; source < shape.ranks; ++source) {
          EXPECT_EQ(map.signal(channel, bank, source) % kSignalStride, 0u);  // a cache line for each writer
          EXPECT_EQ(map.chunk_signal(channel, bank, source, 0) % sizeof(uint64_t), 0u);
          for (int p = 0; p < shape.packet_tokens; ++p)
            EXPECT_EQ(map.packet(channel, bank, source, p) % kPacketBytes, 0u);
        }
      }
    }
  });
}

// S10: a slower rank may still read a region while a faster one already works under another bound.
TEST(Layout, BoundMovesNothingOutsideABank) {
  each_small_shape([](const Shape& shape) {
    const WindowMap map = made(shape);
    for (int channel = 0; channel < shape.channels; ++channel) {
      for (int bank = 0; bank < 2; ++bank) {
        const uint64_t begin = map.inbox(channel, bank, 0, 0);
        const uint64_t end = bank == 0 ? map.inbox(channel, 1, 0, 0) : map.signal(channel, 0, 0) + map.channel_bytes();
        for (int bound = 1; bound <= shape.max_tokens; ++bound) {
          for (int q = 0; q < shape.payloads; ++q) {
            EXPECT_GE(map.payload(channel, bank, q, 0, 0, bound), begin);
            EXPECT_LE(map.payload(channel, bank, q, shape.ranks, 0, bound), end);
          }
          EXPECT_GE(map.meta(channel, bank, 0, 0, bound), begin);
          EXPECT_LE(map.meta(channel, bank, shape.ranks, 0, bound), end);
        }
      }
    }
  });
}

// Packets and chunk signals come after everything else of a channel, and unpacked rows behind each bank: what the CPU
// has is where it is in a bank, and a CPU's window, which has none of them, does not grow.
TEST(Layout, DeviceRegionsMoveNothing) {
  each_device_shape([](const Shape& shape) {
    Shape plain = shape;
    plain.packet_tokens = plain.chunk_rows = 0;
    const WindowMap map = made(shape);
    const WindowMap cpu = made(plain);
    EXPECT_EQ(cpu.packet_bytes(), 0u);
    EXPECT_EQ(cpu.channel_bytes(), cpu.bank(0, 1) + cpu.bank_bytes() - cpu.signal(0, 0, 0)) << "signals and two banks";
    EXPECT_EQ(cpu.bytes(), cpu.signal(0, 0, 0) + shape.channels * cpu.channel_bytes());
    const bool bare = shape.packet_tokens == 0 && shape.chunk_rows == 0;
    EXPECT_EQ(map.channel_bytes() == cpu.channel_bytes(), bare);
    EXPECT_EQ(map.bank_bytes(), cpu.bank_bytes());
    EXPECT_EQ(map.bank(0, 0), cpu.bank(0, 0));
    for (int bank = 0; bank < 2; ++bank) {
      const uint64_t begin = map.bank(0, bank);
      const uint64_t on_cpu = cpu.bank(0, bank);
      EXPECT_EQ(map.signal(0, bank, 0), cpu.signal(0, bank, 0));
      EXPECT_EQ(map.inbox(0, bank, 0, 0) - begin, cpu.inbox(0, bank, 0, 0) - on_cpu);
      EXPECT_EQ(map.meta(0, bank, 0, 0, 1) - begin, cpu.meta(0, bank, 0, 0, 1) - on_cpu);
      EXPECT_EQ(map.payload(0, bank, 1, 0, 0, 1) - begin, cpu.payload(0, bank, 1, 0, 0, 1) - on_cpu);
    }
  });
}

// S10, for what is used under every bound alike: places follow from the shape, channel, bank, source and index alone.
TEST(Layout, DeviceRegionsAreArrays) {
  each_device_shape([](const Shape& shape) {
    const WindowMap map = made(shape);
    const uint64_t chunks = static_cast<uint64_t>(chunks_of(shape));
    const uint64_t packets = map.packet(0, 0, 0, 0);
    const uint64_t signals = map.chunk_signal(0, 0, 0, 0);
    const uint64_t rows = static_cast<uint64_t>(shape.ranks) * static_cast<uint64_t>(shape.max_tokens);
    const uint64_t of_bank = map.packet_bytes() + rows * map.meta_packet_row();
    EXPECT_EQ(signals, map.bank(0, 1) + map.bank_bytes() + map.room().unpacked);
    for (int channel = 0; channel < shape.channels; ++channel) {
      for (int bank = 0; bank < 2; ++bank) {
        for (int source = 0; source < shape.ranks; ++source) {
          const uint64_t row = static_cast<uint64_t>(bank) * shape.ranks + source;
          EXPECT_EQ(map.chunk_signal(channel, bank, source, 0),
                    signals + channel * map.channel_bytes() + 8 * row * chunks);
          if (shape.packet_tokens == 0) continue;
          const uint64_t begin = packets + channel * map.channel_bytes() + static_cast<uint64_t>(bank) * of_bank;
          const uint64_t at = begin + static_cast<uint64_t>(source) * shape.packet_tokens * map.packet_row();
          EXPECT_EQ(map.packet(channel, bank, source, 0), at);
          EXPECT_EQ(map.packet(channel, bank, source, 1), at + map.packet_row());
          const auto first = static_cast<uint64_t>(source) * static_cast<uint64_t>(shape.max_tokens);
          const uint64_t metadata = begin + map.packet_bytes() + first * map.meta_packet_row();
          EXPECT_EQ(map.meta_packet(channel, bank, first), metadata);
          EXPECT_EQ(map.meta_packet(channel, bank, first + 1), metadata + map.meta_packet_row());
        }
      }
    }
    EXPECT_EQ(map.packet_bytes(), map.packet(0, 0, shape.ranks, 0) - packets);
    const uint64_t meta =
        shape.packet_tokens > 0 ? kPacketBytes * packets_of(1 + static_cast<uint64_t>(shape.top_k)) : 0;
    EXPECT_EQ(map.meta_packet_row(), meta) << "header, ids and weights, a word for each two of these";
    EXPECT_LE(map.meta_packet(0, 1, rows) - map.signal(0, 0, 0), map.channel_bytes());
  });
}

// In a group of both modes a low-latency call has slots within the bank, and all else where calls of high throughput
// have it (S10).
TEST(Layout, ModesShareAWindow) {
  int larger = 0;
  each_small_shape([&](Shape shape) {
    shape.most_local_experts = 8;
    for (const int room : {1, shape.max_tokens, shape.ranks * shape.max_tokens}) {
      for (int most = 1; most <= shape.max_tokens; ++most) {
        shape.recv_rows = room;
        shape.low_latency_tokens = 0;
        shape.low_latency_packets = 0;
        shape.packet_tokens = 1;
        shape.chunk_rows = 2;
        const WindowMap exact = made(shape);
        shape.low_latency_tokens = most;
        shape.low_latency_packets = most;
        const WindowMap both = made(shape);
        const WindowMap slots = both.for_low_latency();
        ASSERT_TRUE(both.shape().exact() && both.shape().has_both_modes());
        ASSERT_FALSE(slots.shape().exact() || slots.shape().has_both_modes());
        EXPECT_EQ(slots.shape().default_bound(), most);
        EXPECT_EQ(slots.bytes(), both.bytes());
        EXPECT_GE(both.bank_bytes(), exact.bank_bytes());
        larger += both.bank_bytes() > exact.bank_bytes() ? 1 : 0;
        for (int bank = 0; bank < 2; ++bank) {
          const int channel = shape.channels - 1;
          const uint64_t end = slots.bank(channel, bank) + slots.bank_bytes();
          EXPECT_EQ(slots.bank(channel, bank), both.bank(channel, bank));
          EXPECT_EQ(slots.signal(channel, bank, shape.ranks - 1), both.signal(channel, bank, shape.ranks - 1));
          EXPECT_EQ(slots.packet(channel, bank, shape.ranks - 1, 0), both.packet(channel, bank, shape.ranks - 1, 0));
          EXPECT_EQ(slots.chunk_signal(channel, bank, 0, 0), both.chunk_signal(channel, bank, 0, 0));
          EXPECT_EQ(slots.meta_packet(channel, bank, 1), both.meta_packet(channel, bank, 1));
          EXPECT_LE(slots.meta(channel, bank, shape.ranks, 0, most), end);
          EXPECT_LE(slots.inbox(channel, bank, most, 0), end);
          EXPECT_LE(both.meta_row(channel, bank, static_cast<uint64_t>(room)), end);
          for (int q = 1; q < shape.payloads; ++q) {
            EXPECT_LE(slots.payload(channel, bank, q - 1, shape.ranks, 0, most),
                      slots.payload(channel, bank, q, 0, 0, 1));
          }
        }
        const auto row = static_cast<uint64_t>(shape.ranks) * static_cast<uint64_t>(most);
        EXPECT_LE(slots.meta_packet(0, 0, row), slots.meta_packet(0, 1, 0));
        EXPECT_LE(slots.packet(0, 0, 0, most), slots.packet(0, 0, 1, 0));
        EXPECT_EQ(both.shape().handle_rows(), std::max<int64_t>(room, static_cast<int64_t>(row)));
      }
    }
  });
  EXPECT_GT(larger, 0);
}

// A packet has 15 words of data, and the 16th is the flag; a row's packets hold the longer of its two ways.
TEST(Layout, LinesOfARow) {
  static_assert(words_of(0) == 0 && words_of(1) == 1 && words_of(8) == 1 && words_of(9) == 2);
  static_assert(packets_of(1) == 1 && packets_of(15) == 1 && packets_of(16) == 2);
  static_assert(kPacketBytes == 8 * (kPacketWords + 1) && kPacketBytes == 16 * kPacketThreads);
  static_assert(dispatch_words(kSmall) == 3 + 1 + 1);  // header, ids and weights; 6 bytes; 5 bytes
  static_assert(packet_row_bytes(kSmall) == kPacketBytes);
  Shape shape = kSmall;
  shape.payload_bytes[0] = 8 * 12;  // 3 + 12 + 1 words
  EXPECT_EQ(packet_row_bytes(shape), 2 * kPacketBytes);
  shape.combine_bytes = 8 * 31;
  EXPECT_EQ(packet_row_bytes(shape), 3 * kPacketBytes);
}

// A region is a tensor [N, b, row]: a view of it needs no copy.
TEST(Layout, RowsOfAPayloadHaveNoGaps) {
  const WindowMap map = made(kSmall);
  for (int bound = 1; bound <= kSmall.max_tokens; ++bound) {
    uint64_t next = map.payload(1, 1, 1, 0, 0, bound);
    for (int source = 0; source < kSmall.ranks; ++source) {
      for (int p = 0; p < bound; ++p, next += kSmall.payload_bytes[1]) {
        EXPECT_EQ(map.payload(1, 1, 1, source, p, bound), next);
      }
    }
  }
}

unsigned __int128 wide_bytes(const Shape& s) {
  using Wide = unsigned __int128;
  const auto align = [](Wide a, Wide to) { return (a + to - 1) / to * to; };
  const Wide rows = static_cast<Wide>(s.ranks) * s.max_tokens;
  const Wide row = static_cast<Wide>(s.payload_bytes[0]) + s.payload_bytes[1];
  const Wide dispatch = rows * (row + meta_bytes(s.top_k)) + kMaxPayloads * kRegionAlignment;
  const Wide inbox = static_cast<Wide>(s.max_tokens) * s.fan_out() * s.combine_bytes;
  const Wide unpacked = static_cast<Wide>(s.ranks) * s.packet_tokens * row + kMaxPayloads * kRegionAlignment;
  const Wide bank =
      align(std::max(dispatch, inbox), kPageAlignment) + (s.packet_tokens == 0 ? 0 : align(unpacked, kPageAlignment));
  const Wide chunks = s.chunk_rows == 0 ? 0 : (static_cast<Wide>(s.max_tokens) + s.chunk_rows - 1) / s.chunk_rows;
  // Of a dispatched row as packets, in which each payload may be padded to whole words.
  Wide words = (static_cast<Wide>(meta_bytes(s.top_k)) + 7) / 8 + (row + 7) / 8 + kMaxPayloads - 1;
  words = std::max(words, (static_cast<Wide>(s.combine_bytes) + 7) / 8);
  const Wide banks = align(static_cast<Wide>(2) * kSignalStride * s.ranks, kPageAlignment) + 2 * bank;
  const Wide packets = static_cast<Wide>(2) * s.ranks * s.packet_tokens * ((words + 14) / 15 * 128);
  const Wide metadata = s.packet_tokens == 0 ? 0 : 2 * rows * ((static_cast<Wide>(1) + s.top_k + 14) / 15 * 128);
  const Wide channel = align(banks + 16 * s.ranks * chunks, kPageAlignment) + align(packets + metadata, kPageAlignment);
  return align(64 + static_cast<Wide>(8) * s.ranks, kPageAlignment) + channel * s.channels;
}

TEST(Layout, OverflowIsRefused) {
  int refused = 0;
  int taken = 0;
  for (uint32_t i = 0; i < 20000; ++i) {
    const auto pick = [i](uint64_t what, uint32_t n) { return test::mix({i, what}) % n; };
    const auto size = [&](uint64_t what) { return (uint64_t{test::mix({i, what})} << 29 | 1) >> pick(what + 50, 61); };
    Shape shape{static_cast<int32_t>(1 + pick(1, 1024)),
                64,
                static_cast<int32_t>(1 + pick(2, 64)),
                static_cast<int32_t>(1 + pick(3, (1 << 28) - 1)) >> pick(9, 27),
                static_cast<int32_t>(1 + pick(4, 64)),
                2,
                {1 + size(5), 1 + size(6)},
                1 + size(7)};
    shape.max_tokens = std::max(shape.max_tokens, 1);
    if (i % 2 == 1) {
      shape.packet_tokens = std::min(static_cast<int32_t>(pick(10, 2000)), shape.max_tokens);
      shape.chunk_rows = static_cast<int32_t>(1) << pick(11, 7);
    }
    WindowMap map;
    const bool ok = WindowMap::make(shape, &map);
    const unsigned __int128 want = wide_bytes(shape);
    if (want > UINT64_MAX / 2) {
      EXPECT_FALSE(ok);
      ++refused;
    } else if (want < UINT64_MAX / 4) {
      EXPECT_TRUE(ok);
    }
    if (ok) {
      EXPECT_TRUE(want == map.bytes());
      ++taken;
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(taken, 100);
}

// T3: groups of before and after growth make steps by turns. What goes out by the smaller map lies within the bank of
// the larger that has the same number, as the other may still be read.
TEST(Layout, OutgoingBanksOfASmallerMapLieWithinThoseOfTheLarger) {
  each_small_shape([](const Shape& shape) {
    const WindowMap map = made(shape);
    Shape more = shape;
    more.max_tokens += 100;
    WindowMap grown;
    ASSERT_TRUE(map.grow(more, &grown, map.room()));
    const PostsMap posts = PostsMap::make(grown, 0);
    for (int channel = 0; channel < shape.channels; ++channel) {
      for (uint64_t bank = 0; bank < 2; ++bank) {
        const uint64_t begin = posts.banks_at(channel, map) + bank * PostsMap::stride_of(map);
        const uint64_t larger = posts.banks_at(channel) + bank * posts.stride;
        EXPECT_GE(begin, larger);
        EXPECT_LE(begin + PostsMap::stride_of(map), larger + posts.stride);
      }
    }
  });
}

}  // namespace
}  // namespace tw
