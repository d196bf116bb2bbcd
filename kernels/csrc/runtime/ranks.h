// Processes that compute one model together: each has some columns of every product, and gets the others'.
//
// Promises: columns are moved and never added up, so no bit depends on how many ranks there are. Must not know: what a
// column means, how the processes were started.
#pragma once

#include <cstdint>

namespace quire {

constexpr int kMostRanks = 64;

// Result of the exported functions besides 0, 1 (no memory) and kOutOfRange: another rank is gone or has stopped.
constexpr int32_t kRankLost = 3;

// The same where functions throw.
struct RankLost {};

// Completes data [rows, row_bytes] with the columns of the other ranks: this one's, the bytes [starts[rank],
// starts[rank + 1]) of each row, are there. All ranks call it with the same numbers. 0 or kRankLost.
using GatherColumns = int32_t (*)(void* self, char* data, int64_t rows, int64_t row_bytes, const int64_t* starts);

struct Ranks {
  int32_t rank = 0, size = 1;
  GatherColumns gather = nullptr;
  void* self = nullptr;
};

// Ranks of one machine, which exchange columns through a file of memory.
struct RankMemory;

}  // namespace quire
