// The paged KV pool in memory, and what an attention layer and a step look like to C++.
//
// Owns the layout. Promises: all bytes of a block are contiguous; 16 positions of one head are one contiguous unit.
// Must not know: who owns which block, how attention is computed.
//
// The pool is [blocks][layers][kv heads][units of a block], a unit being 16 positions of one head:
//   bf16: keys [d / 2][16][2], then values [8][d][2]: a lane is a position for the keys, a dimension for the values.
//   int8: keys [d / 4][16][4] offset by 128, then signed values [4][d][4], then 16 key scales and 16 value scales.
// A block may be larger than its layers: layers with other heads may lie beside them, which are then a pool of their
// own.
#pragma once

#include <cstdint>

#include "simd/simd.h"

namespace quire {

constexpr int kUnit = 16;

enum class KvKind : int32_t { kBf16 = 0, kInt8 = 1 };

struct KvPool {
  char* data;
  KvKind kind;
  int32_t units;  // per block
  int64_t num_blocks, num_layers, num_kv_heads, head_dim;
  int64_t block_bytes;  // from a block to the next one
};

struct AttentionShape {
  int32_t num_heads, num_kv_heads, head_dim;
  float scale;
  float norm_eps;
  float softcap;          // scaled scores s become softcap * tanh(s / softcap); 0: they stay
  int32_t row_norms;      // all of a row's q (k) heads are normed as one, with weights of their own
  int32_t v_norm;         // each value head is divided by the root of its mean square
  int32_t bidirectional;  // rows see what is behind them too
  int64_t window;         // positions a row sees, itself included, to each side that it sees; 0: all
  const float* q_norm;    // [head_dim], of a row [heads * head_dim], or null
  const float* k_norm;
  const float* sinks;  // [num_heads], of each query head one more score, whose value is zero; or null
};

struct AttentionStep {
  int64_t rows, sequences, table_width;
  const int64_t* positions;     // [rows]
  const int64_t* slots;         // [rows], block * block size + offset
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* context_lens;  // [sequences]
  const int32_t* block_tables;  // [sequences][table_width]
};

// Results of the exported functions besides 0 and 1 (no memory).
constexpr int32_t kOutOfRange = 2;  // a slot, block or position that does not exist

inline int64_t unit_bytes(KvKind kind, int64_t d) {
  if (kind == KvKind::kBf16) return 2 * kUnit * d * 2;
  return 2 * kUnit * d + 2 * kUnit * 4;
}

inline char* unit_address(const KvPool& pool, int64_t block, int64_t layer, int64_t head, int64_t unit) {
  const int64_t index = (layer * pool.num_kv_heads + head) * pool.units + unit;
  return pool.data + block * pool.block_bytes + index * unit_bytes(pool.kind, pool.head_dim);
}

}  // namespace quire
