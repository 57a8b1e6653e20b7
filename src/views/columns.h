// Columns: column-major payloads of the layouts by expert, as grouped GEMMs read the block scales of their rows.
// grouped has one block of columns, [elements, M], expert_major one for each expert, [L, elements, M]. It takes a row
// and its place, and writes it as a column; M is the number of rows of a block rounded up so that columns begin at
// multiples of 16 bytes, which the tensor memory accelerator wants of a stride. The caller's output has this shape
// (tokenway.h, column_major), and the kernels of src/cuda/view write the same: it is part of the bits of results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tw {

struct Columns {
  int64_t rows = 0;            // M: the rows of a column, with its padding
  int32_t element_bytes = 0;   // 1, 2, 4 or 8; 0: the payload is row-major
  int32_t block_elements = 0;  // columns of an expert's block; 0: all experts share one

  constexpr bool wanted() const { return element_bytes != 0; }

  // The columns for so many rows, of all experts or (block_elements > 0) of each.
  static constexpr Columns of(int64_t rows, int32_t element_bytes, int32_t block_elements = 0) {
    const int64_t step = 16 / element_bytes;
    return {(rows + step - 1) / step * step, element_bytes, block_elements};
  }

  // How far an expert's block lies behind where its rows would begin by row, in elements of a column: what is added to
  // a row's place. `each`: rows of an expert.
  constexpr int64_t shift(int64_t expert, int64_t each) const {
    return block_elements == 0 ? 0 : expert * (block_elements * rows - each);
  }

  // Writes row `at`, which has row_bytes; NULL: zeros.
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
  // Elements are copied through memory: neither a row in the window nor the caller's tensor need be aligned to its
  // elements.
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
