// Column-major payloads of a grouped layout: [elements, M], as grouped GEMMs read the block scales of their rows.
// Columns begin at multiples of 16 bytes, which is what the tensor memory accelerator wants of a stride.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tw {

struct Columns {
  int64_t rows = 0;           // M, of a column with its padding
  int32_t element_bytes = 0;  // 1, 2, 4 or 8; 0: the payload is row-major

  constexpr bool wanted() const { return element_bytes != 0; }

  // For so many rows.
  static constexpr Columns of(int64_t rows, int32_t element_bytes) {
    const int64_t step = 16 / element_bytes;
    return {(rows + step - 1) / step * step, element_bytes};
  }

  // Writes row `at`, of row_bytes; NULL: zeros.
  void place(std::byte* out, int64_t at, const std::byte* row, uint64_t row_bytes) const {
    switch (element_bytes) {
      case 1:
        return place_as<uint8_t>(out, at, row, row_bytes);
      case 2:
        return place_as<uint16_t>(out, at, row, row_bytes);
      case 4:
        return place_as<uint32_t>(out, at, row, row_bytes);
      default:
        return place_as<uint64_t>(out, at, row, row_bytes);
    }
  }

 private:
  // Copied through memory: neither a row in the window nor the caller's tensor need be aligned to its elements.
  template <class Element>
  void place_as(std::byte* out, int64_t at, const std::byte* row, uint64_t row_bytes) const {
    for (uint64_t j = 0; j < row_bytes / sizeof(Element); ++j) {
      Element value{};
      if (row != nullptr) std::memcpy(&value, row + j * sizeof value, sizeof value);
      std::memcpy(out + (static_cast<int64_t>(j) * rows + at) * static_cast<int64_t>(sizeof value), &value,
                  sizeof value);
    }
  }
};

}  // namespace tw
