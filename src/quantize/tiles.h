// Where scales of a byte go: by row, or in tiles, as block-scaled matrix products of cuBLAS and CUTLASS read those of
// mxfp8 and nvfp4. For the host and for devices; it takes a row, a block of it and their scale.
//
// A tile is 128 rows by 4 scales, 512 bytes: row r and scale c lie at r % 32 * 16 + r / 32 * 4 + c. Tiles follow each
// other along the scales of their rows, then along the rows. Each block of rows that has a count of its own begins with
// a tile of its own. What fills a row's last tile is 0, since a product multiplies it with what it reads as zeros; what
// fills a tile's rows is not written. A change here changes the bits of results, and must be made in the oracle too
// (tests/py/test_tiles.py).
#pragma once

#include <cstdint>

#include "quantize/floats.h"

namespace tw::quantize {

inline constexpr int kTileRows = 128;
inline constexpr int kTileScales = 4;
inline constexpr int kTileBytes = kTileRows * kTileScales;

struct ByteScales {
  uint8_t* data;
  int64_t blocks;  // of a row
  int64_t each;    // rows of a block of rows
  bool tiled;

  TW_HOST_DEVICE void put(int64_t row, int64_t block, uint8_t scale) const {
    if (!tiled) {
      data[row * blocks + block] = scale;
      return;
    }
    const int64_t group = row / each;
    const int64_t at = row - group * each;
    const int64_t down = group * ((each + kTileRows - 1) / kTileRows) + at / kTileRows;
    const int64_t across = (blocks + kTileScales - 1) / kTileScales;
    uint8_t* const to =
        data + (down * across + block / kTileScales) * kTileBytes + at % 32 * 16 + at % kTileRows / 32 * kTileScales;
    to[block % kTileScales] = scale;
    for (int64_t c = block % kTileScales + 1; c < kTileScales && block + 1 == blocks; ++c) to[c] = 0;
  }
};

}  // namespace tw::quantize
