// The pairs of a row and one of its experts, and the places of what belongs to them in memory.
//
// Must not know: products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/context.h"

namespace quire {

// Places of a call's arrays in one piece of memory.
class Places {
 public:
  int64_t take(int64_t bytes) {
    const int64_t at = end_;
    end_ += aligned(bytes);
    return at;
  }
  size_t end() const { return static_cast<size_t>(end_); }

 private:
  int64_t end_ = 0;
};

// The pairs of a row and one of its experts, in the order in which they are multiplied.
struct PairOrder {
  int64_t count;    // of those that have an expert
  int64_t* starts;  // [experts + 1], of each one's pairs
  int32_t* order;   // [count]: row * top_k + rank
  int32_t* place;   // [rows * top_k]: where in the order, or -1
  int32_t* hit;     // the experts that have rows
  int64_t num_hit;
  int64_t* offsets;  // [experts], of each one's placed rows, in bytes

  int64_t rows_of(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};

}  // namespace quire
